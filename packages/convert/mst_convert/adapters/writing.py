"""The three outputs: PEFT's two files, or a torch_dist checkpoint with the names and side files of a bridge.

What a bridge's loader reads (sources as in names.py):

    megatron-bridge  iter_0000001/ for load_peft_adapter_checkpoint and AutoBridge.export_adapter_ckpt; run_config.yaml
                     in it, whose ``peft`` says kind, dim, alpha and target_modules
    mcore-bridge     --mcore_adapter DIR of ms-swift: the tracker, iter_0000001/, args.json; its common state must hold
                     ``args`` with the parallel sizes, and every TransformerEngine layer an ``_extra_state``
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import yaml
from torch import Tensor

from mst_convert.adapters import fusing
from mst_convert.adapters.fusing import Shared
from mst_convert.adapters.lora import Lora
from mst_convert.adapters.names import Site, gate_up_by_rank, halves_by_rank, targets
from mst_convert.merge.parts import PREFIX
from mst_core.checkpoint import Staging
from mst_core.engine.lora import adapter_config
from mst_core.errors import InputError
from mst_core.families import Model, Region, pack_rows, tasks
from mst_core.tensors import SafetensorsWriter, Wanted
from mst_core.torch_dist import TorchDistWriter, Written
from mst_core.torch_pickle import Instance

ITERATION = 1
PREFIX_DIR = f"iter_{ITERATION:07d}"
NAME = "default"
"""PEFT's and ms-swift's name of an adapter that nobody named."""


@dataclass(frozen=True)
class Recipe:
    """One rank, one scale and one dtype for all layers, and the form: what the bridges need."""

    shared: list[Shared]
    form: str
    rank: int
    scale: float
    alpha: float
    rslora: bool
    dtype: str
    tp: int = 1


# --- PEFT ---------------------------------------------------------------------------------------------------------


def write_peft(staging: Staging, lora: Lora, model: Model) -> None:
    """Every pair as it is. All have one rank and one scale: they come from a bridge."""
    wanted: list[Wanted] = []
    for module, pair in lora.pairs.items():
        wanted += [(f"{PREFIX}{module}.lora_{w}.weight", f.dtype, f.shape) for w, f in (("A", pair.a), ("B", pair.b))]
    writer = SafetensorsWriter(staging, "adapter_model.safetensors", wanted)
    for module, pair in lora.pairs.items():
        writer.put(f"{PREFIX}{module}.lora_A.weight", pair.a.read())
        writer.put(f"{PREFIX}{module}.lora_B.weight", pair.b.read())
    writer.close()
    first = next(iter(lora.pairs.values()))
    alpha = fusing.alpha_of(first.scale, first.rank, lora.rslora)
    _write_config(staging, lora, model, list(lora.pairs), first.rank, alpha, lora.rslora)


def write_fused_peft(staging: Staging, lora: Lora, model: Model, recipe: Recipe) -> None:
    """PEFT's files with one A for q, k, v and one for gate, up: what mcore-bridge reads as ``--adapters``."""
    wanted: list[Wanted] = []
    for one in recipe.shared:
        for module, spec in zip(one.site.hf, one.site.task.hf, strict=True):
            wanted.append((f"{PREFIX}{module}.lora_A.weight", recipe.dtype, (recipe.rank, spec.columns)))
            wanted.append((f"{PREFIX}{module}.lora_B.weight", recipe.dtype, (spec.rows, recipe.rank)))
    writer = SafetensorsWriter(staging, "adapter_model.safetensors", wanted)
    for one in recipe.shared:
        a, bs = fusing.fused(one, recipe.rank, recipe.scale, recipe.dtype)
        for module, b in zip(one.site.hf, bs, strict=True):
            writer.put(f"{PREFIX}{module}.lora_A.weight", a)
            writer.put(f"{PREFIX}{module}.lora_B.weight", b)
    writer.close()
    modules = [module for one in recipe.shared for module in one.site.hf]
    _write_config(staging, lora, model, modules, recipe.rank, recipe.alpha, recipe.rslora)


def _write_config(
    staging: Staging, lora: Lora, model: Model, modules: list[str], rank: int, alpha: float, rslora: bool
) -> None:
    config = adapter_config(rank, alpha, peft_targets(modules, model)) | {"use_rslora": rslora}
    if lora.config:
        config["base_model_name_or_path"] = lora.config.get("base_model_name_or_path")
    staging.write("adapter_config.json", json.dumps(config, indent=2, sort_keys=True) + "\n")


def peft_targets(modules: Sequence[str], model: Model) -> list[str]:
    """``target_modules``: last names where they mean these modules and no other, else the modules themselves."""
    short = sorted({module.rpartition(".")[2] for module in modules})
    names = (spec.name.removesuffix(".weight") for task in tasks(model) for spec in task.hf if len(spec.shape) > 1)
    meant = {name for name in names if name.rpartition(".")[2] in short}
    return short if meant == set(modules) else sorted(modules)


# --- the bridges --------------------------------------------------------------------------------------------------


def write_bridge(staging: Staging, recipe: Recipe, everywhere: list[Site], model: Model) -> None:
    """Megatron-Bridge's checkpoint: LoRA, or CanonicalLoRA where the form is separate."""
    canonical = recipe.form == "separate"
    writer = _writer(staging, recipe, _bridge(recipe), model)
    writer.finish([("common_state/shard_0_1", _state())])
    named = targets([one.site for one in recipe.shared], everywhere, canonical, model)
    kind = "canonical_lora.CanonicalLoRA" if canonical else "lora.LoRA"
    config = {
        "checkpoint": {"fully_parallel_save": False, "save_optim": False, "save_rng": False},
        "model": {"pipeline_model_parallel_size": 1, "tensor_model_parallel_size": recipe.tp},
        "peft": {
            "_target_": f"megatron.bridge.peft.{kind}",
            "alpha": recipe.alpha,
            "dim": recipe.rank,
            "dropout": 0.0,
            "target_modules": named,
        },
    }
    staging.write(f"{PREFIX_DIR}/run_config.yaml", yaml.safe_dump(config, sort_keys=True))


def write_mcore(staging: Staging, recipe: Recipe, model: Model) -> None:
    """ms-swift's checkpoint of an adapter on mcore-bridge's layers."""
    if isinstance(recipe.alpha, float) and not recipe.alpha.is_integer():
        raise InputError(
            f"rank {recipe.rank} needs an alpha of {recipe.alpha:.6g}, and ms-swift takes whole numbers",
            hint="--to megatron-bridge takes it, and so does PEFT: --to peft --form fused",
        )
    writer = _writer(staging, recipe, _mcore(recipe), model)
    arguments = {
        "tuner_type": "lora",
        "lora_rank": recipe.rank,
        "lora_alpha": int(recipe.alpha),
        "use_rslora": recipe.rslora,
        "target_modules": list(dict.fromkeys(one.site.leaf for one in recipe.shared)),
        "tensor_model_parallel_size": recipe.tp,
        "pipeline_model_parallel_size": 1,
        "no_save_optim": True,
        "no_save_rng": True,
    }
    objects: list[tuple[str, Any]] = [("common_state/shard_0_1", {**_state(), "args": _namespace(arguments)})]
    for one in recipe.shared:
        layer, layers = (one.site.task.layer, one.site.task.layers) if model.uniform else (0, 1)
        for which in "AB":
            objects.append(
                (f"{_module(one.site, model)}.lora_{which}.{NAME}._extra_state/shard_{layer}_{layers}", None)
            )
    writer.finish(objects)
    staging.write("args.json", json.dumps(arguments, indent=2, sort_keys=True) + "\n")


Entry = tuple[Site, str, Tensor, tuple[Region, ...] | None, int]
"""Layer, what follows its name, the matrix, its rows in the ranks' order, the pieces they are written in."""


def _bridge(recipe: Recipe) -> Iterator[Entry]:
    for one in recipe.shared:
        if recipe.form == "separate" and one.site.canonical:
            for part, (a, b) in zip(one.site.canonical, fusing.separate(one, *_how(recipe)), strict=True):
                cut = part in ("adapter_gate", "adapter_up") and recipe.tp > 1
                order = halves_by_rank(_even(one.site, b.shape[0], recipe.tp), recipe.tp) if cut else None
                yield one.site, f".adapter.{part}.linear_in.weight", a, None, 1
                yield one.site, f".adapter.{part}.linear_out.weight", b, order, 2 * recipe.tp if cut else 1
            continue
        a, bs = fusing.fused(one, *_how(recipe))
        yield one.site, ".adapter.linear_in.weight", a, None, 1
        yield one.site, ".adapter.linear_out.weight", pack_rows(one.site.task.regions, one.site.task.rows, bs), None, 1


def _mcore(recipe: Recipe) -> Iterator[Entry]:
    for one in recipe.shared:
        a, bs = fusing.fused(one, *_how(recipe))
        b = pack_rows(one.site.task.regions, one.site.task.rows, bs)
        cut = one.site.leaf == "linear_fc1" and recipe.tp > 1
        order = gate_up_by_rank(_even(one.site, b.shape[0], recipe.tp), recipe.tp) if cut else None
        yield one.site, f".lora_A.{NAME}.weight", a, None, 1
        yield one.site, f".lora_B.{NAME}.weight", b, order, recipe.tp if cut else 1


def _how(recipe: Recipe) -> tuple[int, float, str]:
    return recipe.rank, recipe.scale, recipe.dtype


def _even(site: Site, rows: int, tp: int) -> int:
    if rows % (2 * tp):
        raise InputError(f"its {rows} rows cannot be cut for --tp {tp}", where=site.module)
    return rows


def _module(site: Site, model: Model) -> str:
    return site.kind if model.uniform else site.module


def _writer(staging: Staging, recipe: Recipe, entries: Iterable[Entry], model: Model) -> TorchDistWriter:
    writer = TorchDistWriter(staging, PREFIX_DIR)
    for site, suffix, matrix, order, pieces in entries:
        rows, columns = matrix.shape
        ordered = matrix if order is None else pack_rows(order, rows, [matrix])
        lead, at, one = ((site.task.layers,), (site.task.layer or 0,), (1,)) if model.uniform else ((), (), ())
        each = rows // pieces
        for number in range(pieces):
            offsets, sizes = (*at, number * each, 0), (*one, each, columns)
            chunk = Written(_module(site, model) + suffix, recipe.dtype, (*lead, rows, columns), offsets, sizes)
            writer.put(chunk, ordered[number * each : (number + 1) * each])
    return writer


def _state() -> dict[str, Any]:
    content = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    return {"checkpoint_version": 3.0, "iteration": ITERATION, "content_metadata": content}


def _namespace(arguments: dict[str, Any]) -> Instance:
    return Instance("argparse.Namespace", {**arguments, "consumed_train_samples": 0})
