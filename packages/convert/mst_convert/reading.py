"""The bytes of one array, piece by piece, from wherever its elements lie.

Where no dtype changes and rows stay whole, a stretch is a list of byte ranges; rows cut by tensor parallelism are
copied in bands; only transposed or interleaved arrays are assembled whole.
"""

from __future__ import annotations

import os
import resource
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mst_convert import dequantise
from mst_core import torch_dist
from mst_core.blocks import Array, Move, Place
from mst_core.errors import InputError
from mst_core.tensors import DTYPE_BYTES

PIECE = 1 << 20
"""Bytes that a worker reads, writes and hashes in one go. 512 KB took a tenth longer, 4 MB up to three times."""

_VIEWS = 1024
"""IOV_MAX: how many places one preadv fills."""
_NARROW = 512
"""Bytes of a part of a row below which numpy moves the parts faster than the kernel."""

Fill = Callable[[int, memoryview], None]
"""Makes the bytes of an array from a given one on."""


class Sources:
    """Open source files and, for arrays in archives, where their data begins. Used by several threads."""

    def __init__(self) -> None:
        self._handles: dict[Path, int] = {}
        self._starts: dict[tuple[Path, int], int] = {}
        self._lock = threading.Lock()
        # A checkpoint of a thousand ranks is a thousand files.
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

    def read(self, array: Array, start: int, into: memoryview) -> None:
        """Fill ``into`` from byte ``start`` of an array. InputError if the file ends before."""
        if array.coded is None:
            self.scatter(array, start, [into] if into else [])
        else:
            dequantise.decode(array, array.coded, _place(array), start, into, self._fill)

    def scatter(self, array: Array, start: int, views: list[memoryview]) -> None:
        """``read`` into several views, none of them empty, one after the other. For arrays that are not coded."""
        place = _place(array)
        self._scatter(place.file, self._start(array, place) + start, views)

    def _fill(self, path: Path, offset: int, into: memoryview) -> None:
        if into:
            self._scatter(path, offset, [into])

    def _scatter(self, path: Path, offset: int, views: list[memoryview]) -> None:
        handle = self._open(path)
        while views:
            count = os.preadv(handle, views[:_VIEWS], offset)
            if not count:
                raise InputError("ended before all of a tensor was read: it changed", where=path)
            offset += count
            full = 0
            while full < len(views) and count >= len(views[full]):
                count -= len(views[full])
                full += 1
            views = views[full:]
            if count:
                views[0] = views[0][count:]

    def _start(self, array: Array, place: Place) -> int:
        if not place.archive_bytes:
            return place.offset + place.skip
        key = (place.file, place.offset)
        if key not in self._starts:
            self._starts[key] = torch_dist.data_offset(place, array.dtype)
        return self._starts[key] + place.skip

    def _open(self, path: Path) -> int:
        with self._lock:
            if path not in self._handles:
                self._handles[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            return self._handles[path]

    def close(self) -> None:
        for handle in self._handles.values():
            os.close(handle)
        self._handles.clear()


def _place(array: Array) -> Place:
    if array.place is None:
        raise InputError("is read before it was written", where=array.name)
    return array.place


def filling(array: Array, found: Sequence[Move], sources: Sources) -> Fill:
    """What makes the bytes of an array, a stretch at a time, in any order and by any thread."""
    if array.transposed or any(m.source.transposed or m.to_step > 1 or m.from_step > 1 for m in found):
        return _Whole(array, found, sources).fill
    if all(m.columns == array.columns == m.source.columns for m in found):
        return _ranges(array, found, sources)
    item = DTYPE_BYTES[array.dtype]
    if all(m.source.dtype == array.dtype and m.columns * item >= _NARROW and not m.source.coded for m in found):
        return partial(_parts, array, found, sources)
    return partial(_bands, array, found, sources)


def stretches(array: Array, found: Sequence[Move], sources: Sources) -> Iterator[bytearray]:
    """All bytes of an array in order, at most PIECE at a time."""
    fill = filling(array, found, sources)
    for start in range(0, array.nbytes, PIECE):
        made = bytearray(min(PIECE, array.nbytes - start))
        fill(start, memoryview(made))
        yield made


def _ranges(array: Array, found: Sequence[Move], sources: Sources) -> Fill:
    """Whole rows: a stretch is some byte ranges of the sources, zeros between them."""
    item = DTYPE_BYTES[array.dtype]
    width = array.columns * item
    starts = [move.to_row * width for move in found]

    def fill(start: int, into: memoryview) -> None:
        at, end = start, start + len(into)
        for number in range(max(0, bisect_right(starts, start) - 1), len(found)):
            move, first = found[number], starts[number]
            low, high = max(first, start), min(first + move.rows * width, end)
            if first >= end:
                break
            if low >= high:
                continue
            into[at - start : low - start] = bytes(low - at)
            _read(
                move.source, move.from_row * width + low - first, array.dtype, into[low - start : high - start], sources
            )
            at = high
        into[at - start :] = bytes(end - at)

    return fill


def _parts(array: Array, found: Sequence[Move], sources: Sources, start: int, into: memoryview) -> None:
    """Rows made of wide parts, read straight to where they go: whole rows of a source are one stretch of it."""
    item, end = DTYPE_BYTES[array.dtype], start + len(into)
    width, filled = array.columns * item, 0
    reads: list[tuple[Array, int, list[memoryview]]] = []
    for move in found:
        size, across = move.columns * item, move.source.columns * item
        views: list[memoryview] = []
        for row in range(max(0, start // width - move.to_row), min(move.rows, -(-end // width) - move.to_row)):
            first = (move.to_row + row) * width + move.to_column * item
            low, high = max(first, start), min(first + size, end)
            if low >= high:
                continue
            filled += high - low
            if not views or size < across:
                at = (move.from_row + row) * across + move.from_column * item + low - first
                reads.append((move.source, at, views := []))
            views.append(into[low - start : high - start])
    if filled < len(into):
        into[:] = bytes(len(into))
    for read in reads:
        sources.scatter(*read)


def _bands(array: Array, found: Sequence[Move], sources: Sources, start: int, into: memoryview) -> None:
    """Rows that are made of parts: those that the stretch touches, assembled beside it where it begins or ends inside
    one."""
    width = array.columns * DTYPE_BYTES[array.dtype]
    first, last = start // width, -(-(start + len(into)) // width)
    whole = (last - first) * width == len(into)
    rows = into if whole else memoryview(bytearray((last - first) * width))
    _assemble(array, found, first, last - first, sources, rows)
    if not whole:
        into[:] = rows[start - first * width :][: len(into)]


class _Whole:
    """An array that is transposed or interleaved: made at once, and kept until its last byte was asked for."""

    def __init__(self, array: Array, found: Sequence[Move], sources: Sources) -> None:
        self._recipe = (array, found, sources)
        self._left = array.nbytes
        self._made = bytearray()
        self._lock = threading.Lock()

    def fill(self, start: int, into: memoryview) -> None:
        array, found, sources = self._recipe
        with self._lock:
            if not self._made:
                self._made = bytearray(array.nbytes)
                _assemble(array, found, 0, array.rows, sources, memoryview(self._made))
            into[:] = memoryview(self._made)[start : start + len(into)]
            self._left -= len(into)
            if not self._left:
                self._made = bytearray()


def _read(source: Array, start: int, dtype: str, into: memoryview, sources: Sources) -> None:
    """Fill ``into`` with the elements of ``source`` as ``dtype``, from byte ``start`` of that on."""
    if source.dtype == dtype:
        sources.read(source, start, into)
        return
    item, size = DTYPE_BYTES[source.dtype], DTYPE_BYTES[dtype]
    if start % size or len(into) % size:  # a stretch that begins or ends inside an element
        first, last = start // size, -(-(start + len(into)) // size)
        whole = memoryview(bytearray((last - first) * size))
        _read(source, first * size, dtype, whole, sources)
        into[:] = whole[start - first * size :][: len(into)]
        return
    raw = bytearray(len(into) // size * item)
    sources.read(source, start // size * item, memoryview(raw))
    cast(raw, source.dtype, dtype, into)


def cast(raw: bytearray | memoryview, source: str, target: str, into: memoryview) -> None:
    """The elements of ``raw`` in another of the weights' dtypes, rounded to nearest even as torch rounds them.

    By numpy: importing torch takes longer than casting a gigabyte. A NaN stays one; of BF16 it is torch's 0x7FC0.
    """
    import numpy as np

    if (source, target) == ("BF16", "F32"):
        words = np.frombuffer(into, np.uint32)
        words[:] = np.frombuffer(raw, np.uint16)
        np.left_shift(words, np.uint32(16), out=words)
        return
    if source == "BF16":
        single = (np.frombuffer(raw, np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    else:
        single = np.frombuffer(raw, {"F16": np.float16, "F32": np.float32}[source]).astype(np.float32, copy=False)
    if target != "BF16":
        with np.errstate(over="ignore"):
            np.frombuffer(into, {"F16": np.float16, "F32": np.float32}[target])[:] = single
        return
    bits = single.view(np.uint32)
    lowest = (bits >> np.uint32(16)) & np.uint32(1)
    made = np.frombuffer(into, np.uint16)
    made[:] = (bits + (lowest + np.uint32(0x7FFF))) >> np.uint32(16)
    made[np.isnan(single)] = 0x7FC0


def _assemble(array: Array, found: Sequence[Move], first: int, rows: int, sources: Sources, into: memoryview) -> None:
    """Rows ``first`` to ``first + rows`` of an array, element by element in memory."""
    import numpy as np

    kind = np.dtype(f"u{DTYPE_BYTES[array.dtype]}")
    matrix: Any = np.zeros((rows, array.columns), kind)
    for move in found:
        count = -(-(min(move.to_row + move.rows * move.to_step, first + rows) - move.to_row) // move.to_step)
        skip = max(0, -(-(first - move.to_row) // move.to_step))
        if skip >= count:
            continue
        block = _block(move, skip, count - skip, array.dtype, sources).view(kind)
        at = move.to_row + skip * move.to_step - first
        stop = at + (count - skip - 1) * move.to_step + 1
        matrix[at : stop : move.to_step, move.to_column : move.to_column + move.columns] = block
    if array.transposed:
        matrix = np.ascontiguousarray(matrix.T)
    into[:] = memoryview(matrix.reshape(-1).view(np.uint8))


def _block(move: Move, skip: int, rows: int, dtype: str, sources: Sources) -> Any:
    """``rows`` rows of a move, from its row ``skip`` on, as a numpy matrix of unsigned integers of ``dtype``'s size."""
    import numpy as np

    source = move.source
    item = DTYPE_BYTES[source.dtype]
    start = move.from_row + skip * move.from_step
    span = (rows - 1) * move.from_step + 1
    columns = slice(move.from_column, move.from_column + move.columns)
    if source.transposed:
        raw = bytearray(move.columns * source.rows * item)
        sources.read(source, move.from_column * source.rows * item, memoryview(raw))
        whole = np.frombuffer(raw, f"u{item}").reshape(move.columns, source.rows)
        matrix = whole[:, start : start + span : move.from_step].T
    else:
        raw = bytearray(span * source.columns * item)
        sources.read(source, start * source.columns * item, memoryview(raw))
        matrix = np.frombuffer(raw, f"u{item}").reshape(span, source.columns)[:: move.from_step, columns]
    if source.dtype != dtype:
        flat = np.ascontiguousarray(matrix)
        made = bytearray(flat.size * DTYPE_BYTES[dtype])
        cast(memoryview(flat.reshape(-1).view(np.uint8)), source.dtype, dtype, memoryview(made))
        return np.frombuffer(made, f"u{DTYPE_BYTES[dtype]}").reshape(matrix.shape)
    return matrix
