"""Choosing tokens. Shapes: B rows of the batch, V vocabulary, K best.

A row's randomness is one uniform number a token, drawn from the row's own generator: what a row says does not depend
on its neighbours in the batch, and the same seed says the same.
"""

from __future__ import annotations

import hashlib
import random
import secrets

import torch


def generators(seed: int | None, prompt: int, n: int) -> list[random.Random]:
    """One generator for each of ``n`` choices of the ``prompt``-th prompt; without a seed they are unpredictable."""
    root = secrets.token_hex(16) if seed is None else str(seed)
    digests = [hashlib.blake2b(f"{root}/{prompt}/{choice}".encode(), digest_size=8).digest() for choice in range(n)]
    return [random.Random(int.from_bytes(digest)) for digest in digests]


def choose(logits_BV: torch.Tensor, temperatures: list[float], top_ps: list[float], draws: list[float]) -> list[int]:
    """The next token of each row. Temperature 0 is greedy; ``draws`` are uniform in [0, 1)."""
    chosen = logits_BV.argmax(dim=-1)
    rows = [row for row, temperature in enumerate(temperatures) if temperature > 0]
    if rows:
        device = logits_BV.device
        heat = torch.tensor([temperatures[row] for row in rows], dtype=torch.float64, device=device)
        draw = torch.tensor([draws[row] for row in rows], dtype=torch.float64, device=device)
        probs = torch.softmax(logits_BV[rows].double() / heat[:, None], dim=-1)
        top_p = [top_ps[row] for row in rows]
        if min(top_p) < 1:
            probs = _nucleus(probs, torch.tensor(top_p, dtype=torch.float64, device=device))
        chosen[rows] = _invert(probs, draw)
    picked: list[int] = chosen.tolist()
    return picked


def _nucleus(probs_BV: torch.Tensor, top_p_B: torch.Tensor) -> torch.Tensor:
    """Zero all but the smallest set of tokens whose probability reaches top_p; the likeliest always stays."""
    ordered, order = probs_BV.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(dim=-1) - ordered
    keep = (before < top_p_B[:, None]) | (top_p_B[:, None] >= 1)
    keep[:, 0] = True
    return torch.zeros_like(probs_BV).scatter(-1, order, ordered * keep)


def _invert(probs_BV: torch.Tensor, draw_B: torch.Tensor) -> torch.Tensor:
    """The token in which the cumulative probability passes ``draw`` (as a share of all that is left)."""
    cumulative = probs_BV.cumsum(dim=-1)
    target = draw_B[:, None] * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, target, right=True).squeeze(-1)
    last = (probs_BV > 0).cumsum(dim=-1).argmax(dim=-1)  # rounding must not pass the last possible token
    return torch.minimum(index, last)


def top(logp_V: torch.Tensor, k: int) -> list[tuple[int, float]]:
    """The ``k`` likeliest tokens and their log-probabilities, best first."""
    if k == 0:
        return []
    values, indices = logp_V.topk(min(k, logp_V.shape[-1]))
    return list(zip(indices.tolist(), values.tolist(), strict=True))
