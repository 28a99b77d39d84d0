"""What must be there and what is there, before a byte is read: every tensor of a source has exactly one use.

Pure: a model's tasks and a source's headers go in, a list of moves or one error with every fault comes out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from mst_core import torch_dist
from mst_core.errors import InputError, MstError, many
from mst_core.families import Family, Model, Task
from mst_core.tensors import DTYPE_BYTES, TensorRef
from mst_core.torch_dist import StoredTensor

CASTS = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
WEIGHT_DTYPES = ("BF16", "F16", "F32")
LM_HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@dataclass(frozen=True)
class Import:
    """One native tensor to make: its task, its sources in the order of the task, the dtype to write."""

    task: Task
    sources: tuple[TensorRef, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return prod(self.task.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Export:
    """One native tensor to take apart: where it is stored (and which layer of it), the dtype to write."""

    task: Task
    stored: StoredTensor
    layer: int | None
    dtype: str

    @property
    def nbytes(self) -> int:
        return sum(prod(spec.shape) for spec in self.task.hf) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Imports:
    """All moves from Hugging Face to Megatron, and the tensors that are accounted for by name.

    buffers    computed buffers of old checkpoints, not converted
    lm_head    the copy of the embedding that a tied model shipped, to be compared with it, or None
    """

    moves: tuple[Import, ...]
    buffers: tuple[str, ...]
    lm_head: TensorRef | None


@dataclass(frozen=True)
class Exports:
    """All moves from Megatron to Hugging Face, and how many entries of training state are left aside."""

    moves: tuple[Export, ...]
    training_state: int


def check_config(config: Mapping[str, object], where: Path) -> None:
    """Refuse quantised weights: their bytes are no weights without their scales."""
    quantization = config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, Mapping) else "unknown"
        raise InputError(
            f"the weights are quantised ({method}), and only plain ones can be converted",
            where=where,
            hint="give the unquantised model",
        )


def account_hf(
    model: Model,
    tasks: Sequence[Task],
    refs: Mapping[str, TensorRef],
    cast: str | None,
    where: Path,
    *,
    mixed: bool = False,
) -> Imports:
    """Match the tensors of a Hugging Face directory with ``tasks``; every fault in one InputError.

    ``mixed``: the tensors of one key may differ in dtype (they are not going into one).
    """
    wanted = {spec.name: spec.shape for task in tasks for spec in task.hf}
    buffers = tuple(sorted(name for name in refs if model.family.is_ignored(name, model.dims)))
    copied = refs.get(LM_HEAD) if model.tied else None
    faults: list[MstError] = []
    for name, shape in wanted.items():
        if name not in refs:
            faults.append(InputError(f"missing, expected {list(shape)}", where=name))
        else:
            faults += _tensor_faults(refs[name], shape)
    known = {*wanted, *buffers, *([LM_HEAD] if copied else [])}
    faults += [InputError("not known to this architecture", where=name) for name in sorted(refs.keys() - known)]
    if copied:
        faults += _tensor_faults(copied, wanted[EMBEDDING])
    if faults:
        raise many(faults, what=f"{where} does not hold a {model.family.architecture}:", hint=_hint(model.family))
    if not cast and not mixed:
        _check_even((task.key, [refs[spec.name].dtype for spec in task.hf]) for task in tasks)
    moves = []
    for task in tasks:
        sources = tuple(refs[spec.name] for spec in task.hf)
        moves.append(Import(task, sources, CASTS[cast] if cast else sources[0].dtype))
    return Imports(tuple(moves), buffers, copied)


def account_megatron(
    model: Model, tasks: Sequence[Task], stored: Mapping[str, StoredTensor], cast: str | None, where: Path
) -> Exports:
    """Match the tensors of a torch_dist checkpoint with ``tasks`` (of an unpadded vocabulary); faults as above."""
    faults: list[MstError] = []
    moves: list[Export] = []
    used: set[str] = set()
    for task in tasks:
        try:
            found, layer = torch_dist.find(stored, task.key, task.layer)
        except KeyError:
            faults.append(InputError(f"missing, expected {list(task.shape)}", where=task.native))
            continue
        used.add(found.key)
        shape = found.shape if layer is None else found.shape[1:]
        padded = task.hf[0].name in (EMBEDDING, LM_HEAD) and shape[1:] == task.shape[1:] and shape[0] >= task.shape[0]
        layers = (found.shape[0] if found.shape else 0) if layer is not None else task.layers
        if layers != task.layers or not (padded or shape == task.shape):
            expected = task.shape if layer is None else (task.layers, *task.shape)
            faults.append(InputError(f"{list(found.shape)}, expected {list(expected)}", where=task.native))
        elif found.dtype not in WEIGHT_DTYPES:
            faults.append(InputError(f"has the dtype {found.dtype}, which is no weight's", where=task.native))
        moves.append(Export(task, found, layer, CASTS[cast] if cast else found.dtype))
    left = stored.keys() - used
    state = {key for key in left if key.startswith(("optimizer.", "rng_state", "rerun_state"))}
    for key in sorted(left - state):
        tied = " (config.json says tied)" if key == "output_layer.weight" else ""
        faults.append(InputError(f"not known to this architecture{tied}", where=key))
    if faults:
        raise many(faults, what=f"{where} does not hold a {model.family.architecture}:", hint=_hint(model.family))
    return Exports(tuple(moves), len(state))


def _tensor_faults(ref: TensorRef, shape: tuple[int, ...]) -> list[MstError]:
    if ref.dtype not in WEIGHT_DTYPES:
        return [InputError(f"has the dtype {ref.dtype}, which is no plain weight's", where=ref.name)]
    if ref.shape != shape:
        return [InputError(f"{list(ref.shape)}, expected {list(shape)}", where=ref.name)]
    return []


def _check_even(groups: Iterable[tuple[str, list[str]]]) -> None:
    """One key (all layers, all sources) has one dtype in torch_dist."""
    seen: dict[str, set[str]] = {}
    for key, dtypes in groups:
        seen.setdefault(key, set()).update(dtypes)
    faults = [
        InputError(f"its sources have several dtypes: {', '.join(sorted(dtypes))}", where=key)
        for key, dtypes in seen.items()
        if len(dtypes) > 1
    ]
    if faults:
        raise many(faults, what="Megatron keeps one dtype for all layers of a tensor:", hint="--dtype makes them one")


def _hint(family: Family) -> str:
    return f"config.json says {family.architecture}; is it the config.json of these weights?"
