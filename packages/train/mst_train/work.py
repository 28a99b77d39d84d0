"""The work of mst-train: the rows first, then the ranks."""

from __future__ import annotations

from typing import Any

from mst_core import console, devices, remote
from mst_core.data import clean, load
from mst_core.data.documents import Documents
from mst_core.data.render import Renderer, Sample, load_tokenizer
from mst_core.data.sources import taken
from mst_core.engine import batches, launch, run
from mst_core.runplan import RunPlan
from mst_core.spec import Result
from mst_train.objective import STAGES
from mst_train.spec import TrainSpec

Rows = load.Loaded[Sample]


def work(spec: TrainSpec, plan: RunPlan) -> Result:
    """Refuse bad rows before any process starts, then train."""
    if made := remote.left(spec):
        return made
    loaded, evaluated = rows(spec, plan)
    if not spec.place.index:
        loaded.report("training rows")
        if spec.eval_data:
            evaluated.report("evaluation rows")
    if spec.packing:
        packed = [some.pack(plan.seq_length, spec.seed) for some in (loaded, evaluated) if some.samples]
        if not spec.place.index:
            console.say("\n".join(packed))
    done = launch.run("mst_train.work:rank", plan.engine, spec, plan, loaded, evaluated)
    return Result(text=spec.remote or str(spec.out), data=done)


def rank(spec: TrainSpec, plan: RunPlan, loaded: Rows, evaluated: Rows) -> dict[str, Any]:
    """What each rank runs, on the rows that were rendered once for all of them."""
    rules = clean.template(spec.clean) if spec.clean else None
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
        attached={"removed.jsonl": loaded.removed} if loaded.removed else {},
        settings={**taken(plan.sources), "clean": rules.model_dump(mode="json") if rules else None},
        notes={"samples": loaded.packed or len(loaded.samples), "cleaned": loaded.cleaned},
        order=loaded.order(spec.seed, spec.num_samples),
        rejected=loaded.rejects() + evaluated.rejects(),
    )
    return run.execute(job)


def rows(spec: TrainSpec, plan: RunPlan) -> tuple[Rows, Rows]:
    """The training and evaluation rows."""
    tokenizer = load_tokenizer(plan.model_dir, template=spec.stage == "sft")
    cache = load.Cache(spec.cache, plan.model_dir)
    if spec.stage == "cpt":
        documents = Documents(tokenizer, plan.seq_length)
        rules = clean.template(spec.clean) if spec.clean else None
        loaded = load.cpt(plan.sources, documents, spec.bad_rows, cache, rules)
        # What is measured stays as it is.
        return loaded, load.cpt(plan.eval_sources, documents, spec.bad_rows, cache) if spec.eval_data else load.Loaded()
    renderer = Renderer(tokenizer, plan.seq_length, spec.truncate)
    loaded = load.sft(plan.sources, renderer, spec.bad_rows, cache)
    return loaded, load.sft(plan.eval_sources, renderer, spec.bad_rows, cache) if spec.eval_data else load.Loaded()
