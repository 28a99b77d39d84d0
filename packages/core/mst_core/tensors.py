"""Hugging Face weights: safetensors headers read without torch, tensors read and written one at a time.

The format: 8 bytes little-endian length, a JSON header of that length {name: {dtype, shape, data_offsets}},
then the data, without gaps (github.com/huggingface/safetensors). dtypes keep that format's names ("BF16").
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mst_core.errors import InputError, MstError, many
from mst_core.untrusted import MAX_JSON, parse_json, read_bytes, regular, sizes

if TYPE_CHECKING:
    import torch

    from mst_core.checkpoint import HashingFile, Staging

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_HEADER = 100_000_000
"""The format's own limit on a header, in bytes."""

DTYPE_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
}
TORCH_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "I64": "int64",
    "U64": "uint64",
    "F64": "float64",
}
"""Names of the format to names of torch ("BF16": "bfloat16")."""
WEIGHT_DTYPES = ("BF16", "F16", "F32")
DTYPE_NAMES = {torch_name: name for name, torch_name in TORCH_NAMES.items()}


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a safetensors dtype name."""
    import torch

    dtype = getattr(torch, TORCH_NAMES[name])
    if not isinstance(dtype, torch.dtype):
        raise InputError(f"torch has no dtype for {name}")
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """The safetensors name of a torch dtype."""
    return DTYPE_NAMES[str(dtype).removeprefix("torch.")]


@dataclass(frozen=True)
class TensorRef:
    """Where one tensor's bytes are: ``offset`` counts from the start of ``file``."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int


def config(model_dir: Path) -> dict[str, Any]:
    """config.json of a Hugging Face directory (or of the ``hf/`` beside Megatron weights)."""
    path = model_dir / "config.json"
    if not path.is_file():
        hint = "give a Hugging Face directory: config.json and model.safetensors"
        raise InputError("no config.json here", where=model_dir, hint=hint)
    return read_json(path)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, or InputError."""
    return parse_json(read_bytes(path, MAX_JSON), path)


def headers(model_dir: Path) -> dict[str, TensorRef]:
    """Every tensor of the directory by name. All faults of all shards come in one InputError."""
    if not model_dir.is_dir():
        raise InputError("is not a directory", where=model_dir)
    if (model_dir / INDEX).exists():
        return indexed(model_dir / INDEX, file_headers)
    if (model_dir / SINGLE).exists():
        return file_headers(model_dir / SINGLE)
    raise _no_weights(model_dir)


def _no_weights(model_dir: Path) -> InputError:
    shards = sorted(path.name for path in model_dir.glob("*.safetensors"))
    if shards:
        return InputError(
            f"holds {shards[0]} but no {INDEX}, so a missing shard could not be noticed",
            where=model_dir,
            hint=f"download {INDEX} too",
        )
    if any(model_dir.glob("*.bin")):
        return InputError(
            "holds weights as pickle (.bin), which mst-convert reads and the other tools do not",
            where=model_dir,
            hint=f"mst-convert --model {model_dir} --to megatron (and back --to hf)",
        )
    return InputError(f"holds neither {SINGLE} nor {INDEX}", where=model_dir, hint="give a Hugging Face directory")


def indexed(index: Path, read_shard: Callable[[Path], dict[str, TensorRef]]) -> dict[str, TensorRef]:
    """Every tensor of the shards that an index names. InputError: what shards hold and what the index says differ."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(type(s) is str for s in weight_map.values()):
        raise InputError("has no weight_map from names to files", where=index)
    names: dict[str, list[str]] = {}
    faults: list[MstError] = []
    for name, shard in weight_map.items():
        names.setdefault(shard, []).append(name)
    found: dict[str, TensorRef] = {}
    for shard, promised in sorted(names.items()):
        if Path(shard).name != shard or shard in ("", ".", ".."):
            faults.append(InputError(f"names a shard outside the directory: {shard[:300]}", where=index))
            continue
        try:
            held = read_shard(index.parent / shard)
        except InputError as error:
            faults.append(error)
            continue
        for name, ref in held.items():
            if name in found:
                faults.append(InputError(f"{name} is in {found[name].file.name} too", where=ref.file))
            elif name not in weight_map:
                faults.append(InputError(f"holds {name}, which the index leaves out", where=ref.file))
            elif weight_map[name] != shard:
                faults.append(InputError(f"holds {name}, which the index puts in {weight_map[name]}", where=ref.file))
            found[name] = ref
        missing = [name for name in promised if name not in held]
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            faults.append(InputError(f"puts {missing[0]}{more} in {shard}, which does not hold it", where=index))
    if faults:
        raise many(faults, what=f"{index.parent} cannot be read:", hint="download the directory again")
    return found


def file_headers(path: Path) -> dict[str, TensorRef]:
    """Every tensor of one safetensors file. InputError: missing, truncated, bad header, gaps or overlaps."""
    total = regular(path)
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if total < 8 or length > min(total - 8, MAX_HEADER):
            raise InputError(f"is truncated or no safetensors file ({total} bytes)", where=path)
        header = parse_json(file.read(length), path, "has a header that is no JSON")
    refs = {name: _ref(path, name, entry, 8 + length) for name, entry in header.items() if name != "__metadata__"}
    end = 8 + length
    for ref in sorted(refs.values(), key=lambda ref: (ref.offset, ref.nbytes)):
        if ref.offset != end:
            raise InputError(f"{ref.name} starts at byte {ref.offset}, expected {end}: gap or overlap", where=path)
        end += ref.nbytes
    if end != total:
        what = "is truncated" if total < end else "has bytes after the last tensor"
        raise InputError(f"{what}: {total} bytes, the header says {end}", where=path)
    return refs


def _ref(path: Path, name: str, entry: object, base: int) -> TensorRef:
    read = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = read.get("dtype"), sizes(read.get("shape")), sizes(read.get("data_offsets"))
    if shape is None or offsets is None or len(offsets) != 2 or not isinstance(dtype, str):
        raise InputError(f"has an unreadable header entry for {name}", where=path)
    if dtype not in DTYPE_BYTES:
        raise InputError(f"{name} has the dtype {dtype[:100]}, which is not known", where=path)
    nbytes = offsets[1] - offsets[0]
    if nbytes != prod(shape) * DTYPE_BYTES[dtype]:
        raise InputError(f"{name} {dtype} {list(shape)} does not take {nbytes} bytes", where=path)
    return TensorRef(name, dtype, shape, path, base + offsets[0], nbytes)


def read(ref: TensorRef) -> torch.Tensor:
    """The tensor, on the CPU, in memory of its own."""
    import torch

    data = bytearray(ref.nbytes)
    with ref.file.open("rb", buffering=0) as file:
        file.seek(ref.offset)
        read_into(file, memoryview(data), ref.file)
    if not ref.nbytes:
        return torch.empty(ref.shape, dtype=torch_dtype(ref.dtype))
    return torch.frombuffer(data, dtype=torch_dtype(ref.dtype)).reshape(ref.shape)


def round_to(model: torch.nn.Module, dtype: str) -> None:
    """Every parameter rounded once to ``dtype`` (safetensors name), kept in its own. Buffers, as a router's selection
    bias, stay what they are: a conversion with ``--dtype`` keeps them too."""
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(torch_dtype(dtype)))


def read_into(file: Any, view: memoryview, where: Path) -> None:
    """Fill ``view`` from an unbuffered file. InputError if the file ends first (it changed under us)."""
    done = 0
    while done < len(view):
        count = file.readinto(view[done : done + (1 << 20)])
        if not count:
            raise InputError("ended before all of the tensor was read: it changed while it was read", where=where)
        done += count


def raw(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor, row-major, without a copy where it is contiguous on the CPU already."""
    import torch

    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    if not flat.numel():
        return memoryview(b"")
    return memoryview(flat.view(torch.uint8).numpy())


Wanted = tuple[str, str, tuple[int, ...]]
"""A tensor to write: name, dtype, shape."""


def wanted_bytes(item: Wanted) -> int:
    return prod(item[2]) * DTYPE_BYTES[item[1]]


def safetensors_header(wanted: Sequence[Wanted], metadata: Mapping[str, str] | None = None) -> bytes:
    """All that stands before the data of a file with these tensors, in this order."""
    header: dict[str, Any] = {"__metadata__": dict(sorted({"format": "pt", **(metadata or {})}.items()))}
    position = 0
    for item in wanted:
        end = position + wanted_bytes(item)
        header[item[0]] = {"dtype": item[1], "shape": list(item[2]), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def shard_name(number: int, count: int) -> str:
    """The name of a weight file of ``count``."""
    return SINGLE if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def index_json(files: Mapping[str, str], nbytes: int) -> bytes:
    """The index of a sharded directory: which file has which tensor."""
    index = {"metadata": {"total_size": nbytes}, "weight_map": dict(sorted(files.items()))}
    return (json.dumps(index, indent=2) + "\n").encode()


class SafetensorsWriter:
    """One file, tensor by tensor, in the order given: the header is known before the first byte of data."""

    def __init__(
        self, staging: Staging, name: str, wanted: Sequence[Wanted], metadata: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self._waiting = list(wanted)
        self._context = staging.open(name)
        self._file: HashingFile = self._context.__enter__()
        self._file.write(safetensors_header(wanted, metadata))

    @property
    def done(self) -> bool:
        return not self._waiting

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Write the next tensor. Out of order, or not as announced: InputError (a bug of the caller's plan)."""
        if not self._waiting or self._waiting[0] != (name, dtype_name(tensor.dtype), tuple(tensor.shape)):
            expected = self._waiting[0] if self._waiting else "nothing more"
            raise InputError(f"{name} {tensor.dtype} {list(tensor.shape)} came, expected {expected}", where=self.name)
        write_slices(self._file, raw(tensor))
        self._waiting.pop(0)

    def close(self) -> None:
        if self._waiting:
            raise InputError(f"{len(self._waiting)} tensors were not written", where=self.name)
        self._context.__exit__(None, None, None)


def write_slices(file: Any, view: memoryview, step: int = 1 << 19) -> None:
    """Write in pieces of 512 KB: large writes cost several times the system time (MEGATRON.md)."""
    for start in range(0, len(view), step):
        file.write(view[start : start + step])


def shards(wanted: Sequence[Wanted], max_shard_bytes: int) -> list[list[Wanted]]:
    """Cut in order; a shard holds at most ``max_shard_bytes`` of data, or one larger tensor."""
    cut: list[list[Wanted]] = [[]]
    used = 0
    for item in wanted:
        size = wanted_bytes(item)
        if cut[-1] and used + size > max_shard_bytes:
            cut.append([])
            used = 0
        cut[-1].append(item)
        used += size
    return cut


class HFWriter:
    """model.safetensors, or numbered shards and their index, written in the order of ``wanted``."""

    def __init__(self, staging: Staging, wanted: Iterable[Wanted], max_shard_bytes: int) -> None:
        self._staging = staging
        parts = shards(list(wanted), max_shard_bytes)
        self._parts = [(shard_name(number, len(parts)), part) for number, part in enumerate(parts)]
        self._index = {item[0]: name for name, part in self._parts for item in part}
        self._bytes = sum(wanted_bytes(item) for part in parts for item in part)
        self._sharded = len(parts) > 1
        self._current: SafetensorsWriter | None = None

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Write the next tensor, in the order announced."""
        if self._current is None:
            file, part = self._parts.pop(0)
            self._current = SafetensorsWriter(self._staging, file, part)
        self._current.put(name, tensor)
        if self._current.done:
            self._current.close()
            self._current = None

    def finish(self) -> None:
        """Write the index. InputError if tensors are missing."""
        if self._current is not None or any(part for _, part in self._parts):
            raise InputError("not all tensors were written", where=INDEX)
        if self._sharded:
            self._staging.write(INDEX, index_json(self._index, self._bytes))


def write_hf(staging: Staging, wanted: Iterable[Wanted], max_shard_bytes: int = 5_000_000_000) -> HFWriter:
    """A writer for a Hugging Face directory's weights: ``put`` each in the order of ``wanted``, then ``finish``."""
    return HFWriter(staging, wanted, max_shard_bytes)
