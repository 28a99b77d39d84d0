"""The plan of mst-align: all that headers and files can tell."""

from __future__ import annotations

from mst_align import head
from mst_align.spec import AlignSpec
from mst_core.errors import InputError
from mst_core.runplan import RunPlan, open_model, plan_run


def plan(spec: AlignSpec) -> RunPlan:
    """See mst_core.runplan."""
    rewards = spec.method == "rm"
    found = plan_run(spec, f"mst-align, {spec.method}", scores=rewards)
    if rewards:
        head.check(found.model_dir, found.layout)
        if spec.lora_rank is not None and not open_model(found.model_dir, found.layout).scores:
            made = f"{found.model_dir.name}-head"
            hint = f"mst-align head --model {found.model} --out {made}, and --model {made}"
            raise InputError("an adapter of a reward model needs one to be merged into", where=found.model, hint=hint)
    return found
