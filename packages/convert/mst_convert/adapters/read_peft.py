"""A PEFT directory as pairs. What the bridges have no place for is refused by name. No torch.

Experts come in two generations: modules (``X.mlp.experts.3.gate_proj``) and, since transformers 5, parameters of all
experts (``target_parameters``: merge/experts.py); both become a pair for each module of each expert.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mst_convert.adapters.lora import Factor, Lora, Pair, Recent
from mst_convert.adapters.names import Site, unfit
from mst_convert.merge import adapter as peft
from mst_convert.merge.adapter import Adapter
from mst_convert.merge.experts import Stack, in_memory, stacks, transposed
from mst_convert.merge.parts import Factors
from mst_convert.merge.targets import is_parameter, is_target, pattern_value
from mst_core import tensors
from mst_core.errors import InputError, MstError, many
from mst_core.tensors import TensorRef

if TYPE_CHECKING:
    from torch import Tensor

NO_PLACE = "the bridges' LoRA has no place for it"
HINT = "mst-merge merges such adapters: mst-merge --model BASE --adapter DIR --to megatron --out OUT"


def read(directory: Path, found: Sequence[Site]) -> Lora:
    """The adapter in ``directory``. InputError with everything in it that no bridge could hold."""
    adapter = peft.read(directory)
    places = {in_memory(module): (module, site) for site in found for module in site.hf}
    shapes = {module: (rows, site.columns) for site in found for module, rows in zip(site.hf, site.rows, strict=True)}
    boxes = stacks({spec.name: spec.shape for site in found for spec in site.specs})
    faults = list(_unplaced(adapter))
    pairs: dict[str, Pair] = {}
    stacked: dict[str, list[Factors]] = {}
    for one in adapter.parts.factors:
        module = places.get(in_memory(one.module), (one.module, None))[0]
        if one.module in boxes:
            stacked.setdefault(one.module, []).append(one)
        elif one.embedding or one.depth or one.a is None or one.b is None or module not in shapes:
            faults.append(InputError(unfit(one.module), where=one.module))
        elif fault := _misfit(adapter, one, one.a, one.b, shapes[module]):
            faults.append(InputError(fault, where=one.module))
        else:
            pairs[module] = Pair(_factor(one.a), _factor(one.b), scale(adapter, _key(adapter, one.module)))
    for box, several in stacked.items():
        _stacked(adapter, box, several, boxes[box], places, pairs, faults)
    if not faults:
        faults += _missing(adapter, shapes, pairs, boxes)
    if faults:
        raise many(faults, what=f"{directory} cannot be converted:", hint=HINT)
    copies = len(adapter.parts.copies)
    left = [f"{copies} tensors of the base that PEFT saved too"] if copies else []
    return Lora("peft", directory, pairs, bool(adapter.config.get("use_rslora")), dict(adapter.config), left)


def _key(adapter: Adapter, module: str) -> str:
    """What PEFT compares its patterns with: a router is a parameter since transformers 5."""
    return f"{module}.weight" if is_parameter(adapter.config, f"{module}.weight") else module


def _missing(
    adapter: Adapter, shapes: Mapping[str, object], pairs: Mapping[str, Pair], boxes: Mapping[str, list[Stack]]
) -> Iterator[MstError]:
    """What the config names, and the adapter does not hold. Experts are modules only where one of them is there."""
    single = any(".experts." in one.module for one in adapter.parts.factors)
    for module in shapes:
        if module not in pairs and is_target(adapter.config, module) and (single or ".experts." not in module):
            yield InputError("is in target_modules but has no tensors", where=module)
    have = {one.module for one in adapter.parts.factors}
    for box, of_box in boxes.items():
        for stack in of_box:
            if box not in have and is_parameter(adapter.config, stack.name):
                yield InputError("is in target_parameters but has no tensors", where=stack.name)


def _stacked(
    adapter: Adapter, box: str, several: list[Factors], of_box: list[Stack],
    places: Mapping[str, tuple[str, Site]], pairs: dict[str, Pair], faults: list[MstError],
) -> None:  # fmt: skip
    """Enter the pairs of parameters of all experts: from the inside out they are the targets, as PEFT wraps them."""
    named = [stack for stack in of_box if is_parameter(adapter.config, stack.name)]
    if len(named) != len(several):
        names = ", ".join(stack.name.rpartition(".")[2] for stack in named) or "none"
        what = f"target_parameters names {names} of its parameters, adapted are {len(several)}"
        faults.append(InputError(what, where=box))
        return
    config = adapter.config
    for one, stack in zip(sorted(several, key=lambda one: -one.depth), named, strict=True):
        if one.embedding or one.a is None or one.b is None:
            faults.append(InputError("has tensors that PEFT does not write for a parameter", where=stack.name))
            continue
        rank = pattern_value(config.get("rank_pattern"), stack.name, config["r"])
        turned = transposed(stack, one.a.shape, one.b.shape, config.get("peft_version"))
        experts = stack.shape[0]
        if isinstance(turned, str) or one.a.shape[0] != rank * experts or one.b.shape[1] != rank * experts:
            what = turned if isinstance(turned, str) else f"is not of the rank {rank} that the config says"
            faults.append(InputError(what, where=stack.name))
            continue
        _cut(one.a, one.b, stack, turned, scale(adapter, stack.name), places, pairs)


def _cut(
    a: TensorRef, b: TensorRef, stack: Stack, turned: bool, scale: float,
    places: Mapping[str, tuple[str, Site]], pairs: dict[str, Pair],
) -> None:  # fmt: skip
    """A pair for each module: A [E r, in] expert by expert, B [out, r E] with the experts of a rank side by side.

    turned   the delta of the parameter, as the base has it, is (B A).T; where that is [in, out], B A is [out, in]
    """
    recent, experts = Recent(), stack.shape[0]
    rank = a.shape[0] // experts

    def read(expert: int, rows: slice, which: int) -> Tensor:
        a_in = recent.get("A", partial(tensors.read, a)).reshape(experts, rank, -1)[expert]
        out_b = recent.get("B", partial(tensors.read, b)).reshape(-1, rank, experts)[:, :, expert]
        pair: tuple[Tensor, Tensor] = (out_b.T, a_in.T) if flipped else (a_in, out_b)
        return (pair[1][rows] if which else pair[0]).contiguous()

    for piece in stack.pieces:
        for expert in [piece.expert] if piece.expert is not None else range(experts):
            box, _, parameter = piece.name.rpartition(".")
            module = piece.name.removesuffix(".weight") if piece.expert is not None else f"{box}.{expert}.{parameter}"
            site = places[in_memory(module)][1]
            flipped = turned != site.task.transposed
            rows = slice(piece.start, piece.stop) if piece.expert is not None else slice(None)
            refs = (b, a) if flipped else (a, b)
            shapes = ((rank, site.columns), (site.rows[site.hf.index(module)], rank))
            first, second = (
                Factor(ref.name, ref.dtype, shape, partial(read, expert, rows, which))
                for which, (ref, shape) in enumerate(zip(refs, shapes, strict=True))
            )
            pairs[module] = Pair(first, second, scale)


def scale(adapter: Adapter, module: str) -> float:
    """alpha / r of a module, with rsLoRA alpha / sqrt(r); patterns as PEFT reads them."""
    config = adapter.config
    rank = pattern_value(config.get("rank_pattern"), module, config["r"])
    alpha = pattern_value(config.get("alpha_pattern"), module, config["lora_alpha"])
    return float(alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def _unplaced(adapter: Adapter) -> Iterator[MstError]:
    where = f"{adapter.directory.name}/{peft.CONFIG}"
    for name in ("use_dora", "lora_bias"):
        if adapter.config.get(name):
            yield InputError(f"{name}: {NO_PLACE}", where=where)
    for name in [*adapter.parts.whole, *adapter.parts.rows]:
        yield InputError(f"is replaced (modules_to_save, bias or trainable tokens): {NO_PLACE}", where=name)


def _misfit(adapter: Adapter, one: Factors, a: TensorRef, b: TensorRef, shape: tuple[int, int]) -> str | None:
    config = adapter.config
    rank = pattern_value(config.get("rank_pattern"), one.module, config["r"])
    if a.shape[0] != rank or b.shape[1] != rank:
        return f"A {list(a.shape)} and B {list(b.shape)} are not of the rank {rank} that the config says"
    if (b.shape[0], a.shape[1]) != shape:
        return f"A {list(a.shape)} and B {list(b.shape)} do not fit the base's {list(shape)}"
    return None


def _factor(ref: TensorRef) -> Factor:
    return Factor(ref.name, ref.dtype, ref.shape, partial(tensors.read, ref))
