"""PEFT's two files. Experts as parameters of all of them (transformers 5), or as modules (before).

PEFT wraps the parameters of one module from the inside out, in the order of their definition: with both adapted A of
gate_up_proj is ``X.mlp.experts.base_layer.lora_A.weight``, that of down_proj ``X.mlp.experts.lora_A.weight``. A holds
the experts one after the other, [E r, in], B side by side within a rank, [out, r E] (merge/experts.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mst_convert.adapters import fusing
from mst_convert.adapters.fusing import Shared
from mst_convert.adapters.lora import Lora, Recent
from mst_convert.adapters.names import Site
from mst_convert.adapters.writing import Recipe
from mst_convert.merge.experts import SWAPPED_SINCE, in_memory
from mst_convert.merge.parts import PREFIX
from mst_core.checkpoint import Staging
from mst_core.engine.lora import adapter_config
from mst_core.errors import MstError
from mst_core.families import Model, tasks
from mst_core.tensors import SafetensorsWriter

PARAMETERS = {"linear_fc1": "gate_up_proj", "linear_fc2": "down_proj"}
EXPERTS = {"modules": r"experts\.\d+\.\w+", "parameters": r"experts\.(gate_up_proj|down_proj)"}
"""What PEFT's patterns call all experts."""


class Out(NamedTuple):
    """A tensor of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], Tensor]


class Size(NamedTuple):
    """Rank and scale of a group of modules, and the dtype that holds them all."""

    rank: int
    scale: float
    dtype: str


def write(
    staging: Staging, lora: Lora, model: Model, found: Sequence[Site], recipe: Recipe | None, generation: str
) -> None:
    """Every pair as it is; with ``recipe`` one A for q, k, v and one for gate, up, what mcore-bridge reads.

    generation   "parameters" or "modules"
    """
    new = generation == "parameters"
    experts = [site for site in found if site.expert is not None]
    plain = [site for site in found if site.expert is None]
    shared = recipe.shared if recipe else fusing.share(experts if new else [], lora)
    apart = [one for one in shared if new and one.site.expert is not None]
    sizes = [_size(lora, group, recipe, apart) for group in (plain, experts)]
    if recipe:
        together = [one for one in shared if not new or one.site.expert is None]
        outs = list(_fused(together, recipe, new))
    else:
        outs = list(_as_it_is(lora, plain if new else found, new))
    if apart and sizes[1]:
        outs += _parameters(apart, sizes[1])
    writer = SafetensorsWriter(staging, "adapter_model.safetensors", [out[:3] for out in outs])
    for out in outs:
        writer.put(out.name, out.read())
    writer.close()
    modules = [m for site in found for m in site.hf if recipe or m in lora.pairs]
    routed = {site.hf[0] for site in plain if site.leaf == "router"}
    old = [module for module in modules if not new or (module not in routed and ".experts." not in module)]
    config = _config(lora, sizes, generation, recipe.rslora if recipe else lora.rslora)
    config["target_modules"] = peft_targets(old, model)
    if new and (routed or experts):
        config["target_parameters"] = _target_parameters(found)
        config["peft_version"] = ".".join(map(str, SWAPPED_SINCE)) + ".0"  # what is in and what is out since then
    staging.write("adapter_config.json", json.dumps(config, indent=2, sort_keys=True) + "\n")


def _size(lora: Lora, group: Sequence[Site], recipe: Recipe | None, apart: Sequence[Shared]) -> Size | None:
    """Of the plain modules, or of the experts; None where there are none. A bridge's are all alike."""
    if not group:
        return None
    if recipe:
        return Size(recipe.rank, recipe.scale, recipe.dtype)
    first = next(lora.pairs[module] for site in group for module in site.hf if module in lora.pairs)
    rank = fusing.highest(apart, "fused") if apart and group[0].expert is not None else first.rank
    return Size(rank, first.scale, lora.dtype)


def _as_it_is(lora: Lora, found: Sequence[Site], new: bool) -> Iterator[Out]:
    for module in (module for site in found for module in site.hf if module in lora.pairs):
        name, pair = f"{PREFIX}{in_memory(module) if new else module}", lora.pairs[module]
        yield Out(f"{name}.lora_A.weight", pair.a.dtype, pair.a.shape, pair.a.read)
        yield Out(f"{name}.lora_B.weight", pair.b.dtype, pair.b.shape, pair.b.read)


def _fused(shared: Sequence[Shared], size: Size | Recipe, new: bool) -> Iterator[Out]:
    """A (the same for all) and B of each module of a layer."""
    recent = Recent()

    def read(one: Shared, number: int | None) -> Tensor:
        a, bs = recent.get(one.site.where, lambda: fusing.fused(one, size.rank, size.scale, size.dtype))
        tensor: Tensor = a if number is None else bs[number]
        return tensor

    for one in shared:
        for number, (module, rows) in enumerate(zip(one.site.hf, one.site.rows, strict=True)):
            name = f"{PREFIX}{in_memory(module) if new else module}"
            shape = (size.rank, one.site.columns)
            yield Out(f"{name}.lora_A.weight", size.dtype, shape, partial(read, one, None))
            yield Out(f"{name}.lora_B.weight", size.dtype, (rows, size.rank), partial(read, one, number))


def _parameters(shared: Sequence[Shared], size: Size) -> Iterator[Out]:
    """A and B of each parameter of all experts."""
    recent = Recent()

    def read(group: list[Shared], which: int) -> Tensor:
        made = recent.get(group[0].site.module, lambda: _stack(group, size))
        tensor: Tensor = made[which]
        return tensor

    both = len({one.site.leaf for one in shared}) > 1
    for _, several in groupby(shared, key=lambda one: one.site.module):
        group = list(several)
        site = group[0].site
        box = in_memory(site.hf[0].rpartition(f".{site.expert}.")[0])
        name = f"{PREFIX}{box}{'.base_layer' if both and site.leaf == 'linear_fc1' else ''}"
        ranks = size.rank * len(group)
        yield Out(f"{name}.lora_A.weight", size.dtype, (ranks, site.columns), partial(read, group, 0))
        yield Out(f"{name}.lora_B.weight", size.dtype, (sum(site.rows), ranks), partial(read, group, 1))


def _stack(group: Sequence[Shared], size: Size) -> tuple[Tensor, Tensor]:
    pairs = [fusing.fused(one, size.rank, size.scale, size.dtype) for one in group]
    b = torch.stack([torch.cat(bs) for _, bs in pairs], dim=-1)  # [out, r, E]
    return torch.cat([a for a, _ in pairs]), b.flatten(1)


def _target_parameters(found: Sequence[Site]) -> list[str]:
    """By their last names: every layer that has one is adapted."""
    names = dict.fromkeys(site.leaf for site in found if site.expert is not None)
    routers = {in_memory(site.hf[0]).split(".", 3)[3] + ".weight" for site in found if site.leaf == "router"}
    return sorted([*(f"experts.{PARAMETERS[leaf]}" for leaf in names), *routers])


def _config(lora: Lora, sizes: Sequence[Size | None], generation: str, rslora: bool) -> dict[str, Any]:
    plain, experts = sizes
    first = plain or experts
    if first is None:
        raise MstError("an adapter of nothing")
    config = adapter_config(first.rank, fusing.alpha_of(first.scale, first.rank, rslora), []) | {"use_rslora": rslora}
    if plain and experts and plain[:2] != experts[:2]:
        config["rank_pattern"] = {EXPERTS[generation]: experts.rank}
        config["alpha_pattern"] = {EXPERTS[generation]: fusing.alpha_of(experts.scale, experts.rank, rslora)}
    if lora.config:
        config["base_model_name_or_path"] = lora.config.get("base_model_name_or_path")
    return config


def peft_targets(modules: Sequence[str], model: Model) -> list[str]:
    """``target_modules``: last names where they mean these modules and no other, else the modules themselves."""
    short = sorted({module.rpartition(".")[2] for module in modules})
    names = (spec.name.removesuffix(".weight") for task in tasks(model) for spec in task.hf if len(spec.shape) > 1)
    meant = {name for name in names if name.rpartition(".")[2] in short}
    return short if meant == set(modules) else sorted(modules)
