"""Samples as the padded tensors of a Batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mst_core.data.render import Sample
from mst_core.engine.seam import Batch


def interleave(pairs: Sequence[tuple[Sample, Sample]]) -> list[Sample]:
    """chosen, rejected, chosen, rejected, ...: the order in which the seam wants pairs."""
    return [sample for pair in pairs for sample in pair]


def collate(
    samples: Sequence[Sample], extra: Mapping[str, Tensor] | None = None, pad_id: int = 0, multiple: int = 1
) -> Batch:
    """Samples padded on the right to the longest, rounded up to a multiple. The padding's id never matters: its mask
    is 0 and attention is causal."""
    longest = max(len(sample.tokens) for sample in samples)
    longest += -longest % multiple
    tokens_BT = torch.full((len(samples), longest), pad_id, dtype=torch.int64)
    mask_BT = torch.zeros((len(samples), longest), dtype=torch.float32)
    for row, sample in enumerate(samples):
        tokens_BT[row, : len(sample.tokens)] = torch.tensor(sample.tokens, dtype=torch.int64)
        mask_BT[row, : len(sample.mask)] = torch.tensor(sample.mask, dtype=torch.float32)
    mask_BT[:, 0] = 0.0  # nothing precedes the first token, so it has no probability
    lengths_B = torch.tensor([len(sample.tokens) for sample in samples], dtype=torch.int64)
    return Batch(tokens_BT, mask_BT, lengths_B, dict(extra or {}))
