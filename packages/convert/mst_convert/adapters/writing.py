"""The two bridges' outputs: a torch_dist checkpoint with the names and side files that they read.

What a bridge's loader reads (sources as in names.py):

    megatron-bridge  iter_0000001/ for load_peft_adapter_checkpoint and AutoBridge.export_adapter_ckpt; run_config.yaml
                     in it, whose ``peft`` says kind, dim, alpha and target_modules
    mcore-bridge     --mcore_adapter DIR of ms-swift: the tracker, iter_0000001/, args.json; its common state must hold
                     ``args`` with the parallel sizes, and every TransformerEngine layer an ``_extra_state``
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import yaml
from torch import Tensor

from mst_convert.adapters import fusing
from mst_convert.adapters.fusing import Shared
from mst_convert.adapters.names import Site, gate_up_by_rank, halves_by_rank, targets
from mst_core.checkpoint import Staging
from mst_core.errors import InputError
from mst_core.families import Model, Region, pack_rows
from mst_core.pickling import Instance
from mst_core.torch_dist import TorchDistWriter, Written

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


def write_bridge(staging: Staging, recipe: Recipe, everywhere: list[Site], model: Model) -> None:
    """Megatron-Bridge's checkpoint: LoRA, or CanonicalLoRA where the form is separate."""
    canonical = recipe.form == "separate"
    writer = _writer(staging, recipe, _bridge(recipe), model)
    writer.finish([("common_state/shard_0_1", _state())])
    named = targets([one.site for one in recipe.shared], everywhere, canonical)
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
            # Each expert its own: where all are equal, one that is shared is the same numbers in the same tensor.
            **({"share_expert_adapters": False} if any(one.site.expert is not None for one in recipe.shared) else {}),
        },
    }
    staging.write(f"{PREFIX_DIR}/run_config.yaml", yaml.safe_dump(config, sort_keys=True))


def write_mcore(staging: Staging, recipe: Recipe, everywhere: list[Site], model: Model) -> None:
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
        "target_modules": targets([one.site for one in recipe.shared], everywhere, wild=False),
        "tensor_model_parallel_size": recipe.tp,
        "pipeline_model_parallel_size": 1,
        "no_save_optim": True,
        "no_save_rng": True,
    }
    objects: list[tuple[str, Any]] = [("common_state/shard_0_1", {**_state(), "args": _namespace(arguments)})]
    for one in recipe.shared:
        at, of = ([one.site.task.layer], [one.site.task.layers]) if _layered(one.site, model) else ([], [])
        if one.site.expert is not None:
            at, of = [*at, one.site.expert], [*of, one.site.experts]
        shard = f"{'.'.join(map(str, at or [0]))}_{'.'.join(map(str, of or [1]))}"
        for which in "AB":
            objects.append((f"{_module(one.site, model)}.lora_{which}.{NAME}._extra_state/shard_{shard}", None))
    writer.finish(objects)
    staging.write("args.json", json.dumps(arguments, indent=2, sort_keys=True) + "\n")


Entry = tuple[Site, str, Tensor, tuple[Region, ...] | None, int]
"""Layer, what follows its name, the matrix (of all its experts), its rows in the ranks' order, the pieces of it."""


def _layers(recipe: Recipe) -> Iterator[tuple[Site, list[Shared]]]:
    """Each layer, and its experts or itself."""
    for _, group in groupby(recipe.shared, key=lambda one: one.site.module):
        several = list(group)
        yield several[0].site, several


def _pair(site: Site, several: list[Shared], recipe: Recipe) -> tuple[Tensor, Tensor]:
    """A [rank, in] and B [rows, rank] of a layer; with an axis before for its experts."""
    pairs = []
    for one in several:
        a, bs = fusing.fused(one, *_how(recipe))
        pairs.append((a, pack_rows(one.site.regions, one.site.height, bs)))
    if site.expert is None:
        return pairs[0]
    return torch.stack([a for a, _ in pairs]), torch.stack([b for _, b in pairs])


def _bridge(recipe: Recipe) -> Iterator[Entry]:
    for site, several in _layers(recipe):
        if recipe.form == "separate" and site.canonical:
            for part, (a, b) in zip(site.canonical, fusing.separate(several[0], *_how(recipe)), strict=True):
                cut = part in ("adapter_gate", "adapter_up") and recipe.tp > 1
                order = halves_by_rank(_even(site, b.shape[0], recipe.tp), recipe.tp) if cut else None
                yield site, f".adapter.{part}.linear_in.weight", a, None, 1
                yield site, f".adapter.{part}.linear_out.weight", b, order, 2 * recipe.tp if cut else 1
            continue
        a, b = _pair(site, several, recipe)
        yield site, ".adapter.linear_in.weight", a, None, 1
        yield site, ".adapter.linear_out.weight", b, None, 1


def _mcore(recipe: Recipe) -> Iterator[Entry]:
    for site, several in _layers(recipe):
        a, b = _pair(site, several, recipe)
        cut = site.leaf == "linear_fc1" and recipe.tp > 1 and site.expert is None
        order = gate_up_by_rank(_even(site, b.shape[0], recipe.tp), recipe.tp) if cut else None
        yield site, f".lora_A.{NAME}.weight", a, None, 1
        yield site, f".lora_B.{NAME}.weight", b, order, recipe.tp if cut else 1


def _how(recipe: Recipe) -> tuple[int, float, str]:
    return recipe.rank, recipe.scale, recipe.dtype


def _even(site: Site, rows: int, tp: int) -> int:
    if rows % (2 * tp):
        raise InputError(f"its {rows} rows cannot be cut for --tp {tp}", where=site.module)
    return rows


def _layered(site: Site, model: Model) -> bool:
    """Whether all layers are in one tensor."""
    return model.uniform and site.task.layer is not None


def _module(site: Site, model: Model) -> str:
    return site.kind if _layered(site, model) else site.module


def _writer(staging: Staging, recipe: Recipe, entries: Iterable[Entry], model: Model) -> TorchDistWriter:
    writer = TorchDistWriter(staging, PREFIX_DIR)
    for site, suffix, matrix, order, pieces in entries:
        *experts, rows, columns = matrix.shape
        ordered = matrix if order is None else pack_rows(order, rows, [matrix])
        lead, at, one = ((site.task.layers,), (site.task.layer or 0,), (1,)) if _layered(site, model) else ((), (), ())
        each = rows // pieces
        for number in range(pieces):
            offsets, sizes = (*at, *(0 for _ in experts), number * each, 0), (*one, *experts, each, columns)
            chunk = Written(
                _module(site, model) + suffix, recipe.dtype, (*lead, *experts, rows, columns), offsets, sizes
            )
            writer.put(chunk, ordered[..., number * each : (number + 1) * each, :])
    return writer


def _state() -> dict[str, Any]:
    content = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    return {"checkpoint_version": 3.0, "iteration": ITERATION, "content_metadata": content}


def _namespace(arguments: dict[str, Any]) -> Instance:
    return Instance("argparse.Namespace", {**arguments, "consumed_train_samples": 0})
