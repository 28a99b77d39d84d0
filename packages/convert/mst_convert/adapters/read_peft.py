"""A PEFT directory as pairs. What is not plain LoRA on a linear layer of the decoder is refused by name. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from mst_convert.adapters.lora import Factor, Lora, Pair
from mst_convert.adapters.names import Site
from mst_convert.merge import adapter as peft
from mst_convert.merge.adapter import Adapter
from mst_convert.merge.parts import Factors
from mst_convert.merge.targets import is_target, pattern_value
from mst_core import tensors
from mst_core.errors import InputError, MstError, many
from mst_core.tensors import TensorRef

NO_PLACE = "the bridges' LoRA has no place for it"
HINT = "mst-merge merges such adapters; only plain LoRA on the decoder's linear layers has names in Megatron"


def read(directory: Path, found: Sequence[Site]) -> Lora:
    """The adapter in ``directory``. InputError with everything in it that no bridge could hold."""
    adapter = peft.read(directory)
    shapes = {spec.name.removesuffix(".weight"): (spec.rows, spec.columns) for site in found for spec in site.task.hf}
    faults = list(_unplaced(adapter))
    pairs: dict[str, Pair] = {}
    for one in adapter.parts.factors:
        if one.depth or one.embedding or one.a is None or one.b is None:
            faults.append(
                InputError(f"adapts an embedding or a parameter (target_parameters): {NO_PLACE}", where=one.module)
            )
        elif one.module not in shapes:
            faults.append(InputError(_why(one.module), where=one.module))
        elif fault := _misfit(adapter, one, one.a, one.b, shapes[one.module]):
            faults.append(InputError(fault, where=one.module))
        else:
            pairs[one.module] = Pair(_factor(one.a), _factor(one.b), scale(adapter, one.module))
    missing = [module for module in shapes if is_target(adapter.config, module) and module not in pairs]
    if not faults:
        faults += [InputError("is in target_modules but has no tensors", where=module) for module in missing]
    if faults:
        raise many(faults, what=f"{directory} cannot be converted:", hint=HINT)
    return Lora("peft", directory, pairs, bool(adapter.config.get("use_rslora")), dict(adapter.config))


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


def _why(module: str) -> str:
    if ".experts." in module:
        return "is an expert's; adapters of experts are not converted"
    return "is no linear layer of this base's decoder"


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
