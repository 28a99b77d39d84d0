"""One training run, whatever its objective: stage, engine, fit, save, commit. mst-train and mst-align are two Jobs."""

from __future__ import annotations

import gc
import json
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mst_core import (
    checkpoint,
    cluster,
    console,
    deepspeed_json,
    files,
    lora_sites,
    manifest,
    remote,
    runplan,
    vocabulary,
)
from mst_core.checkpoint import Staging
from mst_core.data.order import Order
from mst_core.data.sources import Source, paths
from mst_core.engine import launch, loop
from mst_core.engine.kept import Kept
from mst_core.engine.loop import Unit
from mst_core.engine.meter import Meter
from mst_core.engine.references import Reference
from mst_core.engine.saves import Saves, enter_state
from mst_core.engine.seam import Engine, Objective
from mst_core.errors import InputError
from mst_core.manifest import Parent
from mst_core.resume import FOLDER, HISTORY, RUN, STATE, Fit, newest, put_away
from mst_core.runspec import RunSpec

NOT_IN_THE_ID = (
    "cache", "nproc", "log_every", "eval_every", "bad_rows", "epochs", "save_every", "keep", "keep_state", "resume",
    "async_save", "zero", "offload", "deepspeed", "recompute", "add_tokens", "nodes", "node_rank", "rendezvous",
    "print_launch", "timeout", "report_to", "peak_tflops", "reference",
)  # fmt: skip
"""Settings of a run that do not change its bytes, or are recorded in another form."""
LAYOUT = (
    "tp", "pp", "dp", "sp", "vp", "cp", "ep", "etp", "distributed_optimizer", "micro_batch", "recompute",
    "recompute_method", "recompute_num_layers", "recompute_modules", "overlap_grad_reduce", "overlap_param_gather",
    "moe_token_dispatcher_type", "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers",
    "zero", "offload_optimizer", "offload_param",
)  # fmt: skip
"""Settings that a run may change when it goes on: another layout of ranks makes the same steps."""
SEEN_WITHIN = 30.0
"""Seconds for a shared file system to show other machines a new directory."""
LORA = ("lora_rank", "lora_alpha", "lora_targets", "lora_rslora", "lora_dora", "qlora")


@dataclass(frozen=True)
class Job:
    """What a tool asks for."""

    tool: str
    spec: RunSpec
    model_dir: Path
    engine: str
    objective: Objective
    units: Sequence[Unit]
    eval_units: Sequence[Unit] = ()
    sources: Sequence[Source] = ()
    """Where the units are from; their files are parents of what is made."""
    order: Order | None = None
    reference: Path | None = None
    """A directory that an objective with a reference compares with (None: the model before training)."""
    rejected: str = ""
    """The content of rejected.jsonl, if rows were set aside."""
    attached: Mapping[str, Path] = field(default_factory=dict)
    """More files for the output, by their names in it."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings in effect that the spec names in another form."""
    notes: dict[str, Any] = field(default_factory=dict)


def execute(job: Job) -> dict[str, Any]:
    """Run ``job`` on this rank; the result (rank 0): out, id, steps and the last metrics."""
    # Who the parents are is read before the run: afterwards their files may be others.
    parents = _parents(job) if cluster.rank() == 0 else []
    reference = _score(job) if job.reference else None
    engine = launch.make_engine(job.engine, job.spec, job.model_dir)
    with _staging(job, engine) as staging:
        _check_shared(job.spec.out, engine)
        saves = _saves(job, engine, staging, parents)
        meter = Meter.of(job.spec, job.model_dir)
        if job.objective.reference and reference is None:
            reference = _refer(job, engine, job.model_dir)
        done = loop.fit(
            engine, job.objective, job.units, job.spec, staging, job.eval_units, saves, job.order, meter, reference
        )
        _write(job, engine, staging, saves, done)
        result: dict[str, Any] = {}
        if staging is not None:
            if job.rejected:
                (staging.path / "rejected.jsonl").write_text(job.rejected, encoding="utf-8")
                staging.attach("rejected.jsonl")
            for name, path in job.attached.items():
                shutil.copyfile(path, staging.path / name)
                staging.attach(name)
            with put_away(staging):
                made = _commit(job, staging, parents, done, done.steps)
            if job.spec.remote:
                remote.finish(job.spec.remote, job.spec.out)
            result = {"out": job.spec.remote or str(job.spec.out), "id": made.id, "rows": len(job.units)}
            result |= {"rows_set_aside": job.rejected.count("\n"), "steps": done.steps, "tokens": done.tokens}
            result |= {"first_loss": done.first["loss"], **done.last}
            _compare(done)
    # Only after success: leaving the groups in good order would wait for ranks that failed.
    engine.close()
    return result


def _score(job: Job) -> Reference:
    """What --reference gives, whose weights are gone afterwards: the policy is built when they are.

    An adapter, which is off, keeps an engine from holding gradients and optimizer state of the weights.
    """
    directory = job.reference or job.model_dir
    adapter = {"lora_rank": 1, "lora_alpha": None, "lora_targets": ("all-linear",)}
    spec = job.spec.model_copy(update=adapter | {"lora_rslora": False, "lora_dora": False})
    engine = launch.make_engine(job.engine, spec, directory)
    found = _refer(job, engine, directory)
    engine.close(stay=True)
    del engine
    gc.collect()  # modules and their hooks name one another
    return found


def _refer(job: Job, engine: Engine, directory: Path) -> Reference:
    """The reference's log-probabilities of all rows, ``engine`` being that of ``directory``."""
    spec, kept = job.spec, None
    if not engine.rank:
        digests = manifest.identify(directory).digests
        of = {"weights": digests.weights, "config": digests.config, "engine": job.engine}
        kept = Kept(spec.cache, of | {"precision": spec.precision, "qlora": spec.qlora})
    return loop.refer(engine, job.objective, job.units, job.eval_units, spec, job.order, kept)


def _staging(job: Job, engine: Engine) -> AbstractContextManager[Staging | None]:
    if engine.rank:
        return nullcontext()
    out, extends = job.spec.out, job.spec.resume and (job.spec.out / RUN).is_file()

    def kept(staged: Path) -> list[str]:
        if job.spec.remote:
            remote.fetch(job.spec.remote, staged)
        if extends and not (staged / HISTORY[0]).exists():
            for name in files.listing(out):
                if name.startswith(HISTORY):
                    (staged / name).parent.mkdir(exist_ok=True)
                    shutil.copyfile(out / name, staged / name)
        return [name for name in files.listing(staged) if name.startswith((f"{FOLDER}/", *HISTORY))]

    return checkpoint.stage(out, job.spec.overwrite or extends, keep=kept if job.spec.resume else None)


def _check_shared(out: Path, engine: Engine) -> None:
    """Every rank writes its part of a checkpoint into the directory that rank 0 made: raises InputError where one does
    not see it."""
    engine.agree(0)
    made, end = checkpoint.partial(out), time.monotonic() + SEEN_WITHIN
    while not made.is_dir() and time.monotonic() < end:
        time.sleep(0.2)
    if blind := engine.agree(0 if made.is_dir() else engine.rank + 1):
        what = f"rank {blind - 1} does not see what rank 0 made there"
        raise InputError(what, where=made, hint="--out on a file system that all nodes share")


def _saves(job: Job, engine: Engine, staging: Staging | None, parents: list[Parent]) -> Saves:
    """The run's checkpoints, and the one to go on from."""
    spec = job.spec
    steps = spec.total_steps(job.order.size if job.order else len(job.units))
    settings = {name: value for name, value in _settings(job, steps).items() if name not in LAYOUT}
    settings |= {"objective": job.objective.name, "rows": len(job.units)}
    settings |= {f"{parent.role} {number}": parent.id for number, parent in enumerate(parents)}
    settings = json.loads(json.dumps(settings, default=str))  # as run.json will have them
    found = newest(spec.out, settings) if spec.resume and staging is not None else None
    if spec.resume and staging is not None and found is None:
        console.say("nothing to go on from: starts at step 1")

    def commit(made: Staging, step: int, done: Fit) -> manifest.Manifest:
        return _commit(job, made, parents, done, step)

    def publish(step: int) -> None:
        if spec.remote and staging is not None:
            remote.publish(spec.remote, staging.path, step)

    out, every = spec.out.absolute(), spec.save_every
    return Saves(engine, out, staging, settings, commit, publish, every, spec.keep, found, spec.async_save)


def _write(job: Job, engine: Engine, staging: Staging | None, saves: Saves, done: Fit) -> None:
    """The output's weights, and with --keep-state what an extended run goes on from."""
    engine.save(staging)
    if not job.spec.keep_state:
        return
    folder = checkpoint.partial(saves.out) / STATE
    if staging is not None:
        folder.mkdir()
    engine.agree(0)
    engine.save_state(folder)
    engine.agree(0)
    if staging is not None:
        enter_state(staging, done.steps, done, saves.settings)


def _parents(job: Job) -> list[Parent]:
    """The models, by their ids and the digests of their weights, and each file of rows by its hash."""
    base = manifest.identify(job.model_dir)
    data = [Parent(role="data", id=f"blake3:{files.hash_file(path)[1]}") for path in paths(job.sources)]
    found = [Parent(role="base", id=base.id, weights=base.digests.weights), *data]
    if job.reference:
        other = manifest.identify(job.reference)
        found.append(Parent(role="reference", id=other.id, weights=other.digests.weights))
    return found


def _settings(job: Job, steps: int) -> dict[str, Any]:
    """What was in effect, so that two ways of saying the same (a default, an epoch) give the same id."""
    spec = job.spec
    found = {
        **spec.effective(*NOT_IN_THE_ID, *LORA),
        "engine": job.engine,
        "dp": spec.dp,
        "steps": steps,
        **job.settings,
    }
    if job.engine == "deepspeed":
        found |= deepspeed_json.told(spec)
    if spec.lora_rank is not None:
        found |= {"lora_rank": spec.lora_rank, "lora_alpha": spec.alpha, "lora_targets": _targets(job)}
        found |= {name: value for name in LORA[3:] if (value := getattr(spec, name))}
        if spec.add_tokens:  # whose rows the adapter has: it needs no more of the grown base than mst-merge can make
            found["add_tokens"] = vocabulary.added(job.model_dir)[0]
    return found


def _targets(job: Job) -> list[str]:
    """The layers that are adapted, however --lora-targets says it."""
    model = runplan.open_model(job.model_dir, runplan.layout_of(job.model_dir))
    modules, parameters = lora_sites.peft_targets(model, lora_sites.chosen(model, job.spec.lora_targets))
    return modules + parameters


def _commit(job: Job, staging: Staging, parents: list[Parent], done: Fit, step: int) -> manifest.Manifest:
    base = manifest.identify(job.model_dir)
    if base.id != parents[0].id:
        raise InputError("changed while it was trained from", where=job.model_dir)
    adapter = job.spec.lora_rank is not None
    return staging.commit(
        kind="adapter" if adapter else base.kind,
        layout="peft" if adapter else base.layout,
        encoding={} if adapter else base.encoding,
        model=None if adapter else base.model,
        parents=parents,
        parent_dirs=[job.model_dir, *([job.reference] if job.reference else [])],
        tool=job.tool,
        settings=_settings(job, step),
        notes={
            **job.notes,
            "rows": len(job.units),
            "rows_set_aside": job.rejected.count("\n"),
            "tokens": done.tokens,
            "first": done.first,
            "last": done.last,
            "evaluation_before": done.before,
            "evaluation": done.evaluation,
        },
    )


def _compare(done: Fit) -> None:
    """Show the evaluation rows before the first step and after the last one."""
    before, after = done.before, done.evaluation
    # Where the loss has one part, that part is the loss under another name.
    names = [name for name in after if (before.get(name), after[name]) != (before.get("loss"), after["loss"])]
    rows = [
        (name, *(f"{value:11.4f}" for value in (before[name], after[name])), f"{after[name] - before[name]:+11.4f}")
        for name in (["loss", *names] if after else ())
        if name in before
    ]
    if rows:
        console.table("evaluation rows", rows, ("", *(f"{title:>11}" for title in ("before", "after", "change"))))
