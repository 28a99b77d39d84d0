"""The reference's log-probabilities: scored in one pass before the first step, so that one model is held at a time.

Each row is scored on one data parallel rank, in the micro-batches of the run's own first steps: a policy that is still
its reference then has a ratio of exactly 0. What --cache knows is not scored again, but a few rows of it are compared.

Shapes: N units of R rows (Objective.rows).
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from blake3 import blake3
from torch import Tensor

from mst_core import console
from mst_core.data.render import Sample
from mst_core.engine import ranks
from mst_core.engine.batches import collate
from mst_core.engine.kept import NAME, Kept
from mst_core.engine.seam import Batch, Engine, Objective
from mst_core.errors import InputError, RunError
from mst_core.runspec import RunSpec

Unit = tuple[Sample, ...]
COMPARED = 4
"""How many units of the cache are scored again."""
ROUNDING = {"fp32": 1e-4}
"""By how much a token's log-probability may differ from what is kept, on average over a row; in 16 bits, 0.05."""
UNKNOWN = -math.inf


class Units(Protocol):
    """A sequence of them, or what makes each when it is asked for."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Unit: ...


@dataclass(frozen=True)
class Reference:
    """What a run knows of its reference; of none, nothing.

    logp_NR       of each training unit that the run meets
    eval_logp_NR  of each evaluation unit
    totals        of each step, the sum over its mismatched rows (divergence.py), where the objective asks for it
    eval_totals   the same of the evaluation rows, which are one step
    """

    logp_NR: Tensor | None = None
    eval_logp_NR: Tensor | None = None
    totals: Sequence[float] = field(default_factory=list)
    eval_totals: Sequence[float] = field(default_factory=list)


@dataclass(frozen=True)
class Scorer:
    """How units are scored.

    batches   this data parallel rank's micro-batches of some units
    kept      the cache (rank 0)
    """

    engine: Engine
    objective: Objective
    spec: RunSpec
    batches: Callable[[Sequence[Unit]], Sequence[Batch]]
    kept: Kept | None = None

    def score(
        self, units: Units, wanted: Sequence[int], what: str, advance: Callable[[int], None] = lambda _: None
    ) -> Tensor:
        """logp_NR of ``units``, fp32, on every rank; only those ``wanted``, in the order in which they are met.

        Raises InputError where the cache is not the reference's, RunError for what is not finite.
        """
        names = {index: _name(units[index], self.objective) for index in dict.fromkeys(wanted)}
        first: dict[bytes, int] = {}
        for index, name in names.items():
            first.setdefault(name, index)
        found_NR = torch.full((len(units), self.objective.rows), UNKNOWN)
        if not first:
            return found_NR
        origin = self.kept.read(first, found_NR) if self.kept else {}
        found_NR = ranks.merged(found_NR)
        known = [index for index in first.values() if found_NR[index, 0] > UNKNOWN]
        if known:
            self._compare(units, known, found_NR, origin)
            advance(len(known))
        if known and self.kept:
            console.say(f"{what}: {len(known)} of {len(first)} are in {self.kept.folder}")
        there = set(known)
        if missing := [index for index in first.values() if index not in there]:
            found_NR[missing] = self._pass(units, missing, advance)
            if self.kept:
                self.kept.write([names[index] for index in missing], found_NR[missing])
        found_NR[list(names)] = found_NR[[first[name] for name in names.values()]]
        return found_NR

    def _pass(self, units: Units, chosen: Sequence[int], advance: Callable[[int], None]) -> Tensor:
        """logp_KR of the ``chosen`` units, on every rank."""
        found_KR = torch.full((len(chosen), self.objective.rows), UNKNOWN)
        engine, size = self.engine, self.spec.micro_batch
        for start in range(0, len(chosen), self.spec.global_batch):
            step = range(len(chosen))[start : start + self.spec.global_batch]
            mine = [step[at : at + size] for at in range(0, len(step), size)][engine.dp_rank :: engine.dp_size]
            # All ranks score as often: weights or experts may be spread over them. What fills up is not kept.
            for number, batch in enumerate(self.batches([units[chosen[place]] for place in step])):
                logp_BT = engine.score(batch, reference=True)
                if number < len(mine):
                    logp_B = self.objective.answers(logp_BT, batch)
                    logp_B = logp_B.masked_fill(logp_B.isnan(), math.inf)  # that a maximum keeps
                    found_KR[list(mine[number])] = logp_B.view(-1, self.objective.rows)
            advance(len(step))
        found_KR = ranks.merged(found_KR)
        if not bool(found_KR.isfinite().all()):
            raise RunError("the reference gives a row a log-probability that is not finite")
        return found_KR

    def _compare(self, units: Units, known: Sequence[int], found_NR: Tensor, origin: Mapping[int, Path]) -> None:
        """Score a few units again. Rank 0, which read the files, raises InputError where they differ."""
        some = known[:: -(-len(known) // COMPARED)]
        again_KR = self._pass(units, some, lambda _: None)
        for index, logp_R in zip(some, again_KR, strict=True):
            tokens = min(sum(sample.mask) for sample in units[index])
            most = ROUNDING.get(self.spec.precision or "", 0.05) * max(8, tokens)
            if index in origin and float((logp_R - found_NR[index]).abs().max()) > most:
                what = f"has {found_NR[index].tolist()} for a row that this reference gives {logp_R.tolist()}"
                raise InputError(what, where=origin[index], hint="remove this file; its rows are then computed anew")


def _name(unit: Unit, objective: Objective) -> bytes:
    """A hash of what a unit's log-probabilities depend on: its tokens, and what each counts."""
    batch = collate(unit)
    weight_BT = batch.mask_BT if objective.weigh is None else objective.weigh(batch)
    found = blake3()
    for sample, weight_T in zip(unit, weight_BT, strict=True):
        found.update(len(sample.tokens).to_bytes(8, "little"))
        found.update(array("i", sample.tokens).tobytes())
        found.update(weight_T[: len(sample.tokens)].numpy().tobytes())
    return found.digest(NAME)
