"""The order of rows: seeded, the same everywhere, and known for any epoch without walking through the ones before."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Order:
    """The rows of each epoch, from ``seed`` alone (no torch or numpy generator).

    Without shares an epoch is a permutation of ``count`` rows, or ``size`` of an endless row of permutations, so that
    the epochs together see every row equally often. With shares the rows are those of sources one after another: each
    source has its own endless row of permutations, of which every epoch takes its share of ``size``.
    """

    count: int
    seed: int
    size: int = -1
    """Rows of an epoch; by default ``count``."""
    shares: Sequence[tuple[int, float]] = ()
    """(rows, weight) of each source; the rows sum to ``count``."""

    def __post_init__(self) -> None:
        if self.size < 0:
            object.__setattr__(self, "size", self.count)

    def epoch(self, number: int) -> list[int]:
        """The rows of epoch 0, 1, ..., in their order."""
        if not self.shares:
            return _stretch(self.count, str(self.seed), number * self.size, self.size)
        found: list[int] = []
        first = 0
        for source, ((rows, _), quota) in enumerate(zip(self.shares, self.quotas(), strict=True)):
            drawn = _stretch(rows, f"{self.seed}/source {source}", number * quota, quota)
            found += [first + index for index in drawn]
            first += rows
        return [found[index] for index in permutation(len(found), f"{self.seed}/{number}")]

    def quotas(self) -> list[int]:
        """How many rows of an epoch each source gives: its share, rounded so that they sum to ``size``."""
        total = sum(weight for _, weight in self.shares)
        exact = [self.size * weight / total for _, weight in self.shares]
        quotas = [int(share) for share in exact]
        by_rest = sorted(range(len(exact)), key=lambda index: (quotas[index] - exact[index], index))
        for index in by_rest[: self.size - sum(quotas)]:
            quotas[index] += 1
        return quotas

    def batches(self, size: int, *, start: int = 0) -> Iterator[list[int]]:
        """Global batches without end, from batch ``start`` on, so a resumed run goes on where it was.

        An epoch's last batch is smaller where ``size`` does not divide: no row is dropped.
        """
        number, skipped = divmod(start, -(-self.size // size)) if self.size else (0, 0)
        while self.size:
            indices = self.epoch(number)
            for begin in range(skipped * size, self.size, size):
                yield indices[begin : begin + size]
            number, skipped = number + 1, 0


def _stretch(count: int, seed: str, start: int, size: int) -> list[int]:
    """``size`` of the endless row of permutations of ``count``, from place ``start`` on."""
    found: list[int] = []
    while len(found) < size:
        number, begin = divmod(start + len(found), count)
        found += permutation(count, f"{seed}/{number}")[begin : begin + size - len(found)]
    return found


def permutation(count: int, seed: str) -> list[int]:
    """The numbers below ``count`` in an order that ``seed`` alone decides."""
    indices = list(range(count))
    # Fisher and Yates over random(): of all its methods, the one whose values Python promises to keep.
    draw = random.Random(seed).random
    for last in range(count - 1, 0, -1):
        other = int(draw() * (last + 1))
        indices[last], indices[other] = indices[other], indices[last]
    return indices
