"""torch_dist checkpoints (torch.distributed.checkpoint as megatron-core writes it), read without Megatron.

The table of contents (``.metadata``) is read with a restricted unpickler and no torch; a tensor's chunks are read
one by one, whatever parallel layout wrote them. Keys may carry a ``model.`` prefix in other writers' files; the
stacked layout has a leading layer axis, the per-layer layout a number in the key: ``find`` knows both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, pairwise
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mst_core import torch_pickle
from mst_core.blocks import Array, Block, Place
from mst_core.errors import InputError
from mst_core.families import Task
from mst_core.tensors import DTYPE_BYTES, read_into, read_json, torch_dtype

# The writer belongs to this format, and those who read its contract look for it here.
from mst_core.torch_dist_write import (
    TorchDistWriter,
    Written,
    extra_states,
    objects,
    release_state,
    write_megatron_sidecar,
)
from mst_core.untrusted import read_bytes, regular, sizes

if TYPE_CHECKING:
    import torch

__all__ = [
    "Chunk",
    "Contents",
    "StoredTensor",
    "TorchDistWriter",
    "Written",
    "blocks",
    "checkpoint_dir",
    "common_state",
    "data_offset",
    "extra_states",
    "find",
    "is_megatron",
    "metadata",
    "object_bytes",
    "objects",
    "read",
    "read_chunk",
    "release_state",
    "write_megatron_sidecar",
]

TRACKER = "latest_checkpointed_iteration.txt"
MAX_TRACKER = 64
"""Bytes of the largest tracker that is read."""
MAX_STAGGERED = 500
"""Chunks of one tensor that are compared pair by pair, where they form no grid."""


@dataclass(frozen=True)
class Chunk:
    """A block of a tensor and where its ``torch.save`` archive is."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: Path
    file_offset: int
    length: int


@dataclass(frozen=True)
class StoredTensor:
    """One key: its global shape and dtype (safetensors name), and the chunks that tile it."""

    key: str
    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class StoredObject:
    """A non-tensor entry: where its archive is."""

    key: str
    file: Path
    file_offset: int
    length: int


@dataclass(frozen=True)
class Contents:
    """What ``.metadata`` lists."""

    tensors: dict[str, StoredTensor]
    objects: dict[str, StoredObject]


def is_megatron(model_dir: Path) -> bool:
    """Whether a directory looks like a Megatron checkpoint (of any kind)."""
    return (model_dir / TRACKER).is_file() or (model_dir / ".metadata").is_file()


def iteration_dir(model_dir: Path) -> Path:
    """The directory that the tracker names. InputError if there is none."""
    tracker = model_dir / TRACKER
    if not tracker.is_file():
        hint = "give a Megatron checkpoint, or convert: mst-convert --model HF_DIR --to megatron --out DIR"
        raise InputError(f"holds no {TRACKER}", where=model_dir, hint=hint)
    named = read_bytes(tracker, MAX_TRACKER).decode("ascii", "replace").strip()
    if named != "release" and not named.isdecimal():
        raise InputError(f"names {named!r}, neither release nor an iteration", where=tracker)
    found = model_dir / ("release" if named == "release" else f"iter_{int(named):07d}")
    if not found.is_dir():
        raise InputError(f"names {named}, but {found.name}/ does not exist", where=tracker)
    return found


def checkpoint_dir(model_dir: Path) -> Path:
    """The directory with the weights: what the tracker names, or ``model_dir`` itself. InputError otherwise."""
    if (model_dir / ".metadata").is_file():
        return model_dir
    found = iteration_dir(model_dir)
    if not (found / ".metadata").is_file():
        if any(found.glob("mp_rank_*")):
            raise InputError(
                "is a legacy checkpoint (mp_rank_*)",
                where=found,
                hint=f"convert it: mst-convert --model {model_dir} --to megatron --out DIR",
            )
        if (found / "metadata.json").is_file():
            _check_backend(found)  # zarr keeps no .metadata
        raise InputError("holds no .metadata", where=found, hint="copy the whole checkpoint directory again")
    return found


def metadata(directory: Path) -> dict[str, StoredTensor]:
    """Every tensor of a torch_dist directory (or of a model directory with a tracker), by key."""
    return contents(directory).tensors


def contents(directory: Path) -> Contents:
    """Tensors and objects. InputError: unreadable metadata, missing or truncated files, chunks that do not tile."""
    root, directory = directory, checkpoint_dir(directory)
    path = directory / ".metadata"
    if (directory / "metadata.json").is_file():
        _check_backend(directory)
    return _contents(directory, root, path.stat().st_mtime_ns)


def _check_backend(directory: Path) -> None:
    backend = read_json(directory / "metadata.json").get("sharded_backend")
    if backend != "torch_dist":
        hint = "load and save it with a megatron-core before 0.13, with torch_dist" if backend == "zarr" else None
        raise InputError(f"the backend is {backend!r}, only torch_dist can be read", where=directory, hint=hint)


@lru_cache(maxsize=4)
def _contents(directory: Path, root: Path, mtime: int) -> Contents:
    path = directory / ".metadata"
    tree = torch_pickle.loads(read_bytes(path, torch_pickle.MAX_PICKLE, root), str(path))
    try:
        found = _parse(directory, tree)
    except (TypeError, KeyError, AttributeError, ValueError, IndexError) as error:
        raise InputError(f"is not the metadata of a checkpoint: {error}", where=path) from error
    _check_files(root, found)
    return found


def _parse(directory: Path, tree: Any) -> Contents:
    places: dict[tuple[str, tuple[int, ...] | None], tuple[Path, int, int]] = {}
    for index, info in tree["storage_data"].items():
        offset = None if index["offset"] is None else _sizes(index["offset"])
        places[_text(index["fqn"]), offset] = _place(directory, info)
    tensors: dict[str, StoredTensor] = {}
    objects: dict[str, StoredObject] = {}
    for name, entry in tree["state_dict_metadata"].items():
        key = _text(name)
        if entry.name.endswith("BytesStorageMetadata"):
            if (key, None) in places:
                objects[key] = StoredObject(key, *places[key, None])
            continue
        chunks = []
        for chunk in entry["chunks"]:
            offsets = _sizes(chunk["offsets"])
            if (key, offsets) not in places:
                raise InputError(f"{key}: the chunk at {list(offsets)} is stored nowhere", where=directory)
            chunks.append(Chunk(offsets, _sizes(chunk["sizes"]), *places[key, offsets]))
        dtype = entry["properties"].state[0]
        stored = StoredTensor(key, _sizes(entry["size"]), dtype, tuple(chunks))
        _check(stored, directory)
        tensors[key] = stored
    return Contents(tensors, objects)


def _sizes(value: Any) -> tuple[int, ...]:
    found = sizes(value)
    if found is None:
        raise ValueError("sizes or offsets that are none")
    return found


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("a name that is no text")
    return value


def _place(directory: Path, info: Any) -> tuple[Path, int, int]:
    name = _text(info["relative_path"])
    if Path(name).name != name or name in ("", ".", ".."):
        raise InputError(f"names a file outside the directory: {name[:300]}", where=directory)
    offset, length = _sizes([info["offset"], info["length"]])
    if not length:
        raise ValueError("an archive of no bytes")
    return directory / name, offset, length


def _check(stored: StoredTensor, directory: Path) -> None:
    if not isinstance(stored.dtype, str) or stored.dtype not in DTYPE_BYTES:
        raise InputError(f"{stored.key} has a dtype that is not known", where=directory)
    for chunk in stored.chunks:
        inside = all(
            size > 0 and offset + size <= whole
            for offset, size, whole in zip(chunk.offsets, chunk.sizes, stored.shape, strict=True)
        )
        if not inside:
            raise InputError(f"{stored.key}: a chunk lies outside {list(stored.shape)}", where=directory)
    if overlap := _overlap(stored.chunks):
        raise InputError(f"{stored.key}: the chunks at {overlap} overlap", where=directory)
    total = sum(prod(chunk.sizes) for chunk in stored.chunks)
    if total != prod(stored.shape):
        raise InputError(f"{stored.key}: the chunks hold {total} of {prod(stored.shape)} elements", where=directory)


def _overlap(chunks: Sequence[Chunk], axis: int = 0) -> str | None:
    """The places of two chunks that share an element. With the right total, disjoint chunks tile the tensor.

    Chunks that are cut at the same places of an axis are compared along the next one; those that are not, by pairs.
    """
    if len(chunks) < 2:
        return None
    if axis == len(chunks[0].offsets):
        return _pair(chunks[0], chunks[1])
    groups: dict[tuple[int, int], list[Chunk]] = {}
    for chunk in chunks:
        groups.setdefault((chunk.offsets[axis], chunk.sizes[axis]), []).append(chunk)
    spans = sorted(groups)
    if all(start + size <= after for (start, size), (after, _) in pairwise(spans)):
        return next((found for group in groups.values() if (found := _overlap(group, axis + 1))), None)
    if len(chunks) > MAX_STAGGERED:
        return f"{list(chunks[0].offsets)} and others form no grid and may"
    for one, other in combinations(chunks, 2):
        pairs = zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
        if all(a < b + other_size and b < a + size for a, size, b, other_size in pairs):
            return _pair(one, other)
    return None


def _pair(one: Chunk, other: Chunk) -> str:
    return f"{list(one.offsets)} and {list(other.offsets)}"


def _check_files(root: Path, found: Contents) -> None:
    """Refuse files that are missing, short or outside, and bytes that belong to two entries."""
    ranges: dict[Path, list[tuple[int, int, str]]] = {}
    items: list[tuple[str, Chunk | StoredObject]] = [(each.key, each) for each in found.objects.values()]
    items += [(tensor.key, chunk) for tensor in found.tensors.values() for chunk in tensor.chunks]
    for key, item in items:
        ranges.setdefault(item.file, []).append((item.file_offset, item.file_offset + item.length, key))
    for file, taken in sorted(ranges.items()):
        size = regular(file, root)
        taken.sort()
        end = max(end for _, end, _ in taken)
        if size < end:
            raise InputError(f"is truncated: {size} bytes, {end} are needed", where=file)
        for (_, end, first), (start, _, second) in pairwise(taken):
            if start < end:
                raise InputError(f"{first} and {second} have bytes in common", where=file)


def find(stored: Mapping[str, StoredTensor], key: str, layer: int | None) -> tuple[StoredTensor, int | None]:
    """The stored tensor of a stacked ``key`` and the layer to take of it: None where the file keeps layers apart.

    KeyError if it is not there. ``key`` is "decoder.layers.mlp.linear_fc1.weight" whatever the file's layout.
    """
    if key in stored:
        return stored[key], layer
    if layer is not None:
        apart = key.replace("decoder.layers.", f"decoder.layers.{layer}.", 1)
        return stored[apart], None
    raise KeyError(key)


def read(stored: StoredTensor, layer: int | None = None) -> torch.Tensor:
    """The whole tensor, or one layer of a stacked one (without the layer axis). One copy in memory."""
    import torch

    shape = stored.shape if layer is None else stored.shape[1:]
    out = torch.empty(shape, dtype=torch_dtype(stored.dtype))
    filled = 0
    for chunk in stored.chunks:
        if layer is not None and not chunk.offsets[0] <= layer < chunk.offsets[0] + chunk.sizes[0]:
            continue
        block = read_chunk(chunk, stored.dtype)
        offsets, sizes = chunk.offsets, chunk.sizes
        if layer is not None:
            block, offsets, sizes = block[layer - offsets[0]], offsets[1:], sizes[1:]
        if sizes == shape:
            return block
        out[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))] = block
        filled += block.numel()
    if filled != out.numel():
        raise InputError(f"layer {layer} is incomplete", where=stored.key)
    return out


def blocks(stored: StoredTensor, task: Task, layer: int | None) -> list[Block]:
    """Where the elements of a task's matrix are; ``layer`` is the layer to take of a stacked tensor.

    InputError for axes other than [layer][expert] rows, columns.
    """
    lead = int(layer is not None) + int(task.experts is not None)
    item, found = DTYPE_BYTES[stored.dtype], []
    each = stored.shape[lead] if len(stored.shape) > lead else 1
    for number, chunk in enumerate(stored.chunks):
        sizes, offsets = chunk.sizes, chunk.offsets
        if layer is not None and not offsets[0] <= layer < offsets[0] + sizes[0]:
            continue
        inner = sizes[lead:]
        if inner[2:] != stored.shape[lead + 2 :]:
            raise InputError("is cut along more than two axes", where=stored.key)
        rows, columns = inner[0], prod(inner[1:])
        first = 0 if layer is None else (layer - offsets[0]) * prod(sizes[1:])
        column = offsets[lead + 1] * prod(inner[2:]) if len(inner) > 1 else 0
        for e in range(1 if task.experts is None else sizes[lead - 1]):
            skip = (first + e * rows * columns) * item
            place = Place(chunk.file, chunk.file_offset, chunk.length, skip, chunk.sizes)
            array = Array(f"{stored.key}[{number}.{e}]", stored.dtype, rows, columns, place)
            expert = 0 if task.experts is None else offsets[lead - 1] + e
            found.append(Block(expert * each + offsets[lead], rows, column, columns, array))
    return found


def data_offset(place: Place, dtype: str) -> int:
    """Where in its file the data of an archive begins. InputError if it holds something else than was expected."""
    with place.file.open("rb", buffering=0) as file:

        def piece(offset: int, count: int) -> bytes:
            file.seek(place.offset + offset)
            return file.read(count)

        where = f"{place.file}@{place.offset}"
        found, shape, start, nbytes = torch_pickle.tensor_data(piece, place.archive_bytes, where)
    if (found, shape) != (dtype, place.shape) or nbytes != prod(shape) * DTYPE_BYTES[dtype]:
        raise InputError(f"holds {found} {list(shape)}, .metadata says {dtype} {list(place.shape)}", where=where)
    return place.offset + start


def read_chunk(chunk: Chunk, dtype: str) -> torch.Tensor:
    """The tensor of one archive, its data read in place of the archive's ``data/0`` entry."""
    import torch

    start = data_offset(Place(chunk.file, chunk.file_offset, chunk.length, 0, chunk.sizes), dtype)
    data = bytearray(prod(chunk.sizes) * DTYPE_BYTES[dtype])
    with chunk.file.open("rb", buffering=0) as file:
        file.seek(start)
        read_into(file, memoryview(data), chunk.file)
    return torch.frombuffer(data, dtype=torch_dtype(dtype)).reshape(chunk.sizes)


def object_bytes(stored: StoredObject) -> bytes:
    """The archive of an entry that is no tensor."""
    with stored.file.open("rb") as file:
        file.seek(stored.file_offset)
        return file.read(stored.length)


def common_state(directory: Path) -> dict[str, Any]:
    """The non-tensor state (iteration, args as a stub, ...), read without torch; empty where there is none."""
    stored = contents(directory).objects.get("common_state/shard_0_1")
    if stored is None:
        return {}
    value = torch_pickle.load_archive(object_bytes(stored), str(stored.file))
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    return value if isinstance(value, dict) else {}
