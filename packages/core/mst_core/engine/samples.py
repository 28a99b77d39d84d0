"""Attention of the samples that stand in one row, each for itself, behind transformers' attention interface.

transformers' own way, a mask of the row's square made from the positions, costs the square of the row's length in time
and memory. Here each sample is a causal attention of its own, as megatron's is (megatron/attention.py).

Shapes: B 1, H heads, N tokens of the row, T tokens of its longest sample, D head size.
"""

from __future__ import annotations

from itertools import count
from typing import Any, Self

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

_NUMBER = count()


class Samples:
    """What a model's attention is told of the rows. ``sizes``: of the row that is computed, the samples' lengths, the
    longest first; they stay until the next forward pass, for layers may be computed again in the backward pass."""

    def __init__(self) -> None:
        self.sizes: tuple[int, ...] = ()
        self.name = f"mst-samples-{next(_NUMBER)}"
        AttentionInterface.register(self.name, torch.compiler.disable(self._attend))
        AttentionMaskInterface.register(self.name, self._mask)

    @classmethod
    def of(cls, model: Any) -> Self | None:
        """Take over ``model``'s attention; None where it is not torch's SDPA, or not called through the interface."""
        if model.config._attn_implementation != "sdpa" or not model._supports_attention_backend:
            return None
        made = cls()
        model.set_attn_implementation(made.name)
        return made

    def _attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        """(B, H, N, D) of each -> (B, N, H, D). ``attention_mask``: that of the longest sample, see ``_mask``."""
        parts = zip(*(part.split(self.sizes, 2) for part in (query, key, value)), self.sizes, strict=True)
        found = []
        for q, k, v, size in parts:
            mask = None if attention_mask is None else attention_mask[:, :, :size, :size]
            found.append(sdpa_attention_forward(module, q, k, v, mask, **options)[0])
        return torch.cat(found, 1), None

    def _mask(self, q_length: int, kv_length: int, **given: Any) -> Tensor | None:
        """(B, 1, T, T) of the longest sample, which stands first: what a shorter one sees is a corner of it. None where
        it is the causal mask, and no window or the like."""
        longest = self.sizes[0]
        mask = sdpa_mask(q_length=longest, kv_length=longest, **given)
        if mask is None or torch.equal(mask, mask.new_ones(mask.shape).tril()):
            return None
        return mask
