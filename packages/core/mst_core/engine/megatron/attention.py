"""The two modules that megatron-core's local spec lacks for sequence and context parallelism, windows and MLA.

Shapes: S tokens of this rank, B batch, N heads of this rank, G key-value groups of this rank, D and E head sizes.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor
from torch.nn import functional as F


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm with the arguments Megatron gives, and a weight that says when it sees sequence shards.

    Under sequence parallelism each tensor parallel rank normalises its own tokens, so the weight's gradient must be
    summed over the ranks: Megatron does that for parameters with ``sequence_parallel`` set (and, by their names, for
    the norms of queries and keys, where each rank sees its own heads).
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class Attention(MegatronModule):
    """Causal core attention over torch's scaled_dot_product_attention: grouped queries, sliding windows, values of
    another size than keys (MLA), context parallel rows (cut.py: keys and values of the whole row are gathered)."""

    def __init__(self, config: Any, layer_number: int, softmax_scale: float | None = None, **_: object) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window = config.window_size[0] if windowed else None

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
        packed_seq_params: Any = None, **_: object,
    ) -> Tensor:  # fmt: skip
        """(S, B, N, D), (S, B, G, D), (S, B, G, E) -> (S, B, N * E). Causal, so ``attention_mask`` is not needed.

        Packed, without the axis B: each segment for itself.
        """
        if packed_seq_params is not None:
            ends = packed_seq_params.cu_seqlens_q.tolist()
            sizes = [end - start for start, end in pairwise(ends)]
            parts = zip(*(part.unsqueeze(1).split(sizes) for part in (query, key, value)), strict=True)
            return torch.cat([self.forward(q, k, v, None) for q, k, v in parts]).squeeze(1)
        length, batch, heads, _size = query.shape
        mask = None
        if self.config.context_parallel_size > 1:
            group = parallel_state.get_context_parallel_group()
            key, value = (gather_from_sequence_parallel_region(part, group=group) for part in (key, value))
            mask = self._mask(*_places(length, self.config.context_parallel_size, query.device))
        elif self.window is not None and length > self.window + 1:
            places = torch.arange(length, device=query.device)
            mask = self._mask(places, places)
        q, k, v = (part.permute(1, 2, 0, 3) for part in (query, key, value))
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=k.shape[1] != heads
        )
        return out.permute(2, 0, 1, 3).reshape(length, batch, -1)

    def _mask(self, of_q: Tensor, of_k: Tensor) -> Tensor:
        """(queries, keys) bool, from their places in the row."""
        behind = of_q[:, None] - of_k[None, :]
        return (behind >= 0) if self.window is None else (behind >= 0) & (behind <= self.window)


def _places(length: int, cp: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Places in the row of this rank's tokens, and of all ranks' in the order they are gathered."""
    each = [positions(rank, cp, length, device) for rank in range(cp)]
    return each[parallel_state.get_context_parallel_rank()], torch.cat(each)


def positions(rank: int, cp: int, length: int, device: torch.device) -> Tensor:
    """(C,) int64: where in the row the ``length`` tokens of a context parallel rank stand."""
    half = length // 2
    first = torch.arange(rank * half, (rank + 1) * half, device=device)
    return torch.cat([first, torch.arange((2 * cp - 1 - rank) * half, (2 * cp - rank) * half, device=device)])
