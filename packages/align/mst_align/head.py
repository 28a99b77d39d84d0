"""mst-align head: the settings and the plan of giving a model a scalar head. The work is scalar_base's."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from mst_core import checkpoint, hub
from mst_core.data import render
from mst_core.errors import InputError
from mst_core.runplan import layout_of, open_model
from mst_core.spec import Plan, Spec


class HeadSpec(Spec):
    """Give a model a scalar head: what --method rm begins with, as a directory that stays."""

    model: str = Field(description="Hugging Face directory of a language model, or hf://org/name@revision, ms://...")
    out: Path = Field(description="the reward model that comes out")
    seed: int = Field(0, ge=0, description="of the head's first values")


class HeadPlan(Plan):
    """What is about to be made."""

    model: str
    architecture: str
    out: str


def plan(spec: HeadSpec) -> HeadPlan:
    """Raises InputError."""
    model_dir = hub.resolve(spec.model)
    layout = layout_of(model_dir)
    check(model_dir, layout)
    model = open_model(model_dir, layout)
    if model.scores:
        raise InputError("is a reward model: it has a scalar head", where=model_dir)
    if not render.has_template(model_dir):
        raise InputError("its tokenizer has no chat template", where=model_dir, hint=render.TEMPLATE_HINT)
    checkpoint.check_out(spec.out, spec.overwrite)
    return HeadPlan(title="mst-align head", model=str(model_dir), architecture=model.family.reward, out=str(spec.out))


def check(model_dir: Path, layout: str) -> None:
    """Raises InputError where no reward model can be made of a model."""
    model = open_model(model_dir, layout)
    if model.scores:
        return
    if not model.family.reward:
        what = f"transformers has no class with a scalar head of {model.family.architecture}"
        raise InputError(what, where=model_dir, hint="another model for --method rm")
    if layout == "megatron":
        to = f"{model_dir}-hf"
        hint = f"mst-convert --model {model_dir} --to hf --out {to}, and --model {to} --engine megatron"
        raise InputError("a scalar head is made in a Hugging Face directory", where=model_dir, hint=hint)
