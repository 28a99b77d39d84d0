"""KTO's estimate of the divergence of the policy from its reference, over the rows of a global step.

Ethayarajh et al. 2024, arXiv 2402.01306: z = max(0, mean of log p(y' | x) - log p_reference(y' | x)), where y' is the
answer of another row of the same step: the next one, of the last row the first; past itself, where a row of a small
source stands twice in a step. The mean is over the whole step, on all data parallel ranks, before it is cut at 0:
micro-batches and ranks do not change it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mst_core.data.render import Sample
from mst_core.engine.seam import Batch, Engine

Unit = tuple[Sample, ...]
Batches = Callable[[Sequence[Unit]], Sequence[Batch]]
"""This data parallel rank's micro-batches of some units."""


class Divergence:
    """The estimates of a run's steps. The reference's side of them (``totals``) was scored before the first."""

    def __init__(
        self,
        engine: Engine,
        units: Sequence[Unit],
        steps: Sequence[Sequence[int]],
        batches: Batches,
        seq_length: int | None,
        totals: Sequence[float],
    ) -> None:
        """``steps``: the indices of the units of each global step, two or more."""
        self._engine, self._steps, self._batches, self._totals = engine, steps, batches, totals
        self._units, self._seq_length = units, seq_length

    def of(self, step: int) -> float:
        """z of a step under the policy as it is now. Every rank calls it."""
        found, rows = 0.0, Mismatched(self._units, [self._steps[step]], self._seq_length)
        for batch in self._batches([rows[number] for number in range(len(rows))]):
            logp_BT = self._engine.score(batch)
            found += float((logp_BT * batch.mask_BT).sum(1).double().sum())
        mean = (self._engine.total(found) - self._totals[step]) / len(self._steps[step])
        return max(0.0, mean)


class Mismatched:
    """The mismatched rows of steps, one step after another, each made when it is asked for."""

    def __init__(self, units: Sequence[Unit], steps: Sequence[Sequence[int]], seq_length: int | None) -> None:
        self._units, self._seq_length = units, seq_length
        self._turned = [(x, _another(chosen, place)) for chosen in steps for place, x in enumerate(chosen)]

    def __len__(self) -> int:
        return len(self._turned)

    def __getitem__(self, number: int) -> Unit:
        x, y = self._turned[number]
        return (mismatched(self._units[x][0], self._units[y][0], self._seq_length),)


def _another(chosen: Sequence[int], place: int) -> int:
    """The next of ``chosen`` that is not the one at ``place``; itself where all are."""
    after = (chosen[(place + step) % len(chosen)] for step in range(1, len(chosen)))
    return next((index for index in after if index != chosen[place]), chosen[place])


def mismatched(prompt: Sample, answer: Sample, seq_length: int | None) -> Sample:
    """The prompt of one row with the answer of another, cut at its right end to ``seq_length`` tokens (None: whole)."""
    ends, begins = prompt.mask.index(1), answer.mask.index(1)
    tokens = [*prompt.tokens[:ends], *answer.tokens[begins:]][:seq_length]
    mask = [*prompt.mask[:ends], *answer.mask[begins:]][:seq_length]
    return Sample(tokens, mask)
