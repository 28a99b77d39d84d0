"""The header of a GGUF file (github.com/ggml-org/ggml/blob/master/docs/gguf.md), read without numpy or torch."""

from __future__ import annotations

import struct
from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from mst_core.errors import InputError

ARCHITECTURES = ("llama", "qwen2", "qwen3", "mistral")
"""``general.architecture`` of the families that mst knows (Mistral's files usually say llama)."""

SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
STRING, ARRAY = 8, 9
LIMIT = 1 << 26
"""No string or array of a header is longer than this."""

# ggml type: name, elements in a block, bytes of a block
KINDS = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    20: ("IQ4_NL", 32, 18),
    23: ("IQ4_XS", 256, 136),
    30: ("BF16", 1, 2),
}


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor: name, shape (fastest axis first, as the file has it), ggml type, offset in the data."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclass(frozen=True)
class GGUFHeader:
    """What the plan needs of a file."""

    architecture: str
    tensors: tuple[GGUFTensor, ...]

    @property
    def kinds(self) -> str:
        """The types in it, most frequent first."""
        counted = Counter(KINDS[tensor.kind][0] for tensor in self.tensors)
        return ", ".join(name for name, _ in counted.most_common())


def read_header(path: Path) -> GGUFHeader:
    """InputError: not GGUF, an old version, truncated, an architecture or a type that is not known."""
    with path.open("rb") as file:
        try:
            header = _parse(file, path)
        except (struct.error, UnicodeDecodeError, OverflowError) as error:
            raise InputError(f"the header is damaged or truncated: {error}", where=path) from error
        start = file.tell()
    return _checked(header, path, start)


def _parse(file: BinaryIO, path: Path) -> tuple[dict[str, Any], list[GGUFTensor]]:
    if file.read(4) != b"GGUF":
        raise InputError("is no GGUF file", where=path)
    version, tensor_count, value_count = struct.unpack("<IQQ", file.read(20))
    if version not in (2, 3):
        raise InputError(f"is GGUF version {version}, 2 and 3 can be read", where=path)
    values: dict[str, Any] = {}
    for _ in range(_bounded(value_count)):
        name = _string(file)
        values[name] = _value(file, *struct.unpack("<I", file.read(4)))
    tensors = []
    for _ in range(_bounded(tensor_count)):
        name = _string(file)
        (axes,) = struct.unpack("<I", file.read(4))
        shape = struct.unpack(f"<{_bounded(axes, 8)}Q", file.read(8 * axes))
        tensors.append(GGUFTensor(name, shape, *struct.unpack("<IQ", file.read(12))))
    return values, tensors


def _checked(header: tuple[dict[str, Any], list[GGUFTensor]], path: Path, start: int) -> GGUFHeader:
    values, tensors = header
    architecture = values.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise InputError(
            f"architecture {architecture} is not known", where=path, hint=f"known: {', '.join(ARCHITECTURES)}"
        )
    alignment = values.get("general.alignment", 32)
    start += -start % alignment
    end = start
    for tensor in tensors:
        if tensor.kind not in KINDS:
            raise InputError(f"{tensor.name} has the ggml type {tensor.kind}, which is not known", where=path)
        _, elements, nbytes = KINDS[tensor.kind]
        end = max(end, start + tensor.offset + prod(tensor.shape) // elements * nbytes)
    size = path.stat().st_size
    if size < end:
        raise InputError(f"is truncated: {size} bytes, the header says {end}", where=path)
    return GGUFHeader(architecture, tuple(tensors))


def _bounded(count: int, limit: int = LIMIT) -> int:
    if count > limit:
        raise OverflowError(f"a count of {count}")
    return count


def _string(file: BinaryIO) -> str:
    (length,) = struct.unpack("<Q", file.read(8))
    data = file.read(_bounded(length))
    if len(data) != length:
        raise OverflowError("a string is cut off")
    return data.decode()


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == STRING:
        return _string(file)
    if kind == ARRAY:
        kind, count = struct.unpack("<IQ", file.read(12))
        for _ in range(_bounded(count)):
            _value(file, kind)
        return None
    if kind not in SCALARS:
        raise OverflowError(f"a value of type {kind}")
    form = SCALARS[kind]
    return struct.unpack(form, file.read(struct.calcsize(form)))[0]
