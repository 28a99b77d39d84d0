"""``torch.save`` archives written in one pass: literal bytes, arrays to be copied in, and tails that need their crc.

An archive is a zip of uncompressed entries. An array's crc is known only after it was copied, so its entry has a data
descriptor behind it (zip's general purpose bit 3) and the crc stands in the central directory at the end, where readers
look. Sizes and offsets are known before anything is copied.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, Protocol

from mst_core.blocks import Array

ALIGNMENT = 64
"""Where a tensor's data starts in its archive, as torch.save does it (for mmap)."""
LIMIT = BIG = 0xFFFFFFFF
"""Sizes and offsets from LIMIT on move to zip64 fields, and BIG stands in their place."""


@dataclass(frozen=True)
class Late:
    """``nbytes`` bytes made of the crc32 of the arrays of this archive so far. ``closes``: the archive ends."""

    nbytes: int
    make: Callable[[Sequence[int]], bytes]
    closes: bool = False


Segment = bytes | Array | Late
"""What a file is made of, one after another."""


Entry = tuple[str, bytes | Array | Sequence[Array]]
"""The name of an entry and its content; several arrays are one tensor, and all but the last ``goes_on``."""


def size(segment: Segment) -> int:
    """Bytes of a segment."""
    return len(segment) if isinstance(segment, bytes) else segment.nbytes


def segments(entries: Sequence[Entry]) -> Iterator[Segment]:
    """An archive of ``entries`` ("data.pkl", "data/0", ...), in order. All arrays of it come before its Late tail."""
    position = arrays = 0
    places: list[tuple[bytes, bytes, int, int, int | None]] = []  # path, zip64 sizes, size, offset, crc
    for name, content in entries:
        parts = [content] if isinstance(content, bytes | Array) else content
        path, nbytes = f"archive/{name}".encode(), sum(map(size, parts))
        crc = zlib.crc32(content) if isinstance(content, bytes) else None
        # Over 4 GiB the sizes move to a zip64 field, of which a reader finds the bytes in both headers.
        zip64 = struct.pack("<HHQQ", 1, 16, nbytes, nbytes) if nbytes >= LIMIT else b""
        padding = b""
        if name.startswith("data/"):
            gap = -(position + 30 + len(path) + len(zip64) + 4) % ALIGNMENT
            padding = struct.pack("<HH", 0x4246, gap) + b"Z" * gap
        extra = len(zip64) + len(padding)
        local = (
            b"PK\x03\x04" + _fixed(zip64, nbytes, crc or 0, crc is None) + struct.pack("<HH", len(path), extra) + path
        )
        places.append((path, zip64, nbytes, position, crc))
        yield local + zip64 + padding
        yield from parts
        position += len(local) + extra + nbytes
        if crc is None:
            descriptor = partial(_descriptor, number=arrays, nbytes=nbytes, wide=bool(zip64))
            yield Late(24 if zip64 else 16, descriptor)
            position += 24 if zip64 else 16
            arrays += 1
    tail = len(_tail(places, [0] * arrays, position))
    yield Late(tail, lambda crcs: _tail(places, crcs, position), closes=True)


def length(entries: Sequence[Entry]) -> int:
    """Bytes of the whole archive."""
    return sum(map(size, segments(entries)))


def object_entries(pickled: bytes) -> list[Entry]:
    """The entries of an archive without tensors."""
    return [("data.pkl", pickled), ("byteorder", b"little"), ("version", b"3\n")]


def tensor_entries(pickled: bytes, arrays: Sequence[Array | Sequence[Array]]) -> list[Entry]:
    """The entries of an archive of ``pickled`` and its storages 0, 1, ..."""
    data: list[Entry] = [(f"data/{number}", array) for number, array in enumerate(arrays)]
    return [("data.pkl", pickled), ("byteorder", b"little"), *data, ("version", b"3\n")]


def whole(name: str, dtype: str, shape: Sequence[int]) -> Array:
    """A tensor of ``shape`` as one array."""
    return Array(name, dtype, prod(shape), 1)


class Sink(Protocol):
    """Something to write to."""

    def write(self, data: Any, /) -> Any: ...


def write(file: Sink, entries: Sequence[Entry], data: memoryview | None = None) -> int:
    """Write an archive whose one array, if it has one, is ``data``. Returns its length in bytes."""
    written, crcs = 0, []
    for segment in segments(entries):
        if isinstance(segment, Array):
            content: bytes | memoryview = data if data is not None else b""
            crcs.append(zlib.crc32(content))
        else:
            content = segment if isinstance(segment, bytes) else segment.make(crcs)
        file.write(content)
        written += len(content)
    return written


def _fixed(zip64: bytes, nbytes: int, crc: int, deferred: bool) -> bytes:
    """What the local and the central header share: version, flags, method, time, date, crc, sizes."""
    short = BIG if zip64 else nbytes
    return struct.pack("<HHHHHIII", 45 if zip64 else 20, 8 if deferred else 0, 0, 0, 0x21, crc, short, short)


def _descriptor(crcs: Sequence[int], number: int, nbytes: int, wide: bool) -> bytes:
    return b"PK\x07\x08" + struct.pack("<IQQ" if wide else "<III", crcs[number], nbytes, nbytes)


def _tail(places: Sequence[tuple[bytes, bytes, int, int, int | None]], crcs: Sequence[int], position: int) -> bytes:
    """The central directory and the end of the zip; a zip64 record first, where the directory starts beyond 4 GiB."""
    directory, waiting = bytearray(), iter(crcs)
    for path, zip64, nbytes, offset, crc in places:
        extra, short = zip64, offset
        if offset >= LIMIT:
            sizes = struct.pack("<QQ", nbytes, nbytes) if zip64 else b""
            extra, short = struct.pack("<HH", 1, len(sizes) + 8) + sizes + struct.pack("<Q", offset), BIG
        fixed = _fixed(zip64, nbytes, next(waiting) if crc is None else crc, crc is None)
        rest = struct.pack("<HHHHHII", len(path), len(extra), 0, 0, 0, 0, short)
        directory += b"PK\x01\x02" + struct.pack("<H", 45) + fixed + rest + path + extra
    count, total = len(places), len(directory)
    big = b""
    if position >= LIMIT:
        big = b"PK\x06\x06" + struct.pack("<QHHIIQQQQ", 44, 45, 45, 0, 0, count, count, total, position)
        big += b"PK\x06\x07" + struct.pack("<IQI", 0, position + total, 1)
    short = BIG if position >= LIMIT else position
    return bytes(directory) + big + b"PK\x05\x06" + struct.pack("<HHHHIIH", 0, 0, count, count, total, short, 0)
