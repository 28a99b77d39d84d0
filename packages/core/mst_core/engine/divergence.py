"""KTO's estimate of the divergence of the policy from its reference, over the rows of a global step.

Ethayarajh et al. 2024, arXiv 2402.01306: z = max(0, mean of log p(y' | x) - log p_reference(y' | x)), where y' is the
answer of another row of the same step: the next one, of the last row the first. The mean is over the whole
step, on all data parallel ranks, before it is cut at 0: micro-batches and ranks do not change it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mst_core.data.render import Sample
from mst_core.engine.seam import Batch, Engine

Unit = tuple[Sample, ...]
Batches = Callable[[Sequence[Unit]], Sequence[Batch]]
"""This data parallel rank's micro-batches of some units."""


class Divergence:
    """The estimates of a run's steps: the reference's side is scored when this is made, before the first step."""

    def __init__(
        self,
        engine: Engine,
        units: Sequence[Unit],
        steps: Sequence[Sequence[int]],
        batches: Batches,
        seq_length: int | None,
        advance: Callable[[int], None] = lambda _: None,
    ) -> None:
        """``steps``: the indices of the units of each global step, two or more."""
        self._engine, self._units, self._steps, self._batches = engine, units, steps, batches
        self._seq_length = seq_length
        self._reference = []
        for step, chosen in enumerate(steps):
            self._reference.append(self._total(step, reference=True))
            advance(len(chosen))

    def of(self, step: int) -> float:
        """z of a step under the policy as it is now. Every rank calls it."""
        mean = (self._total(step) - self._reference[step]) / len(self._steps[step])
        return max(0.0, mean)

    def _total(self, step: int, *, reference: bool = False) -> float:
        chosen = self._steps[step]
        rows = [(mismatched(self._units[x][0], self._units[y][0], self._seq_length),) for x, y in _turned(chosen)]
        found = 0.0
        for batch in self._batches(rows):
            logp_BT = self._engine.score(batch, reference=reference)
            found += float((logp_BT * batch.mask_BT).sum(1).double().sum())
        return self._engine.total(found)


def mismatched(prompt: Sample, answer: Sample, seq_length: int | None) -> Sample:
    """The prompt of one row with the answer of another, cut at its right end to ``seq_length`` tokens (None: whole)."""
    ends, begins = prompt.mask.index(1), answer.mask.index(1)
    tokens = [*prompt.tokens[:ends], *answer.tokens[begins:]][:seq_length]
    mask = [*prompt.mask[:ends], *answer.mask[begins:]][:seq_length]
    return Sample(tokens, mask)


def _turned(chosen: Sequence[int]) -> list[tuple[int, int]]:
    return list(zip(chosen, [*chosen[1:], *chosen[:1]], strict=True))
