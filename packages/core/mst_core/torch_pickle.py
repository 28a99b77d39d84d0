"""``torch.save`` archives read without torch, and without running anything.

mst_core.unpickling makes stubs of what a pickle speaks of; here are the archives around the pickles. A ``torch.save``
archive is a zip of uncompressed entries; a tensor's data is the entry ``archive/data/0`` (MEGATRON.md, "torch_dist on
disk"). Its directory is read here and not by zipfile, because every entry must be plain, lie inside the file and share
no byte with another. mst_core.pickling and mst_core.archive write what is read here.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from mst_core import archive
from mst_core.errors import InputError
from mst_core.pickling import STORAGES, dumps, emit
from mst_core.tensors import DTYPE_BYTES
from mst_core.unpickling import Named, Stub, loads, traced
from mst_core.untrusted import MAX_SIZE, regular, sizes

__all__ = ["Named", "Stub", "loads"]

MAX_PICKLE = 1 << 30
"""Bytes of the largest pickle that is read: the .metadata of a few million chunks."""
MAX_DIRECTORY = 1 << 28
"""Bytes of the largest directory of an archive: two million storages."""

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
            emit(out, items)
            out += b"b0"
        else:
            out += dumps(items)[3:-1] + b"0"
    made = io.BytesIO()
    content = {name.removeprefix(folder): held for name, held in entries.items()} | {"data.pkl": bytes(out + b".")}
    archive.write(made, list(content.items()))
    return made.getvalue()
