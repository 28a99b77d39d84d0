"""Several samples in one row of the sequence's length, by first fit decreasing within windows of a seeded order.

The rows are made once and are the same in every epoch; which comes when is the order's business (order.py), so any step
is known without walking through the run. A packed row is a Sample whose ``parts`` are the lengths of what stands in it:
engines keep the parts apart (engine/seam.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

from mst_core.data.order import permutation
from mst_core.data.render import Sample

WINDOW = 1024
"""Samples that are packed together: more fill the rows better, and cost the square of their number."""


def bins(lengths: Sequence[int], size: int, seed: int, window: int = WINDOW) -> list[list[int]]:
    """Which samples stand in which row, by index; each once, and no row longer than ``size``."""
    order = permutation(len(lengths), f"{seed}/pack")
    found: list[list[int]] = []
    for start in range(0, len(order), window):
        drawn = order[start : start + window]
        rows: list[list[int]] = []
        room: list[int] = []
        for index in sorted(drawn, key=lambda index: -lengths[index]):  # stable: equal lengths as they were drawn
            length = lengths[index]
            row = next((number for number, left in enumerate(room) if left >= length), len(rows))
            if row == len(rows):
                rows.append([])
                room.append(size)
            rows[row].append(index)
            room[row] -= length
        found += rows
    return found


@dataclass(frozen=True)
class Packed(Sequence[Sample]):
    """The packed rows of ``samples``, each made when it is asked for."""

    samples: Sequence[Sample]
    bins: Sequence[Sequence[int]]

    def __len__(self) -> int:
        return len(self.bins)

    @overload
    def __getitem__(self, index: int) -> Sample: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Sample]: ...

    def __getitem__(self, index: int | slice) -> Sample | Sequence[Sample]:
        if isinstance(index, slice):
            return Packed(self.samples, self.bins[index])
        parts = [self.samples[number] for number in self.bins[index]]
        return Sample(
            [token for part in parts for token in part.tokens],
            # What stands before a sample in its row is no context for its first token.
            [learnt for part in parts for learnt in (0, *part.mask[1:])],
            any(part.truncated for part in parts),
            tuple(len(part.tokens) for part in parts),
        )
