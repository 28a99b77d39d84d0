"""The plan of mst-align: all that headers and files can tell."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from mst_align import head
from mst_align.spec import AlignSpec
from mst_core import hub, runplan, tensors, vocabulary
from mst_core.data.render import tokenizer_dir
from mst_core.errors import InputError
from mst_core.runplan import RunPlan, open_model, plan_run


class AlignPlan(RunPlan):
    """What a run will do."""

    reference: str
    reference_dir: Path | None = Field(None, exclude=True)


def plan(spec: AlignSpec) -> AlignPlan:
    """See mst_core.runplan."""
    planned = plan_run(spec, f"mst-align, {spec.method}", scores=spec.method == "rm")
    if spec.method == "rm":
        _check_head(spec, planned)
    directory = _reference(spec, spec.reference, planned) if spec.reference is not None else None
    itself = "the model as it comes in" if spec.chosen.needs_reference else "none"
    return AlignPlan(**dict(planned), reference=str(directory or itself), reference_dir=directory)


def _check_head(spec: AlignSpec, planned: RunPlan) -> None:
    head.check(planned.model_dir, planned.layout)
    if spec.lora_rank is not None and not open_model(planned.model_dir, planned.layout).scores:
        made = f"{planned.model_dir.name}-head"
        hint = f"mst-align head --model {planned.model} --out {made}, and --model {made}"
        raise InputError("an adapter of a reward model needs one to be merged into", where=planned.model, hint=hint)


def _reference(spec: AlignSpec, name: str, planned: RunPlan) -> Path:
    """The directory of --reference. Raises InputError for one that the run's engine, or its rows, cannot use."""
    directory = hub.resolve(name)
    layout = runplan.layout_of(directory)
    runplan.engine_for(spec.model_copy(update={"engine": planned.engine}), layout, directory)
    runplan.check_model(spec, planned.engine, layout, directory)
    hf = tokenizer_dir(directory)
    limit = tensors.config(hf).get("max_position_embeddings") or planned.seq_length
    if planned.seq_length > limit:
        hint = f"--seq-length {limit}"
        raise InputError(f"has {limit} positions, fewer than the {planned.seq_length} of a row", where=hf, hint=hint)
    vocabulary.check_same(tokenizer_dir(planned.model_dir), hf)
    return directory
