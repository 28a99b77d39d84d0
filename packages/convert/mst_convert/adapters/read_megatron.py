"""A bridge's torch_dist checkpoint as pairs: fused rows sorted out by the families' regions. No torch until read."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from mst_convert.adapters.lora import Factor, Lora, Pair
from mst_convert.adapters.names import BRIDGE, MCORE, TRAINING, Site, gate_up_by_rank, halves_by_rank
from mst_core import torch_dist
from mst_core.errors import InputError, MstError, many
from mst_core.families import Region, Task, unpack_rows
from mst_core.torch_dist import StoredTensor
from mst_core.untrusted import MAX_JSON, read_bytes

if TYPE_CHECKING:
    from torch import Tensor

RUN_CONFIG = "run_config.yaml"
ARGS = "args.json"


class Half(NamedTuple):
    """A stored A or B: of which module, of which part (CanonicalLoRA) of it."""

    module: str
    part: str | None
    which: str


def read(directory: Path, found: Sequence[Site], alpha: float | None) -> Lora:
    """The adapter in ``directory``. InputError with every tensor that has no place in the base, or no partner."""
    stored = torch_dist.metadata(directory)
    kept = {key: tensor for key, tensor in stored.items() if not key.startswith(TRAINING)}
    layout, halves = _halves(directory, kept)
    known = {module: site for site in found for module in (site.module, site.kind)}
    by_key = {tensor.key: half for half, tensor in halves.items()}
    faults: list[MstError] = [
        InputError(_why(key), where=key)
        for key in kept
        if (half := by_key.get(key)) is None
        or (site := known.get(half.module)) is None
        or half.part not in (None, *site.canonical)
    ]
    if faults:
        raise many(faults, what=f"{directory} has tensors that are no part of a LoRA adapter of this base:", hint=_HINT)
    pairs: dict[str, tuple[Factor, Factor]] = {}
    for site in found:
        for part in (None, *site.canonical):
            pair = [_find(halves, site, part, which) for which in "AB"]
            if pair[0] is None and pair[1] is None:
                continue
            if pair[0] is None or pair[1] is None:
                faults.append(
                    InputError("has only one of its two factors", where=f"{site.module} {part or ''}".strip())
                )
                continue
            faults += _take(pairs, layout, site, part, pair[0], pair[1])
    if faults:
        raise many(faults, what=f"{directory} cannot be converted:", hint=_HINT)
    if not pairs:
        raise InputError("the adapter has no tensors", where=directory)
    scale, rslora = _scale(directory, layout, pairs, alpha)
    made = {module: Pair(a, b, scale) for module, (a, b) in pairs.items()}
    aside = len(stored) - len(kept)
    left = [f"{aside} tensors of the optimizer and its state"] if aside else []
    return Lora(layout, directory, made, rslora, left=left)


_HINT = "give the base it was trained on; a checkpoint of the whole model is none"


def _why(key: str) -> str:
    if ".experts." in key:
        return "is an expert's; adapters of experts are not converted"
    return "is neither an A nor a B of one of the base's linear layers"


def _halves(directory: Path, kept: Mapping[str, StoredTensor]) -> tuple[str, dict[Half, StoredTensor]]:
    bridge, mcore, names = {}, {}, set()
    for key, tensor in kept.items():
        if match := BRIDGE.fullmatch(key):
            bridge[Half(match["module"], match["part"], "A" if match["which"] == "in" else "B")] = tensor
        elif match := MCORE.fullmatch(key):
            mcore[Half(match["module"], None, match["which"])] = tensor
            names.add(match["name"])
    if len(names) > 1:
        raise InputError(f"holds several adapters: {', '.join(sorted(names))}", where=directory, hint="save them apart")
    if bool(bridge) == bool(mcore):
        what = "holds adapters of both bridges" if bridge else "holds no adapter of Megatron-Bridge or mcore-bridge"
        raise InputError(what, where=directory)
    return ("megatron-bridge", bridge) if bridge else ("mcore-bridge", mcore)


def _find(
    halves: Mapping[Half, StoredTensor], site: Site, part: str | None, which: str
) -> tuple[StoredTensor, int | None] | None:
    """The tensor, and the layer to take of it where it holds all."""
    if (tensor := halves.get(Half(site.module, part, which))) is not None:
        return tensor, None
    tensor = halves.get(Half(site.kind, part, which))
    return None if tensor is None else (tensor, site.task.layer)


Found = tuple[StoredTensor, int | None]


def _take(
    pairs: dict[str, tuple[Factor, Factor]], layout: str, site: Site, part: str | None, a: Found, b: Found
) -> list[MstError]:
    """Enter the pairs of one stored pair; what is wrong with it."""
    task, where = site.task, f"{site.module} {part or ''}".strip()
    rows = task.rows if part is None else site.rows[site.canonical.index(part)]
    (rank, columns), (out, rank_b) = _shape(a), _shape(b)
    if (out, columns) != (rows, task.columns) or rank != rank_b:
        text = f"A {[rank, columns]} and B {[out, rank_b]} do not fit the base's {[rows, task.columns]}"
        return [InputError(text, where=where)]
    if a[1] is not None and a[0].shape[0] != task.layers:
        return [InputError(f"holds {a[0].shape[0]} layers, the base has {task.layers}", where=where)]
    by_rank = _by_rank(layout, site, part)
    tp = _ranks(b, rows, layout, part) if by_rank else 1
    if by_rank and (tp is None or rows % (2 * tp)):
        return [InputError("is cut into pieces that are no rows of tensor parallel ranks", where=where)]
    order = by_rank(rows, tp) if by_rank and tp and tp > 1 else None
    for number, module in enumerate(site.hf) if part is None else [(None, site.hf[site.canonical.index(part)])]:
        if module in pairs:
            return [InputError("has a fused and a separate adapter", where=where)]
        first = Factor(a[0].key, a[0].dtype, (rank, columns), partial(torch_dist.read, *a))
        own = rows if number is None else site.rows[number]
        second = Factor(b[0].key, b[0].dtype, (own, rank), partial(_rows, b, order, task, number))
        pairs[module] = (first, second)
    return []


def _shape(found: Found) -> tuple[int, int]:
    """(rows, columns) of a layer's matrix; zeros where it is none."""
    tensor, layer = found
    shape = tensor.shape if layer is None else tensor.shape[1:]
    return (shape[0], shape[1]) if len(shape) == 2 else (0, 0)


def _by_rank(layout: str, site: Site, part: str | None) -> Callable[[int, int], tuple[Region, ...]] | None:
    """The map of a B whose order of rows depends on tensor parallelism (see names.py)."""
    if layout == "mcore-bridge" and site.leaf == "linear_fc1":
        return gate_up_by_rank
    return halves_by_rank if part in ("adapter_gate", "adapter_up") else None


def _ranks(found: Found, rows: int, layout: str, part: str | None) -> int | None:
    """How many tensor parallel ranks wrote a B: from the pieces of its rows, which are all of one size."""
    tensor, layer = found
    axis = 0 if layer is None else 1
    pieces = {
        (chunk.offsets[axis], chunk.sizes[axis])
        for chunk in tensor.chunks
        if layer is None or chunk.offsets[0] <= layer < chunk.offsets[0] + chunk.sizes[0]
    }
    count = len(pieces)
    if {size for _, size in pieces} != {rows // count}:
        return None
    # CanonicalLoRA cuts each rank's rows in two; one whole piece is what mst writes for one rank.
    return count if part is None or count == 1 else None if count % 2 else count // 2


def _rows(found: Found, order: tuple[Region, ...] | None, task: Task, number: int | None) -> Tensor:
    """B of one part [rows, r]: out of the ranks' order, and out of the fused rows."""
    tensor = torch_dist.read(*found)
    if order is not None:
        (tensor,) = unpack_rows(order, tensor)
    return tensor if number is None else unpack_rows(task.regions, tensor)[number]


# --- the scale --------------------------------------------------------------------------------------------------


def _scale(
    directory: Path, layout: str, pairs: Mapping[str, tuple[Factor, Factor]], given: float | None
) -> tuple[float, bool]:
    """(scale, is it rsLoRA's) of a checkpoint: one rank and one alpha."""
    ranks = sorted({a.shape[0] for a, _ in pairs.values()})
    if len(ranks) > 1:
        raise InputError(f"has the ranks {ranks}; a bridge's adapter has one", where=directory)
    said, rslora, where = _said(directory, layout)
    if given is not None and said is not None and given != said:
        raise InputError(f"--alpha {given:g}: its {where.name} says {said:g}", where=directory)
    alpha = said if said is not None else given
    if alpha is None:
        raise InputError(
            f"says nowhere what its alpha is: no {where.name} here", where=directory, hint="--alpha, as it was trained"
        )
    return alpha / (math.sqrt(ranks[0]) if rslora else ranks[0]), rslora


def _said(directory: Path, layout: str) -> tuple[float | None, bool, Path]:
    """(alpha, rsLoRA, the file that says so)."""
    inner = torch_dist.checkpoint_dir(directory)
    name = RUN_CONFIG if layout == "megatron-bridge" else ARGS
    path = next((place / name for place in (inner, inner.parent) if (place / name).is_file()), inner / name)
    if not path.is_file():
        return None, False, path
    if layout == "mcore-bridge":
        args = _mapping(path, json.loads)
        return _number(args.get("lora_alpha"), path), bool(args.get("use_rslora")), path
    peft = _mapping(path, _yaml).get("peft") or {}
    kind = str(peft.get("_target_", "LoRA")).rpartition(".")[2]
    if kind not in ("LoRA", "VLMLoRA", "CanonicalLoRA"):
        raise InputError(f"is of the kind {kind}; only LoRA and CanonicalLoRA can be converted", where=path)
    return _number(peft.get("alpha"), path), False, path


def _yaml(data: bytes) -> Any:
    return yaml.safe_load(data)


def _mapping(path: Path, parse: Callable[[bytes], Any]) -> dict[str, Any]:
    try:
        value = parse(read_bytes(path, MAX_JSON))
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise InputError(f"cannot be read: {' '.join(str(error).split())[:300]}", where=path) from error
    if not isinstance(value, dict):
        raise InputError("is no mapping", where=path)
    return value


def _number(value: object, path: Path) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise InputError(f"says an alpha of {value!r}", where=path)
    return float(value)
