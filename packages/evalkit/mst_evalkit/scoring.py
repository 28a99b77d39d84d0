"""Log-probabilities of answers under a transformers model.

Candidates that share a prompt are scored in one forward pass: their tokens stand one branch after the other behind the
prompt, with the positions they would have alone, and each branch sees the prompt and itself. The result is that of
separate passes; the prompt is computed once.

Shapes: B rows of a batch, T tokens of the longest, P positions where logits are needed, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.utils import logging

from mst_core import devices
from mst_core.data.render import Sample
from mst_core.engine import scalar
from mst_core.engine.batches import collate
from mst_core.errors import InputError, RunError

LOGIT_BYTES = 2_000_000_000
"""Rows of a batch are reduced until their fp32 logits fit into this."""


@dataclass(frozen=True)
class Arranged:
    """Candidates as one row. Lists are as long as the row, but for ``targets``."""

    tokens: list[int]
    positions: list[int]
    branches: list[int]
    """0 for what all share, 1, 2, ... for each candidate's own tokens."""
    targets: list[list[tuple[int, int]]]
    """For each candidate (index in the row whose logits predict, the token predicted) of each learnt token."""


def arrange(samples: Sequence[Sample]) -> Arranged:
    """Candidates behind the beginning that they share. Tokens that predict nothing that is scored are left out."""
    shortest = min(sample.mask.index(1, 1) for sample in samples)
    first = samples[0].tokens
    shared = next((i for i in range(shortest) if any(s.tokens[i] != first[i] for s in samples)), shortest)
    tokens, positions, branches = first[:shared], list(range(shared)), [0] * shared
    targets = []
    for number, sample in enumerate(samples, start=1):
        # Index in the row of the sample's token j: itself before the branch, then counted from where it starts.
        start = len(tokens) - shared
        learnt = [j for j, mask in enumerate(sample.mask) if mask and j]
        targets.append([(j - 1 if j <= shared else start + j - 1, sample.tokens[j]) for j in learnt])
        own = sample.tokens[shared : learnt[-1]]
        tokens += own
        positions += range(shared, shared + len(own))
        branches += [number] * len(own)
    return Arranged(tokens, positions, branches, targets)


def load_model(directory: Path, precision: str, *, scores: bool = False) -> Any:
    """The model (``scores``: a reward model), every weight accounted for. Raises InputError where transformers would
    guess or leave out."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    # What it would print is checked below, and progress on stderr is the console's.
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        loader = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
        model, info = loader.from_pretrained(
            directory,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            attn_implementation="sdpa",
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported with the others below, by name
        )
    except (ValueError, KeyError, OSError, RuntimeError, ImportError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise InputError(f"transformers does not load it: {reason}", where=directory) from error
    for kind, words in (
        ("missing_keys", "does not hold"),
        ("unexpected_keys", "holds, but the model has no place for,"),
        ("mismatched_keys", "holds in another shape"),
    ):
        names = sorted(str(name[0]) if isinstance(name, tuple) else str(name) for name in info[kind])
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise InputError(f"{words} {names[0]}{more}", where=directory, hint="convert or merge it again")
    if scores:
        scalar.per_token(model)
    return model.to(devices.best()).eval()


def check_tokens(model: Any, groups: Sequence[Sequence[Sample]], directory: Path) -> None:
    """Refuse a tokenizer that gives ids beyond the model's embeddings (an index error in the middle otherwise)."""
    rows = int(model.get_input_embeddings().weight.shape[0])
    largest = max(max(sample.tokens) for group in groups for sample in group)
    if largest >= rows:
        raise InputError(
            f"the tokenizer gives the id {largest}, the model has embeddings for {rows}",
            where=directory,
            hint="the tokenizer is of another model, or tokens were added to it and not to the model",
        )


def windowed(model: Any) -> bool:
    """Whether attention reaches back only so far: then branches behind one prompt would see the wrong tokens."""
    return bool(getattr(model.config, "sliding_window", None))


@torch.inference_mode()
def score(
    model: Any,
    groups: Sequence[Sequence[Sample]],
    batch_size: int,
    done: Callable[[int], None] = lambda rows: None,
) -> list[list[list[float]]]:
    """For each group, for each of its samples: the log-probability (nats) of each learnt token.

    Independent of ``batch_size`` but for rounding. Raises RunError where a probability is not a number.
    """
    tree = not windowed(model)
    units = [
        (g, part, arrange(samples))
        for g, group in enumerate(groups)
        for part, samples in ([(0, group)] if tree else [(i, [sample]) for i, sample in enumerate(group)])
    ]
    # Longest first: what does not fit into memory fails at once.
    units.sort(key=lambda unit: (-len(unit[2].tokens), unit[0], unit[1]))
    found: dict[tuple[int, int], list[list[float]]] = {}
    for batch in _batches(units, batch_size, int(model.get_output_embeddings().weight.shape[0])):
        try:
            scored = _forward(model, [arranged for _, _, arranged in batch])
        except torch.OutOfMemoryError as error:
            raise RunError("the device's memory is too small for a batch", hint="a smaller --batch-size") from error
        found.update({(g, part): logps for (g, part, _), logps in zip(batch, scored, strict=True)})
        done(len(batch))
    parts = [1 if tree else len(group) for group in groups]
    return [[logps for part in range(parts[g]) for logps in found[g, part]] for g in range(len(groups))]


@torch.inference_mode()
def rewards(
    model: Any, samples: Sequence[Sample], batch_size: int, done: Callable[[int], None] = lambda rows: None
) -> list[float]:
    """The score of each sample (scalar.read_at). Raises RunError where one is not a number."""
    order = sorted(range(len(samples)), key=lambda index: (-len(samples[index].tokens), index))
    found: dict[int, float] = {}
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        batch = collate([samples[index] for index in chosen])
        # Padding stands on the right, and attention is causal: no mask is needed.
        values_BT1 = model(input_ids=batch.tokens_BT.to(model.device)).logits
        at = [scalar.read_at(samples[index].tokens, model.config.pad_token_id) for index in chosen]
        values = values_BT1[range(len(chosen)), at, 0].tolist()
        if not all(map(math.isfinite, values)):
            raise RunError("the model gives a score that is not a number", hint="--precision fp32")
        found.update(zip(chosen, values, strict=True))
        done(len(chosen))
    return [found[index] for index in range(len(samples))]


Unit = tuple[int, int, Arranged]


def _batches(units: Sequence[Unit], batch_size: int, vocab: int) -> Iterator[list[Unit]]:
    start = 0
    while start < len(units):
        predicting = len({index for part in units[start][2].targets for index, _ in part})
        rows = max(1, min(batch_size, LOGIT_BYTES // (4 * vocab * max(1, predicting))))
        yield list(units[start : start + rows])
        start += rows


def _forward(model: Any, rows: Sequence[Arranged]) -> list[list[list[float]]]:
    device = model.device
    longest = max(len(row.tokens) for row in rows)
    tokens_BT = torch.zeros((len(rows), longest), dtype=torch.int64)
    positions_BT = torch.zeros((len(rows), longest), dtype=torch.int64)
    branches_BT = torch.full((len(rows), longest), -1, dtype=torch.int64)
    for b, row in enumerate(rows):
        for target, values in ((tokens_BT, row.tokens), (positions_BT, row.positions), (branches_BT, row.branches)):
            target[b, : len(values)] = torch.tensor(values, dtype=torch.int64)
    # Padding stands on the right, so without branches plain causal attention is right and needs no mask.
    branched = any(max(row.branches) > 1 or len(row.targets) > 1 for row in rows)
    mask = _sees(branches_BT).to(device) if branched else None
    needed = sorted({index for row in rows for part in row.targets for index, _ in part})
    logits_BPV = model(
        input_ids=tokens_BT.to(device),
        attention_mask=mask,
        position_ids=positions_BT.to(device),
        logits_to_keep=torch.tensor(needed, device=device),
        use_cache=False,
    ).logits
    total_BP = logits_BPV.float().logsumexp(-1)
    place = {index: p for p, index in enumerate(needed)}
    scored: list[list[list[float]]] = []
    for b, row in enumerate(rows):
        scored.append([])
        for part in row.targets:
            at = torch.tensor([place[index] for index, _ in part], device=device)
            token = torch.tensor([token for _, token in part], device=device)
            logp = (logits_BPV[b, at, token].float() - total_BP[b, at]).tolist()
            if not all(map(math.isfinite, logp)):
                raise RunError("the model gives a probability that is not a number", hint="--precision fp32")
            scored[b].append(logp)
    return scored


def _sees(branches_BT: Tensor) -> Tensor:
    """Bool [B, 1, T, T]: which token (last axis) each token sees. Padding sees its like, so that no row is empty."""
    length = branches_BT.shape[1]
    causal = torch.ones((length, length), dtype=torch.bool).tril()
    same = branches_BT[:, :, None] == branches_BT[:, None, :]
    return (causal & (same | (branches_BT == 0)[:, None, :]))[:, None]
