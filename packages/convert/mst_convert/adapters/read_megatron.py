"""A bridge's torch_dist checkpoint as pairs: fused rows sorted out by the families' regions. No torch until read."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from mst_convert.adapters.lora import Factor, Lora, Pair, Recent
from mst_convert.adapters.names import BRIDGE, MCORE, TRAINING, Site, gate_up_by_rank, halves_by_rank, unfit
from mst_core import torch_dist
from mst_core.errors import InputError, MstError, many
from mst_core.families import Region, unpack_rows
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
    recent = Recent()
    for site in found:
        for part in (None, *site.canonical):
            pair = [_find(halves, site, part, which) for which in "AB"]
            if pair[0] is None and pair[1] is None:
                continue
            if pair[0] is None or pair[1] is None:
                faults.append(InputError("has only one of its two factors", where=f"{site.where} {part or ''}".strip()))
                continue
            faults += _take(pairs, recent, layout, site, part, pair[0], pair[1])
    if faults:
        raise many(faults, what=f"{directory} cannot be converted:", hint=_HINT)
    if not pairs:
        raise InputError("the adapter has no tensors", where=directory)
    scale, rslora = _scale(directory, layout, pairs, alpha)
    made = {module: Pair(a, b, scale(a.shape[0])) for module, (a, b) in pairs.items()}
    aside = len(stored) - len(kept)
    left = [f"{aside} tensors of the optimizer and its state"] if aside else []
    return Lora(layout, directory, made, rslora, left=left + _padding(halves, found))


def _padding(halves: Mapping[Half, StoredTensor], found: Sequence[Site]) -> list[str]:
    rows = [
        b.shape[0] - sum(site.rows) for site in found if (b := halves.get(Half(site.module, None, "B"))) and _head(site)
    ]
    return [f"{count} rows of the vocabulary's padding" for count in rows if count]


def _head(site: Site) -> bool:
    return site.leaf == "output_layer"


_HINT = "give the base it was trained on; a checkpoint of the whole model is none"


def _why(key: str) -> str:
    if re.search(r"\.experts\.\d", key):
        return "is one expert's by its number (singleton_local_shards, as FSDP saves them): save it as torch_dist"
    if BRIDGE.fullmatch(key) or MCORE.fullmatch(key):
        return unfit(key)
    return "is neither an A nor a B"


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


class Found(NamedTuple):
    """A stored tensor, and what to take of it: the layer, where it holds all, and the expert, where it is for one."""

    tensor: StoredTensor
    layer: int | None
    expert: int | None

    @property
    def axes(self) -> int:
        """Axes before those of the matrix. An expert's tensor may have none for experts: then it is for all of them."""
        return (self.layer is not None) + (self.expert is not None and len(self.shape) == 3)

    @property
    def shape(self) -> tuple[int, ...]:
        """Without the layer axis."""
        return self.tensor.shape if self.layer is None else self.tensor.shape[1:]

    @property
    def matrix(self) -> tuple[int, int]:
        """(rows, columns) of the matrix; zeros where it is none."""
        sizes = self.tensor.shape[self.axes :]
        return (sizes[0], sizes[1]) if len(sizes) == 2 else (0, 0)

    def read(self, recent: Recent) -> Tensor:
        """The matrix. A layer is read once for all its experts."""
        whole: Tensor = recent.get((self.tensor.key, self.layer), partial(torch_dist.read, self.tensor, self.layer))
        return whole[self.expert] if whole.ndim == 3 else whole


def _find(halves: Mapping[Half, StoredTensor], site: Site, part: str | None, which: str) -> Found | None:
    """The tensor of a layer by its own key, or of all layers."""
    if (tensor := halves.get(Half(site.module, part, which))) is not None:
        return Found(tensor, None, site.expert)
    tensor = halves.get(Half(site.kind, part, which))
    return None if tensor is None else Found(tensor, site.task.layer, site.expert)


def _take(
    pairs: dict[str, tuple[Factor, Factor]],
    recent: Recent,
    layout: str,
    site: Site,
    part: str | None,
    a: Found,
    b: Found,
) -> list[MstError]:
    """Enter the pairs of one stored pair; what is wrong with it."""
    where = f"{site.where} {part or ''}".strip()
    rows = sum(site.rows) if part is None else site.rows[site.canonical.index(part)]
    (rank, columns), (out, rank_b) = a.matrix, b.matrix
    fits = out >= rows if _head(site) else out == rows
    if not fits or columns != site.columns or rank != rank_b:
        text = f"A {[rank, columns]} and B {[out, rank_b]} do not fit the base's {[rows, site.columns]}"
        return [InputError(text, where=where)]
    for one in (a, b):
        layers, experts = (one.tensor.shape[0] if one.layer is not None else None), one.shape[0]
        if layers not in (None, site.task.layers):
            return [InputError(f"holds {layers} layers, the base has {site.task.layers}", where=where)]
        if len(one.shape) == 3 and experts != site.experts:
            return [InputError(f"holds {experts} experts, the base has {site.experts}", where=where)]
    by_rank = _by_rank(layout, site, part)
    tp = _ranks(b, rows, part) if by_rank else 1
    if by_rank and (tp is None or rows % (2 * tp)):
        return [InputError("is cut into pieces that are no rows of tensor parallel ranks", where=where)]
    order = by_rank(rows, tp) if by_rank and tp and tp > 1 else None
    for number, module in enumerate(site.hf) if part is None else [(None, site.hf[site.canonical.index(part)])]:
        if module in pairs:
            return [InputError("has a fused and a separate adapter", where=where)]
        first = Factor(a.tensor.key, a.tensor.dtype, (rank, columns), partial(a.read, recent))
        own = rows if number is None else site.rows[number]
        second = Factor(
            b.tensor.key, b.tensor.dtype, (own, rank), partial(_rows, b, recent, order, site.regions, number)
        )
        pairs[module] = (first, second)
    return []


def _by_rank(layout: str, site: Site, part: str | None) -> Callable[[int, int], tuple[Region, ...]] | None:
    """The map of a B whose order of rows depends on tensor parallelism (see names.py)."""
    if layout == "mcore-bridge" and site.leaf == "linear_fc1" and site.expert is None:
        return gate_up_by_rank  # it refuses expert tensor parallelism
    return halves_by_rank if part in ("adapter_gate", "adapter_up") else None


def _ranks(found: Found, rows: int, part: str | None) -> int | None:
    """How many tensor parallel ranks wrote a B: from the pieces of its rows, which are all of one size."""
    tensor, layer, _ = found
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


def _rows(
    found: Found, recent: Recent, order: tuple[Region, ...] | None, regions: tuple[Region, ...], number: int | None
) -> Tensor:
    """B of one part [rows, r]: out of the ranks' order, and out of the fused rows."""
    tensor = found.read(recent)
    if order is not None:
        (tensor,) = unpack_rows(order, tensor)
    return tensor if number is None else unpack_rows(regions, tensor)[number]


# --- the scale --------------------------------------------------------------------------------------------------


def _scale(
    directory: Path, layout: str, pairs: Mapping[str, tuple[Factor, Factor]], given: float | None
) -> tuple[Callable[[int], float], bool]:
    """(the scale of a rank, is it rsLoRA's) of a checkpoint: one alpha, and one rank but for normalize_moe_lora."""
    ranks = sorted({a.shape[0] for a, _ in pairs.values()})
    said = _said(directory, layout)
    if len(ranks) > 1 and not said.normalized:
        raise InputError(f"has the ranks {ranks}; a bridge's adapter has one", where=directory)
    name = said.where.name
    if given is not None and said.alpha is not None and given != said.alpha:
        raise InputError(f"--alpha {given:g}: its {name} says {said.alpha:g}", where=directory)
    alpha = said.alpha if said.alpha is not None else given
    if alpha is None:
        hint = "--alpha, as it was trained"
        raise InputError(f"says nowhere what its alpha is: no {name} here", where=directory, hint=hint)
    found = alpha
    return lambda rank: found / (math.sqrt(rank) if said.rslora else rank), said.rslora


class Said(NamedTuple):
    """What a side file says; ``normalized``: experts have a rank of their own (normalize_moe_lora)."""

    alpha: float | None
    rslora: bool
    normalized: bool
    where: Path


def _said(directory: Path, layout: str) -> Said:
    inner = torch_dist.checkpoint_dir(directory)
    name = RUN_CONFIG if layout == "megatron-bridge" else ARGS
    path = next((place / name for place in (inner, inner.parent) if (place / name).is_file()), inner / name)
    if not path.is_file():
        return Said(None, False, False, path)
    if layout == "mcore-bridge":
        args = _mapping(path, json.loads)
        return Said(_number(args.get("lora_alpha"), path), bool(args.get("use_rslora")), False, path)
    peft = _mapping(path, _yaml).get("peft") or {}
    kind = str(peft.get("_target_", "LoRA")).rpartition(".")[2]
    if kind not in ("LoRA", "VLMLoRA", "CanonicalLoRA"):
        raise InputError(f"is of the kind {kind}; only LoRA and CanonicalLoRA can be converted", where=path)
    return Said(_number(peft.get("alpha"), path), False, bool(peft.get("normalize_moe_lora")), path)


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
