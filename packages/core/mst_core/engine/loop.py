"""The one trainer: order, batches, reference, steps, evaluation, metrics. For any objective on any engine."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from mst_core import console
from mst_core.checkpoint import Staging
from mst_core.data.order import Order
from mst_core.data.render import Sample
from mst_core.engine import schedule
from mst_core.engine.batches import collate
from mst_core.engine.divergence import Divergence, Mismatched
from mst_core.engine.kept import Kept
from mst_core.engine.meter import Meter
from mst_core.engine.metrics import Metrics
from mst_core.engine.references import Reference, Scorer, Units
from mst_core.engine.saves import Saves
from mst_core.engine.seam import Batch, Engine, Objective
from mst_core.errors import InputError, Stopped
from mst_core.resume import Fit
from mst_core.runspec import RunSpec

Unit = tuple[Sample, ...]
"""What is never split over micro-batches or ranks: one sample, or a chosen and a rejected one."""


def fit(
    engine: Engine,
    objective: Objective,
    units: Sequence[Unit],
    spec: RunSpec,
    staging: Staging | None,
    eval_units: Sequence[Unit] = (),
    saves: Saves | None = None,
    order: Order | None = None,
    meter: Meter | None = None,
    reference: Reference | None = None,
) -> Fit:
    """Train ``engine`` on ``units``. Every rank calls it with the same arguments (``staging`` on rank 0 only).

    saves      where the run's checkpoints go, and which one it goes on from
    reference  what an objective that needs one compares with (None: the model that came in)

    Raises RunError (NaN), Stopped (SIGTERM, after saving where there are ``saves``).
    """
    order, meter = order or Order(len(units), spec.seed), meter or Meter(spec)
    steps = spec.total_steps(order.size)
    done = Fit(steps)
    if reference is None:
        reference = refer(engine, objective, units, eval_units, spec, order) if objective.reference else Reference()
    divergence = _divergence(engine, units, reference.totals, spec, order)
    eval_divergence = _divergence(engine, eval_units, reference.eval_totals, spec)
    start = saves.restore(done) if saves else 0  # after the reference, which is of the model that came in
    warmup = schedule.warmup_steps(steps, spec.warmup)
    measure = partial(evaluate, engine, objective, eval_units, spec, reference.eval_logp_NR, eval_divergence)
    if eval_units and not start:
        done.before = measure()
    with (
        Metrics(staging, start, spec) as metrics,
        _stop_on_sigterm() as asked,
        _progress(engine, steps, done=start) as bar,
        saves or nullcontext(),
    ):
        if eval_units and not start:
            metrics.log(0, {f"eval/{name}": value for name, value in done.before.items()})
        for step, chosen in zip(range(start, steps), order.batches(spec.global_batch, start=start), strict=False):
            rate = schedule.lr(
                step, steps=steps, peak=spec.lr, floor=spec.min_lr, warmup=warmup, schedule=spec.schedule
            )
            begun = time.monotonic()
            step_units = [units[i] for i in chosen]
            kl = divergence.of(step) if divergence else None
            micro = micro_batches(step_units, engine, spec, _pick(reference.logp_NR, chosen), kl)
            ready = time.monotonic()
            values = engine.step(micro, objective, rate)
            seconds = time.monotonic() - ready
            lengths = [part for unit in step_units for s in unit for part in s.parts or (len(s.tokens),)]
            done.tokens += sum(lengths)
            values |= {"lr": rate, **meter.measure(lengths, ready - begun, seconds)}
            last = step + 1 == steps
            measured = bool(eval_units) and (last or (step + 1) % (spec.eval_every or steps) == 0)
            if measured:
                done.evaluation = measure()
                values |= {f"eval/{name}": value for name, value in done.evaluation.items()}
            done.first, done.last = done.first or values, values
            if last or measured or step % spec.log_every == 0:
                values["memory_gb"] = engine.agree(meter.memory()) / 1e9
                metrics.log(step + 1, values)
            bar.note(f"loss {values['loss']:.4f}, {values['tokens_per_s']:.0f} tokens/s")
            bar.advance()
            heard = engine.agree(2 if asked else int(saves is not None and saves.writing()))
            stop = heard == 2 and not last
            if saves and not heard:
                saves.written()
            if saves and (stop or saves.due(step + 1, last)):
                saves.save(step + 1, done)
                metrics.draw()
            if stop:
                then = f"{saves.out}.partial has it, --resume goes on" if saves else "nothing was written"
                raise Stopped(f"stopped by SIGTERM after step {step + 1} of {steps}; {then}")
    return done


def evaluate(
    engine: Engine,
    objective: Objective,
    units: Sequence[Unit],
    spec: RunSpec,
    references: Tensor | None,
    divergence: Divergence | None = None,
) -> dict[str, float]:
    """The objective's terms over all of ``units``, forward only, each divided by its weight once."""
    sums: dict[str, float] = {}
    weights: dict[str, float] = {}
    loss = 0.0
    coefficients: dict[str, float] = {}
    kl = divergence.of(0) if divergence else None
    for start in range(0, len(units), spec.micro_batch):
        indices = list(range(start, min(start + spec.micro_batch, len(units))))
        batch = _collate([units[i] for i in indices], _pick(references, indices), kl)
        for name, term in objective.loss(engine.score(batch), batch).items():
            sums[name] = sums.get(name, 0.0) + float(term.sum)
            weights[name] = weights.get(name, 0.0) + term.weight
            coefficients[name] = term.coefficient
    means = {name: sums[name] / weights[name] for name in sums if weights[name]}
    loss = sum(coefficients[name] * value for name, value in means.items())
    return {**means, "loss": loss}


def micro_batches(
    units: Sequence[Unit], engine: Engine, spec: RunSpec, references: Tensor | None, kl: float | None = None
) -> list[Batch]:
    """This data parallel rank's micro-batches of a global batch.

    Micro-batch j goes to rank j modulo dp. Where they do not divide, the short ranks repeat a micro-batch with an
    empty mask: its weight is 0, so it changes nothing, and every rank takes part in every collective.
    """
    size = spec.micro_batch
    pieces = [(list(units[i : i + size]), _slice(references, i, size)) for i in range(0, len(units), size)]
    while len(pieces) % engine.dp_size:
        pieces.append(([_unlearnt(unit) for unit in pieces[0][0]], pieces[0][1]))
    return [_collate(piece, found, kl) for piece, found in pieces[engine.dp_rank :: engine.dp_size]]


def _unlearnt(unit: Unit) -> Unit:
    return tuple(replace(sample, mask=[0] * len(sample.tokens)) for sample in unit)


def _collate(units: Sequence[Unit], references: Tensor | None, kl: float | None = None) -> Batch:
    samples = [sample for unit in units for sample in unit]
    extra = {"ref_logp_B": references.flatten()} if references is not None else {}
    if kl is not None:
        extra["kl_B"] = torch.full((len(samples),), kl)
    return collate(samples, extra)


def refer(
    engine: Engine,
    objective: Objective,
    units: Sequence[Unit],
    eval_units: Sequence[Unit],
    spec: RunSpec,
    order: Order | None = None,
    kept: Kept | None = None,
) -> Reference:
    """What a run compares with: ``engine``'s model, an adapter being off. ``kept``: the cache, on rank 0."""
    steps, whole = _steps(order or Order(len(units), spec.seed), spec), [range(len(eval_units))]
    if objective.divergence:
        _check_neighbours(objective, steps)
        _check_neighbours(objective, whole if eval_units else [])
    scorer = Scorer(engine, objective, spec, lambda some: micro_batches(some, engine, spec, None), kept)

    def score(rows: Units, wanted: Sequence[int], what: str) -> Tensor:
        with _progress(engine, len(set(wanted)), what, "row") as bar:
            return scorer.score(rows, wanted, what, bar.advance)

    def totals(rows: Sequence[Unit], steps: Sequence[Sequence[int]], what: str) -> list[float]:
        if not objective.divergence:
            return []
        turned = Mismatched(rows, steps, spec.seq_length)
        logp_N = score(turned, range(len(turned)), what)[:, 0].double()
        return [float(logp.sum()) for logp in logp_N.split([len(chosen) for chosen in steps])]

    of = "reference of the evaluation rows"
    return Reference(
        score(units, [index for chosen in steps for index in chosen], "reference"),
        score(eval_units, whole[0], of),
        totals(units, steps, "reference divergence"),
        totals(eval_units, whole, of),
    )


def _check_neighbours(objective: Objective, steps: Sequence[Sequence[int]]) -> None:
    for step, chosen in enumerate(steps, 1):
        if len(chosen) < 2:
            hint = "--num-samples, or a --global-batch that leaves no batch of one row"
            raise InputError(f"step {step} has one row: {objective.name} compares each with another", hint=hint)


def _steps(order: Order, spec: RunSpec) -> list[Sequence[int]]:
    """The units of each global step."""
    return list(islice(order.batches(spec.global_batch), spec.total_steps(order.size)))


def _divergence(
    engine: Engine, units: Sequence[Unit], totals: Sequence[float], spec: RunSpec, order: Order | None = None
) -> Divergence | None:
    """Of the steps, without ``order`` of all units as one, where the reference has totals of them."""
    if not totals:
        return None
    steps = _steps(order, spec) if order else [range(len(units))]
    batches = partial(micro_batches, engine=engine, spec=spec, references=None)
    return Divergence(engine, units, steps, batches, spec.seq_length, totals)


def _pick(references: Tensor | None, indices: Sequence[int]) -> Tensor | None:
    return None if references is None else references[list(indices)]


def _slice(references: Tensor | None, start: int, size: int) -> Tensor | None:
    return None if references is None else references[start : start + size]


@contextmanager
def _progress(
    engine: Engine, total: int, title: str = "training", unit: str = "step", done: int = 0
) -> Iterator[console.Bar]:
    if engine.rank:
        yield _Silent()
    else:
        with console.progress(title, total, unit) as bar:
            if done:
                bar.advance(done)
            yield bar


class _Silent:
    def advance(self, amount: float = 1) -> None:
        pass

    def note(self, text: str) -> None:
        pass


@contextmanager
def _stop_on_sigterm() -> Iterator[list[int]]:
    """A list that is empty until SIGTERM asks to stop; the step in progress is finished first."""
    asked: list[int] = []

    def ask(number: int, frame: Any) -> None:
        asked.append(number)

    before = signal.signal(signal.SIGTERM, ask)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGTERM, before)
