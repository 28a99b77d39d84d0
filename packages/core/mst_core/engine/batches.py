"""Samples as the padded tensors of a Batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import overload

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
    packed = None
    if any(sample.parts for sample in samples):
        packed = tuple(sample.parts or (len(sample.tokens),) for sample in samples)
    lengths_B = torch.tensor([len(sample.tokens) for sample in samples], dtype=torch.int64)
    more = dict(extra or {})
    if any(sample.desirable is not None for sample in samples):
        more["desirable_B"] = torch.tensor([float(bool(sample.desirable)) for sample in samples])
    if any(sample.margin is not None for sample in samples):
        more["margin_B"] = torch.tensor([sample.margin or 0.0 for sample in samples])
    return Batch(tokens_BT, mask_BT, lengths_B, more, packed)


def in_a_row(batch: Batch) -> tuple[Batch, Tensor]:
    """Its samples one after another in one row without padding, the longest first; and where in B * T each token of
    the row stands, (N,)."""
    width, lengths = batch.tokens_BT.shape[1], batch.packed or [(length,) for length in batch.lengths_B.tolist()]
    spots = [
        (row * width + end - length, length)
        for row, parts in enumerate(lengths)
        for length, end in zip(parts, accumulate(parts), strict=True)
    ]
    spots.sort(key=lambda spot: -spot[1])
    places_N = torch.cat([torch.arange(start, start + length) for start, length in spots])
    tokens_1N, mask_1N = (part.flatten()[places_N].unsqueeze(0) for part in (batch.tokens_BT, batch.mask_BT))
    sizes = tuple(length for _, length in spots)
    return Batch(tokens_1N, mask_1N, torch.tensor([len(places_N)]), packed=(sizes,)), places_N


def spread(logp_1N: Tensor, places_N: Tensor, shape: torch.Size) -> Tensor:
    """logp_BT of a batch's row, 0 where it pads."""
    zeros = logp_1N.new_zeros(shape.numel())
    return zeros.index_copy(0, places_N.to(zeros.device), logp_1N.flatten()).view(shape)


def positions(batch: Batch) -> Tensor:
    """positions_BT of a packed batch, int64 on the CPU: from 0 in each sample, and in what pads a row."""
    length = batch.tokens_BT.shape[1]
    rows = [(*parts, length - sum(parts)) for parts in batch.packed or ()]
    return torch.stack([torch.cat([torch.arange(part) for part in parts]) for parts in rows])


@dataclass(frozen=True)
class Singles(Sequence[tuple[Sample, ...]]):
    """Samples as units of one, made when they are asked for."""

    samples: Sequence[Sample]

    def __len__(self) -> int:
        return len(self.samples)

    @overload
    def __getitem__(self, index: int) -> tuple[Sample, ...]: ...

    @overload
    def __getitem__(self, index: slice) -> Singles: ...

    def __getitem__(self, index: int | slice) -> tuple[Sample, ...] | Singles:
        return Singles(self.samples[index]) if isinstance(index, slice) else (self.samples[index],)
