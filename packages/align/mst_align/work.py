"""The work of mst-align: the rows first, then the ranks."""

from __future__ import annotations

from typing import Any

from mst_align.losses import dpo_objective
from mst_align.spec import AlignSpec
from mst_core import devices, remote
from mst_core.data import load
from mst_core.data.render import Renderer, Sample, load_tokenizer
from mst_core.data.sources import taken
from mst_core.engine import launch, run
from mst_core.runplan import RunPlan
from mst_core.spec import Result

Pairs = load.Loaded[tuple[Sample, Sample]]


def work(spec: AlignSpec, plan: RunPlan) -> Result:
    """Refuse bad rows before any process starts, then align."""
    if made := remote.left(spec):
        return made
    loaded, evaluated = rows(spec, plan)
    if not spec.place.index:
        loaded.report("training rows")
        if spec.eval_data:
            evaluated.report("evaluation rows")
    done = launch.run("mst_align.work:rank", plan.engine, spec, plan, loaded, evaluated)
    return Result(text=spec.remote or str(spec.out), data=done)


def rank(spec: AlignSpec, plan: RunPlan, loaded: Pairs, evaluated: Pairs) -> dict[str, Any]:
    """What each rank runs, on the pairs that were rendered once for all of them."""
    effective = {"seq_length": plan.seq_length, "precision": spec.precision or devices.precision()}
    job = run.Job(
        tool="mst-align",
        spec=spec.model_copy(update=effective),
        model_dir=plan.model_dir,
        engine=plan.engine,
        objective=dpo_objective(spec.beta),
        units=loaded.samples,
        eval_units=evaluated.samples,
        sources=plan.sources,
        settings=taken(plan.sources),
        order=loaded.order(spec.seed, spec.num_samples),
        rejected=loaded.rejects() + evaluated.rejects(),
    )
    return run.execute(job)


def rows(spec: AlignSpec, plan: RunPlan) -> tuple[Pairs, Pairs]:
    """The training and evaluation pairs."""
    renderer = Renderer(load_tokenizer(plan.model_dir), plan.seq_length, spec.truncate)
    cache = load.Cache(spec.cache, plan.model_dir)
    evaluated = load.pairs(plan.eval_sources, renderer, spec.bad_rows, cache) if spec.eval_data else load.Loaded()
    return load.pairs(plan.sources, renderer, spec.bad_rows, cache), evaluated
