"""Floating-point operations of a training step, counted from a model's rows, and what devices can do: for MFU.

Of a sequence of n tokens, forward and backward::

    6 P n  +  3 sum over layers of  2 heads (d_qk + d_v) pairs(n)          pairs(n) = n^2 / 2

P are the elements of all matrices that a token is multiplied with: not the embedding, but the head (a tied one too),
and of experts only those that it is sent to. Attention is causal, so half of n^2; of a window W it is W n - W^2 / 2.
Frozen weights (LoRA) cost 4 P n, as nothing is computed for their own gradients, and the adapters 6 of their own.
Recomputation and padding are work, not progress: neither counts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

from mst_core import families
from mst_core.families import Model
from mst_core.runspec import RunSpec

PEAKS = (
    (r"\bB200\b", 2250.0),
    (r"\bH[12]00 NVL\b", 835.0),
    (r"\bH100 PCIe\b", 756.0),
    (r"\bH[12]00\b", 989.0),
    (r"\bA100\b", 312.0),
    (r"\bL40S\b", 362.0),
    (r"\bL4\b", 121.0),
    (r"\bA10\b", 125.0),
)
"""Dense bf16 and fp16 TFLOP/s by device name, from NVIDIA's data sheets (half of what they say with sparsity)."""


def peak(device: str, precision: str | None) -> float | None:
    """TFLOP/s of a device in a half precision; None where they are not known."""
    if precision == "fp32":
        return None  # TF32 or not is torch's setting, and another number
    return next((tflops for pattern, tflops in PEAKS if re.search(pattern, device)), None)


class Cost(NamedTuple):
    """What tokens cost.

    matrices   elements that a token is multiplied with; ``frozen``: without gradients of their own
    adapters   elements of LoRA's A and B
    attention  (heads x (d_qk + d_v), window or None) of each layer
    """

    matrices: float
    frozen: bool
    adapters: int
    attention: tuple[tuple[int, int | None], ...]

    def step(self, lengths: Sequence[int]) -> float:
        """FLOPs of sequences of so many tokens, forward and backward."""
        linear = (4 if self.frozen else 6) * self.matrices + 6 * self.adapters
        total = linear * sum(lengths)
        for size, window in set(self.attention):
            layers = self.attention.count((size, window))
            total += layers * 6 * size * sum(_pairs(length, window) for length in lengths)
        return total


def _pairs(length: int, window: int | None) -> float:
    seen = length if window is None else min(window, length)
    return seen * length - seen * seen / 2


def cost(model: Model, config: dict[str, Any], spec: RunSpec) -> Cost | None:
    """What a token of ``model`` costs under ``spec``; None where its config does not say how many experts it meets."""
    text = {**config, **(config.get("text_config") or {})}
    experts = model.dims.more.get("experts")
    active: int = text.get("num_experts_per_tok") or text.get("experts_per_token") or 0
    if experts and not active:
        return None
    targets = spec.targets if spec.lora_rank else []
    matrices, adapters = 0.0, 0
    for task in families.tasks(model):
        embeds = task.key.endswith("embedding.word_embeddings.weight")
        if task.key.startswith("mtp.") or (embeds and not model.tied):
            continue
        share = active / experts if task.experts and experts else 1.0
        for held in task.hf:
            if len(held.shape) < 2:
                continue
            matrices += share * prod(held.shape)
            if held.name.removesuffix(".weight").rpartition(".")[2] in targets:
                adapters += (spec.lora_rank or 0) * (held.rows + held.columns)
    return Cost(matrices, spec.lora_rank is not None, adapters, _attention(model, text))


def _attention(model: Model, text: dict[str, Any]) -> tuple[tuple[int, int | None], ...]:
    dims = model.dims
    keys = dims.more["qk_nope"] + dims.more["qk_rope"] if "qk_nope" in dims.more else dims.head_dim
    window = text.get("sliding_window") if text.get("use_sliding_window", True) else None
    kinds = text.get("layer_types") or ["sliding_attention"] * dims.layers
    return tuple(
        (dims.heads * (keys + dims.head_dim), window if kind == "sliding_attention" else None) for kind in kinds
    )
