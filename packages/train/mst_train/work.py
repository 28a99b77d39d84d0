"""The work of mst-train: the rows first, then the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from mst_core import devices
from mst_core.data import load
from mst_core.data.documents import Documents
from mst_core.data.render import Renderer, Sample, load_tokenizer
from mst_core.data.sources import Source
from mst_core.engine import batches, launch, run
from mst_core.runplan import RunPlan
from mst_core.spec import Result
from mst_train.objective import STAGES
from mst_train.spec import TrainSpec

Rows = load.Loaded[Sample]


def work(spec: TrainSpec, plan: RunPlan) -> Result:
    """Refuse bad rows before any process starts, then train."""
    loaded, evaluated = rows(spec, plan)
    if launch.leads():
        loaded.report("training rows")
        if spec.eval_data:
            evaluated.report("evaluation rows")
    if spec.packing:
        loaded.pack(plan.seq_length, spec.seed)
    done = launch.run_ranks("mst_train.work:rank", plan.engine, spec.ranks, spec, plan, loaded, evaluated)
    return Result(text=str(spec.out), data=done)


def rank(spec: TrainSpec, plan: RunPlan, loaded: Rows, evaluated: Rows) -> dict[str, Any]:
    """What each rank runs, on the rows that were rendered once for all of them."""
    effective = {"seq_length": plan.seq_length, "precision": spec.precision or devices.precision()}
    job = run.Job(
        tool="mst-train",
        spec=spec.model_copy(update=effective),
        model_dir=plan.model_dir,
        engine=plan.engine,
        objective=STAGES[spec.stage],
        units=batches.Singles(loaded.samples),
        eval_units=batches.Singles(evaluated.samples),
        sources=plan.sources,
        order=loaded.order(spec.seed, spec.num_samples),
        rejected=loaded.rejects() + evaluated.rejects(),
    )
    return run.execute(job)


def rows(spec: TrainSpec, plan: RunPlan) -> tuple[Rows, Rows]:
    """The training and evaluation rows."""
    tokenizer = load_tokenizer(plan.model_dir, template=spec.stage == "sft")
    read: Callable[[Sequence[Source]], Rows]
    if spec.stage == "cpt":
        read = partial(load.cpt, documents=Documents(tokenizer, plan.seq_length), bad_rows=spec.bad_rows)
    else:
        renderer = Renderer(tokenizer, plan.seq_length, spec.truncate)
        read = partial(load.sft, renderer=renderer, bad_rows=spec.bad_rows)
    evaluated = read(plan.eval_sources) if spec.eval_data else load.Loaded()
    return read(plan.sources), evaluated
