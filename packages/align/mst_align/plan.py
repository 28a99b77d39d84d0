"""The plan of mst-align: all that headers and files can tell."""

from __future__ import annotations

from mst_align.spec import AlignSpec
from mst_core.errors import InputError
from mst_core.runplan import RunPlan, open_model, plan_run


def plan(spec: AlignSpec) -> RunPlan:
    """See mst_core.runplan."""
    found = plan_run(spec, f"mst-align, {spec.method}", scores=spec.method == "rm")
    if spec.method == "rm":
        _check_head(found)
    return found


def _check_head(plan: RunPlan) -> None:
    """InputError where no reward model can be made of the plan's model."""
    model = open_model(plan.model_dir, plan.layout)
    if model.scores:
        return
    if not model.family.reward:
        what = f"transformers has no class with a scalar head of {model.family.architecture}"
        raise InputError(what, where=plan.model_dir, hint="another model for --method rm")
    if plan.layout == "megatron":
        to = f"{plan.model}-hf"
        hint = f"mst-convert --model {plan.model} --to hf --out {to}, and --model {to} --engine megatron"
        raise InputError("--method rm begins with a Hugging Face directory", where=plan.model_dir, hint=hint)
