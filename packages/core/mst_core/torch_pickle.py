"""Pickles and ``torch.save`` archives without torch: read without running anything, written to the same bytes always.

Reading: mst_core.unpickling makes stubs of what a pickle speaks of; here are the archives around the pickles. A
``torch.save`` archive is a zip of uncompressed entries; a tensor's data is the entry ``archive/data/0`` (MEGATRON.md,
"torch_dist on disk"). Its directory is read here and not by zipfile, because every entry must be plain, lie inside the
file and share no byte with another. Writing: a small emitter, because the bytes of pickle and of torch.save change
between versions and with object identity, and a checkpoint's id must not; mst_core.archive writes the archives.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from mst_core import archive
from mst_core.errors import InputError
from mst_core.tensors import DTYPE_BYTES, TORCH_NAMES
from mst_core.unpickling import Named, Stub, loads, traced
from mst_core.untrusted import MAX_SIZE, regular, sizes

__all__ = ["Named", "Stub", "loads"]

STORAGES = {
    "F64": "DoubleStorage",
    "F32": "FloatStorage",
    "F16": "HalfStorage",
    "BF16": "BFloat16Storage",
    "I64": "LongStorage",
    "I32": "IntStorage",
    "I16": "ShortStorage",
    "I8": "CharStorage",
    "U8": "ByteStorage",
    "BOOL": "BoolStorage",
}
MAX_PICKLE = 1 << 30
"""Bytes of the largest pickle that is read: the .metadata of a few million chunks."""
MAX_DIRECTORY = 1 << 28
"""Bytes of the largest directory of an archive: two million storages."""

# --- reading ---------------------------------------------------------------------------------------------------

Read = Callable[[int, int], bytes]
"""``read(offset, count)`` gives bytes of an archive."""


class _Entry(NamedTuple):
    """Where the content of an archive's entry is; its crc, unless an array's, is checked when it is read."""

    start: int
    size: int
    crc: int


def load_archive(data: bytes, where: str) -> Any:
    """The object of a ``torch.save`` archive; tensors in it come as stubs."""
    return _open(lambda offset, count: data[offset : offset + count], len(data), where)[0]


def open_archive(path: Path, root: Path | None = None) -> tuple[Any, dict[str, tuple[int, int]]]:
    """The object of a ``torch.save`` file, tensors as stubs, and (offset, bytes) of each storage in the file."""
    length = regular(path, root)
    with path.open("rb", buffering=0) as file:

        def read(offset: int, count: int) -> bytes:
            file.seek(offset)
            return file.read(count)

        return _open(read, length, str(path))


def tensor_data(read: Read, length: int, where: str) -> tuple[str, tuple[int, ...], int, int]:
    """Dtype, shape, and (offset, bytes) of the data in a ``torch.save`` archive of one tensor.

    Only the archive's directory and its pickle are read, not the data.
    """
    tensor, storages = _open(read, length, where)
    if len(storages) != 1:
        raise InputError("a chunk is not one plain tensor", where=where)
    dtype, shape, _, offset = _layout(tensor, where)
    if offset:
        raise InputError("a tensor is not stored row by row", where=where)
    return dtype, shape, *next(iter(storages.values()))


def _open(read: Read, length: int, where: str) -> tuple[Any, dict[str, tuple[int, int]]]:
    """The object of an archive, and (offset, bytes) of its storages by key."""
    entries = _entries(read, length, where)
    pickled = [name for name in entries if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(pickled) != 1:
        raise InputError("an archive holds no data.pkl", where=where)
    folder = pickled[0].removesuffix("data.pkl")
    order = entries.get(f"{folder}byteorder")
    if order is not None and _content(read, order, where) != b"little":
        raise InputError("its numbers are not little-endian", where=where)
    tree = loads(_content(read, entries[pickled[0]], where), where)
    data = f"{folder}data/"
    return tree, {n.removeprefix(data): (e.start, e.size) for n, e in entries.items() if n.startswith(data)}


def _content(read: Read, entry: _Entry, where: str) -> bytes:
    if entry.size > MAX_PICKLE:
        raise InputError(f"an entry of {entry.size} bytes, at most {MAX_PICKLE} can be right", where=where)
    data = read(entry.start, entry.size)
    if zlib.crc32(data) != entry.crc:
        raise InputError("an archive is damaged: a checksum differs", where=where)
    return data


def _entries(read: Read, length: int, where: str) -> dict[str, _Entry]:
    """The entries of a zip by name: all plain, inside the archive and disjoint."""
    start, end = _directory(read, length, where)
    directory = read(start, end - start)
    entries: dict[str, _Entry] = {}
    taken: list[tuple[int, int]] = []
    at = 0
    while at < len(directory):
        if directory[at : at + 4] != b"PK\x01\x02" or len(directory) < at + 46:
            raise InputError("an archive is damaged: its directory", where=where)
        flags, method, crc, packed, size, names, extras, comments, place = struct.unpack_from(
            "<8xHH4xIIIHHH8xI", directory, at
        )
        name = directory[at + 46 : at + 46 + names]
        extra = directory[at + 46 + names : at + 46 + names + extras]
        size, packed, place = _wide(extra, size, packed, place)
        if method or flags & 1 or packed != size:
            raise InputError("an entry of an archive is compressed or encrypted", where=where)
        local = read(place, 30 + names) if place + 30 + names <= start else b""
        data = place + 30 + names + (struct.unpack_from("<H", local, 28)[0] if len(local) >= 30 else 0)
        text = name.decode("utf-8", "replace")
        if local[:4] != b"PK\x03\x04" or local[30:] != name or text in entries or data + size > start:
            raise InputError(f"an archive is damaged: {text[:200]} is not where its directory says", where=where)
        entries[text] = _Entry(data, size, crc)
        taken.append((place, data + size))
        at += 46 + names + extras + comments
    taken.sort()
    if any(before[1] > after[0] for before, after in pairwise(taken)):
        raise InputError("an archive is damaged: two of its entries overlap", where=where)
    return entries


def _wide(extra: bytes, *numbers: int) -> tuple[int, ...]:
    """The sizes and the offset of an entry: those that do not fit 32 bits stand in a zip64 field."""
    at, wide = 0, b""
    while at + 4 <= len(extra):
        kind, count = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            wide = extra[at + 4 : at + 4 + count]
        at += 4 + count
    found = iter([int.from_bytes(wide[i : i + 8], "little") for i in range(0, len(wide) - 7, 8)])
    return tuple(next(found, number) if number == 0xFFFFFFFF else number for number in numbers)


def _directory(read: Read, length: int, where: str) -> tuple[int, int]:
    """Where the directory of a zip begins and ends."""
    tail = read(length - 22, 22) if length >= 22 else b""
    if tail[:4] != b"PK\x05\x06" or len(tail) != 22:
        hint = "copy it again; if torch before 1.6 saved it, save it again with a newer torch"
        raise InputError("is damaged or no torch.save archive: no directory at its end", where=where, hint=hint)
    size, start = struct.unpack_from("<II", tail, 12)
    end = length - 22
    locator = read(length - 42, 20) if length >= 42 else b""
    if locator[:4] == b"PK\x06\x07":
        end = int.from_bytes(locator[8:16], "little")
        record = read(end, 56) if end <= length - 98 else b""
        if record[:4] != b"PK\x06\x06" or len(record) != 56:
            raise InputError("an archive is damaged: its zip64 record", where=where)
        size, start = struct.unpack_from("<QQ", record, 40)
    if start + size != end or size > MAX_DIRECTORY:
        raise InputError("an archive is damaged: its directory is not where it says", where=where)
    return start, end


def stored_tensor(
    value: Any, storages: Mapping[str, tuple[int, int]], where: str
) -> tuple[str, tuple[int, ...], int, int]:
    """(dtype, shape, offset in the file, bytes) of a tensor stub of ``open_archive``. InputError if it is not dense."""
    if isinstance(value, Stub) and value.name.startswith("torch._utils._rebuild_parameter") and value.args:
        value = value.args[0]
    dtype, shape, key, start = _layout(value, where)
    if key not in storages:
        raise InputError("its storage is not in the file", where=where)
    offset, size = storages[key]
    skip, nbytes = start * DTYPE_BYTES[dtype], prod(shape) * DTYPE_BYTES[dtype]
    if skip + nbytes > size:
        raise InputError("it lies outside its storage", where=where)
    return dtype, shape, offset + skip, nbytes


def _layout(tensor: Any, where: str) -> tuple[str, tuple[int, ...], str, int]:
    """Dtype, shape, key of the storage and offset in it (elements) of a dense tensor."""
    if not isinstance(tensor, Stub) or not tensor.name.startswith("torch._utils._rebuild_tensor"):
        raise InputError("is not a tensor", where=where)
    args: list[Any] = [*tensor.args[:4], None, None, None, None]
    storage, offset, shape, stride = args[0], args[1], sizes(args[2]), sizes(args[3])
    described = isinstance(storage, Stub) and len(storage.args) > 2 and isinstance(storage.args[2], str)
    if not described or shape is None or stride is None or len(shape) != len(stride) or sizes([offset]) is None:
        raise InputError("a tensor is not described as torch does it", where=where)
    dense, step = True, 1
    for size, jump in zip(reversed(shape), reversed(stride), strict=True):
        dense, step = dense and (size == 1 or jump == step), step * size
    if not (dense or step == 0) or step >= MAX_SIZE:
        raise InputError("a tensor is not stored row by row", where=where)
    kind = storage.args[1]
    name = kind.name.removeprefix("torch.") if isinstance(kind, Named) else kind
    for dtype, storage_name in STORAGES.items():
        if name in (storage_name, dtype):
            return dtype, shape, storage.args[2], offset
    raise InputError("a tensor has a dtype that is not known", where=where)


Changes = Callable[[Any], Sequence[tuple[Any, Mapping[str, Any]]]]
"""Which of the dictionaries and stubs in an object get which items or attributes."""


def amended_archive(data: bytes, changes: Changes, where: str) -> bytes:
    """A ``torch.save`` archive whose object has some values more or others, and is else the same byte for byte.

    The pickle is not written anew, for stubs do not know all of it: opcodes that set the values are put before its end.
    """

    def read(offset: int, count: int) -> bytes:
        return data[offset : offset + count]

    _open(read, len(data), where)  # refuses what is no such archive
    entries = {name: _content(read, entry, where) for name, entry in _entries(read, len(data), where).items()}
    folder = next(name for name in entries if name.endswith("/data.pkl")).removesuffix("data.pkl")
    pickled = entries[f"{folder}data.pkl"]
    value, memo = traced(pickled, where)
    wanted = [(found, items) for found, items in changes(value) if items]
    if not wanted:
        return data
    numbers = {id(found): number for number, found in memo.items()}
    out = bytearray(pickled[:-1])
    for found, items in wanted:
        if id(found) not in numbers or pickled[1] > 3 or pickled[-1:] != b".":  # from protocol 4 on there are frames
            raise InputError("is pickled in a way that cannot be amended", where=where)
        out += b"j" + struct.pack("<I", numbers[id(found)])
        if isinstance(found, Stub):
            _emit(out, items)
            out += b"b0"
        else:
            out += dumps(items)[3:-1] + b"0"
    made = io.BytesIO()
    content = {name.removeprefix(folder): held for name, held in entries.items()} | {"data.pkl": bytes(out + b".")}
    archive.write(made, list(content.items()))
    return made.getvalue()


# --- writing ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Global:
    """A class or function by name."""

    name: str


@dataclass(frozen=True)
class Call:
    """``function(*args)``."""

    function: str
    args: tuple[Any, ...]


@dataclass(frozen=True)
class Instance:
    """An object made by ``__new__`` and then given ``state``."""

    cls: str
    state: Any = field(default_factory=dict)


@dataclass(frozen=True)
class Persistent:
    """A persistent id (torch: a storage)."""

    pid: tuple[Any, ...]


@dataclass(frozen=True)
class Pairs:
    """A dictionary whose keys are objects."""

    items: Sequence[tuple[Any, Any]]


def dumps(value: Any) -> bytes:
    """Protocol 2, no memo: the same value gives the same bytes in every version of Python and torch."""
    out = bytearray(b"\x80\x02")
    _emit(out, value)
    return bytes(out + b".")


def _emit(out: bytearray, value: Any) -> None:
    emit = EMITTERS.get(type(value))
    if emit is None:
        emit = next((emit for kind, emit in EMITTERS.items() if isinstance(value, kind)), None)
    if emit is None:
        raise TypeError(f"no way to pickle a {type(value).__name__}")
    emit(out, value)


def _emit_none(out: bytearray, _: None) -> None:
    out += b"N"


def _emit_bool(out: bytearray, value: bool) -> None:
    out += b"\x88" if value else b"\x89"


def _emit_int(out: bytearray, value: int) -> None:
    if -(2**31) <= value < 2**31:
        out += b"J" + value.to_bytes(4, "little", signed=True)
    else:
        data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        out += b"\x8a" + bytes([len(data)]) + data


def _emit_float(out: bytearray, value: float) -> None:
    out += b"G" + struct.pack(">d", value)


@lru_cache(maxsize=1024)
def _text(value: str) -> bytes:
    text = value.encode()
    return b"X" + struct.pack("<I", len(text)) + text


def _emit_text(out: bytearray, value: str) -> None:
    out += _text(value)


def _emit_tuple(out: bytearray, value: tuple[Any, ...]) -> None:
    out += b"("
    for item in value:
        _emit(out, item)
    out += b"t"


def _emit_list(out: bytearray, value: list[Any]) -> None:
    out += b"]("
    for item in value:
        _emit(out, item)
    out += b"e"


def _emit_items(out: bytearray, value: Mapping[Any, Any] | Pairs) -> None:
    out += b"}("
    for key, item in value.items if isinstance(value, Pairs) else value.items():
        _emit(out, key)
        _emit(out, item)
    out += b"u"


@lru_cache(maxsize=1024)
def _global(name: str) -> bytes:
    module, attribute = name.rsplit(".", 1)
    return b"c" + module.encode() + b"\n" + attribute.encode() + b"\n"


def _emit_global(out: bytearray, value: Global) -> None:
    out += _global(value.name)


def _emit_call(out: bytearray, value: Call) -> None:
    out += _global(value.function)
    _emit(out, value.args)
    out += b"R"


def _emit_instance(out: bytearray, value: Instance) -> None:
    out += _global(value.cls) + b")\x81"
    _emit(out, value.state)
    out += b"b"


def _emit_persistent(out: bytearray, value: Persistent) -> None:
    _emit(out, value.pid)
    out += b"Q"


EMITTERS: dict[type, Callable[[bytearray, Any], None]] = {
    type(None): _emit_none, bool: _emit_bool, int: _emit_int, float: _emit_float, str: _emit_text, tuple: _emit_tuple,
    list: _emit_list, Global: _emit_global, Call: _emit_call, Instance: _emit_instance, Persistent: _emit_persistent,
    Pairs: _emit_items, Mapping: _emit_items,
}  # fmt: skip
"""How each type is written; bool before int, for one is the other."""


def tensor_value(dtype: str, shape: Sequence[int], storage_key: str = "0") -> Call:
    """A dense tensor that fills its storage, to be put into a value for ``dumps``."""
    strides, count = [], 1
    for size in reversed(shape):
        strides.append(count)
        count *= size
    storage = Persistent(("storage", Global(f"torch.{STORAGES[dtype]}"), storage_key, "cpu", count))
    args = (storage, 0, tuple(shape), tuple(reversed(strides)), False, Call("collections.OrderedDict", ()))
    return Call("torch._utils._rebuild_tensor_v2", args)


@lru_cache(maxsize=1024)
def pickled_tensor(dtype: str, shape: tuple[int, ...]) -> bytes:
    """The data.pkl of one dense tensor."""
    return dumps(tensor_value(dtype, shape))


def torch_dtype_global(dtype: str) -> Global:
    """``torch.bfloat16`` for "BF16"."""
    return Global(f"torch.{TORCH_NAMES[dtype]}")
