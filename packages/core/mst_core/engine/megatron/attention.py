"""The two modules of a layer that megatron-core's local spec lacks for sequence parallelism, windows and MLA.

Shapes: S sequence, B batch, N heads of this rank, G key-value groups of this rank, D head size.
"""

from __future__ import annotations

import math
from typing import Any

import torch
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
    """Causal core attention over torch's scaled_dot_product_attention, with grouped queries and sliding windows."""

    def __init__(self, config: Any, layer_number: int, softmax_scale: float | None = None, **_: object) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window = config.window_size[0] if windowed else None

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **_: object) -> Tensor:
        """(S, B, N, D), (S, B, G, D), (S, B, G, E) -> (S, B, N * E), E = D but for MLA.

        Causal, so ``attention_mask`` is not needed.
        """
        length, batch, heads = query.shape[:3]
        q, k, v = (part.permute(1, 2, 0, 3) for part in (query, key, value))
        mask = None
        if self.window is not None and length > self.window + 1:
            ones = torch.ones(length, length, dtype=torch.bool, device=query.device)
            mask = ones.tril() & ones.triu(-self.window)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=k.shape[1] != heads
        )
        return out.permute(2, 0, 1, 3).reshape(length, batch, -1)
