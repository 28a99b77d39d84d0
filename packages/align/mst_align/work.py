"""The work of mst-align: the rows first, then the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mst_align import pairs, rewards, scalar_base, unpaired
from mst_align.methods import Chosen
from mst_align.plan import AlignPlan
from mst_align.rewards import LastTokens
from mst_align.spec import AlignSpec
from mst_core import console, devices, remote, tensors
from mst_core.data import load
from mst_core.data.render import Renderer, Sample, load_tokenizer, tokenizer_dir
from mst_core.data.sources import Source, taken
from mst_core.engine import grow, launch, run
from mst_core.engine.batches import Singles
from mst_core.spec import Result

Rows = load.Loaded[Any]
BALANCED = (1.0, 4 / 3)
"""KTO, arXiv 2402.01306, eq. 9: weight times number of the good answers, over that of the bad ones."""
WITH_MARGINS: tuple[str, ...] = ("rm",)
"""Methods that read the margins of pairs."""


def work(spec: AlignSpec, plan: AlignPlan) -> Result:
    """Refuse bad rows before any process starts, then align."""
    if made := remote.left(spec):
        return made
    plan = grow.prepared(spec, plan)
    if spec.method == "rm":
        plan = scalar_base.prepared(spec, plan)
    loaded, evaluated = rows(spec, plan)
    if not spec.place.index:
        loaded.report("training rows")
        if spec.eval_data:
            evaluated.report("evaluation rows")
        if (margins := loaded.preferences["margins"]) and spec.method not in WITH_MARGINS:
            console.say(f"{margins} training rows have a margin, which --method {spec.method} does not read")
        if spec.unpaired:
            weigh(spec.chosen, loaded.samples)
    done = launch.run("mst_align.work:rank", plan.engine, spec, plan, loaded, evaluated)
    return Result(text=spec.remote or str(spec.out), data=done)


def rank(spec: AlignSpec, plan: AlignPlan, loaded: Rows, evaluated: Rows) -> dict[str, Any]:
    """What each rank runs, on the rows that were rendered once for all of them."""
    effective = {"seq_length": plan.seq_length, "precision": spec.precision or devices.precision()}
    job = run.Job(
        tool="mst-align",
        spec=spec.model_copy(update=effective),
        model_dir=plan.model_dir,
        engine=plan.engine,
        objective=module(spec).objective(spec.chosen),
        units=units(spec, plan, loaded),
        eval_units=units(spec, plan, evaluated),
        sources=plan.sources,
        settings={**taken(plan.sources), **spec.chosen.told()},
        reference=plan.reference_dir,
        order=loaded.order(spec.seed, spec.num_samples),
        rejected=loaded.rejects() + evaluated.rejects(),
        notes={"preferences": loaded.preferences},
    )
    return run.execute(job)


def module(spec: AlignSpec) -> Any:
    """Where the method's loss is."""
    return rewards if spec.method == "rm" else unpaired if spec.unpaired else pairs


def units(spec: AlignSpec, plan: AlignPlan, loaded: Rows) -> Sequence[tuple[Sample, ...]]:
    """What is never split, as the method's loss reads it."""
    if spec.method == "rm":
        return LastTokens(loaded.samples, tensors.config(tokenizer_dir(plan.model_dir)).get("pad_token_id"))
    return Singles(loaded.samples) if spec.unpaired else loaded.samples


def rows(spec: AlignSpec, plan: AlignPlan) -> tuple[Rows, Rows]:
    """The training and evaluation rows: pairs, or judged answers."""
    renderer = Renderer(load_tokenizer(plan.model_dir), plan.seq_length, spec.truncate)
    cache = load.Cache(spec.cache, plan.model_dir)

    def read(sources: Sequence[Source]) -> Rows:
        return (load.judged if spec.unpaired else load.pairs)(sources, renderer, spec.bad_rows, cache)

    evaluated: Rows = read(plan.eval_sources) if spec.eval_data else load.Loaded()
    return read(plan.sources), evaluated


def weigh(chosen: Chosen, samples: Sequence[Sample]) -> None:
    """Say how many answers are good, and warn where the weights do not balance them as KTO's authors advise."""
    good = sum(bool(sample.desirable) for sample in samples)
    bad = len(samples) - good
    console.say(f"{good} good answers, {bad} bad ones")
    if chosen.method != "kto" or not (good and bad):
        return
    found = chosen.desirable_weight * good / (chosen.undesirable_weight * bad)
    if not BALANCED[0] <= round(found, 9) <= BALANCED[1] + 1e-9:
        low, high = (chosen.undesirable_weight * bad * bound / good for bound in BALANCED)
        console.warn(
            f"--desirable-weight times good answers is {found:.2f} times --undesirable-weight times bad ones; KTO's "
            f"authors advise 1 to 1.33: a --desirable-weight of {low:.3g} to {high:.3g}"
        )
