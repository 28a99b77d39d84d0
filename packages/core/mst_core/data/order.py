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
        random.Random(f"{self.seed}/{number}").shuffle(indices)
        return indices

    def batches(self, size: int) -> Iterator[list[int]]:
        """Global batches without end. An epoch's last batch is smaller where ``size`` does not divide: no row is dropped."""
        number = 0
        while True:
            indices = self.epoch(number)
            for start in range(0, self.count, size):
                yield indices[start : start + size]
            number += 1
