"""The order of rows: seeded, the same everywhere, and known for any epoch without walking through the ones before."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Order:
    """A permutation of ``count`` rows for each epoch, from ``seed`` alone (no torch or numpy generator)."""

    count: int
    seed: int

    def epoch(self, number: int) -> list[int]:
        """The order of epoch 0, 1, ..."""
        indices = list(range(self.count))
        # Fisher and Yates over random(): of all its methods, the one whose values Python promises to keep.
        draw = random.Random(f"{self.seed}/{number}").random
        for last in range(self.count - 1, 0, -1):
            other = int(draw() * (last + 1))
            indices[last], indices[other] = indices[other], indices[last]
        return indices

    def batches(self, size: int, *, start: int = 0) -> Iterator[list[int]]:
        """Global batches without end, from batch ``start`` on, so a resumed run goes on where it was.

        An epoch's last batch is smaller where ``size`` does not divide: no row is dropped.
        """
        number, skipped = divmod(start, -(-self.count // size)) if self.count else (0, 0)
        while self.count:
            indices = self.epoch(number)
            for begin in range(skipped * size, self.count, size):
                yield indices[begin : begin + size]
            number, skipped = number + 1, 0
