"""Which layers of a model a LoRA adapter can be on, and what PEFT calls them. Pure, no torch.

A site is a linear layer of the decoder by its Hugging Face name, or a parameter that holds a matrix of every expert:
transformers 5 keeps experts so, whatever the files have. PEFT means the first by ``target_modules`` and the second by
``target_parameters``. PEFT (0.21, on transformers 5) takes gate_proj, up_proj and down_proj in ``target_modules`` of a
model with experts for those of the experts; layers of the same name beside them (dense layers, a shared expert) are
therefore parameters too, ``mlp.gate_proj.weight``. Routers, embedding and head are no sites.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mst_core.errors import SettingsError
from mst_core.families.rules import Model, tasks
from mst_core.families.task import Task

EXPERTS = {"linear_fc1": "gate_up_proj", "linear_fc2": "down_proj"}
"""Megatron's layer of an expert, and the parameter that transformers 5 has for it."""


@dataclass(frozen=True)
class Site:
    """A layer that can have an adapter.

    name       "model.layers.0.self_attn.q_proj", or of experts "model.layers.0.mlp.experts.gate_up_proj"
    task, part  the native tensor, and which of its Hugging Face tensors this is (0 of experts)
    parameter  PEFT means it by target_parameters
    """

    name: str
    task: Task
    part: int
    parameter: bool

    @property
    def experts(self) -> int | None:
        """How many matrices it holds; None for a layer."""
        return self.task.experts

    @property
    def rows(self) -> int:
        """Output features (of one expert)."""
        return self.task.hf[self.part].rows if self.experts is None else self.task.shape[1]

    @property
    def columns(self) -> int:
        """Input features."""
        return self.task.columns

    @property
    def key(self) -> str:
        """The name that PEFT compares with its targets."""
        return f"{self.name}.weight" if self.parameter and self.experts is None else self.name

    @property
    def box(self) -> str:
        """The module that PEFT wraps."""
        return self.name if self.experts is None else self.name.rpartition(".")[0]


def sites(model: Model) -> list[Site]:
    """Every site of ``model``, layer by layer."""
    found, moe = [], "experts" in model.dims.more
    for task in tasks(model):
        leaf = task.native.removesuffix(".weight").rpartition(".")[2]
        if task.layer is None or not leaf.startswith("linear_") or not task.native.endswith(".weight"):
            continue
        if task.experts is not None:
            box = task.hf[0].name.partition(".experts.")[0].replace(".block_sparse_moe", ".mlp")
            found.append(Site(f"{box}.experts.{EXPERTS[leaf]}", task, 0, True))
        elif len(task.shape) == 2:
            inside = moe and ".mlp." in task.native
            names = [spec.name.removesuffix(".weight") for spec in task.hf]
            found += [Site(name, task, part, inside) for part, name in enumerate(names)]
    return found


def chosen(model: Model, asked: Sequence[str]) -> list[Site]:
    """The sites that --lora-targets means: all of them, or those whose name is, or ends with, one of ``asked``.

    SettingsError for a name that means none, with what it could have meant.
    """
    every = sites(model)
    if list(asked) == ["all-linear"]:
        return every
    wrong = [name for name in asked if not any(_means(name, site.name) for site in every)]
    if wrong:
        known = list(dict.fromkeys(site.name.rpartition(".")[2] for site in every))
        close = list(dict.fromkeys(near for name in wrong for near in difflib.get_close_matches(name, known, n=2)))
        meant = f"; did you mean {' or '.join(close)}?" if close else ""
        what = f"--lora-targets: {model.family.architecture} has no layer {', '.join(wrong)}{meant}"
        raise SettingsError(what, hint=f"all-linear, or of {', '.join(known)}; shared_expert.NAME means that one only")
    return [site for site in every if any(_means(name, site.name) for name in asked)]


def _means(target: str, name: str) -> bool:
    return name == target or name.endswith(f".{target}")


def peft_targets(model: Model, found: Iterable[Site]) -> tuple[list[str], list[str]]:
    """(target_modules, target_parameters): the shortest names that mean these sites and no other."""
    every, mine = sites(model), {site.key for site in found}
    modules: dict[str, None] = {}
    parameters: dict[str, None] = {}
    for site in every:
        if site.key not in mine:
            continue
        parts = site.key.split(".")
        least = 1 if not site.parameter else 2 if site.experts else 3
        ends = (".".join(parts[-count:]) for count in range(least, len(parts) + 1))
        alone = (end for end in ends if all(other.key in mine for other in every if _means(end, other.key)))
        (parameters if site.parameter else modules)[next(alone)] = None
    return list(modules), list(parameters)
