"""The bytes of one array, piece by piece, from wherever its elements lie.

Where no dtype changes and rows stay whole, a piece is a list of byte ranges; rows cut by tensor parallelism are copied
in bands; only transposed or interleaved arrays are assembled whole.
"""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from mst_convert import dequantise
from mst_core import torch_dist
from mst_core.blocks import Array, Move, Place
from mst_core.errors import InputError
from mst_core.tensors import DTYPE_BYTES

PIECE = 1 << 20
"""Bytes that a worker reads, writes and hashes in one go. 512 KB took a tenth longer, 4 MB up to three times."""

Fill = Callable[[memoryview], None]
"""Makes the bytes of a piece."""


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
        place = array.place
        if place is None:
            raise InputError("is read before it was written", where=array.name)
        if array.coded is not None:
            dequantise.decode(array, array.coded, place, start, into, self._fill)
            return
        self._fill(place.file, self._start(array, place) + start, into)

    def _fill(self, path: Path, offset: int, into: memoryview) -> None:
        handle = self._open(path)
        done = 0
        while done < len(into):
            count = os.preadv(handle, [into[done:]], offset + done)
            if not count:
                raise InputError("ended before all of a tensor was read: it changed", where=path)
            done += count

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


def pieces(array: Array, found: Sequence[Move], sources: Sources) -> Iterator[tuple[int, Fill]]:
    """The jobs of one array: how many bytes each makes, and how."""
    if array.transposed or any(m.source.transposed or m.to_step > 1 or m.from_step > 1 for m in found):
        if array.nbytes:
            yield array.nbytes, lambda into: _assemble(array, found, 0, array.rows, sources, into)
        return
    if all(m.columns == array.columns == m.source.columns for m in found):
        yield from _ranges(array, found, sources)
        return
    row_bytes = array.columns * DTYPE_BYTES[array.dtype]
    step = max(1, PIECE // row_bytes)
    for row in range(0, array.rows, step):
        rows = min(step, array.rows - row)

        def band(into: memoryview, row: int = row, rows: int = rows) -> None:
            _assemble(array, found, row, rows, sources, into)

        yield rows * row_bytes, band


def _ranges(array: Array, found: Sequence[Move], sources: Sources) -> Iterator[tuple[int, Fill]]:
    """Whole rows: a piece is some byte ranges of the sources, zeros between them."""
    item = DTYPE_BYTES[array.dtype]
    width = array.columns * item
    spans = [(move.to_row * width, move.rows * width, move) for move in found]
    first = 0
    for start in range(0, array.nbytes, PIECE):
        end = min(start + PIECE, array.nbytes)
        parts = []
        while first < len(spans) and spans[first][0] + spans[first][1] <= start:
            first += 1
        for at, nbytes, move in spans[first:]:
            if at >= end:
                break
            low, high = max(at, start), min(at + nbytes, end)
            parts.append((low - start, high - start, move, (move.from_row * width + low - at) // item))

        def fill(
            into: memoryview, parts: Sequence[tuple[int, int, Move, int]] = parts, whole: int = end - start
        ) -> None:
            if sum(high - low for low, high, _, _ in parts) != whole:
                into[:] = bytes(whole)
            for low, high, move, element in parts:
                _read(move.source, element, array.dtype, into[low:high], sources)

        yield end - start, fill


def _read(source: Array, element: int, dtype: str, into: memoryview, sources: Sources) -> None:
    """Elements of ``source`` from number ``element`` on, as ``dtype``."""
    item = DTYPE_BYTES[source.dtype]
    if source.dtype == dtype:
        sources.read(source, element * item, into)
        return
    raw = bytearray(len(into) // DTYPE_BYTES[dtype] * item)
    sources.read(source, element * item, memoryview(raw))
    into[:] = cast(raw, source.dtype, dtype)


def cast(raw: bytearray | memoryview, source: str, target: str) -> memoryview:
    """The elements of ``raw`` in another of the weights' dtypes, rounded to nearest even as torch rounds them.

    By numpy: importing torch takes longer than casting a gigabyte. A NaN stays one; of BF16 it is torch's 0x7FC0.
    """
    import numpy as np

    if source == "BF16":
        single = (np.frombuffer(raw, np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    else:
        single = np.frombuffer(raw, {"F16": np.float16, "F32": np.float32}[source]).astype(np.float32, copy=False)
    if target == "F32":
        made: Any = single
    elif target == "F16":
        with np.errstate(over="ignore"):
            made = single.astype(np.float16)
    else:
        bits = single.view(np.uint32)
        lowest = (bits >> np.uint32(16)) & np.uint32(1)
        made = ((bits + (lowest + np.uint32(0x7FFF))) >> np.uint32(16)).astype(np.uint16)
        made[np.isnan(single)] = 0x7FC0
    return memoryview(made.view(np.uint8))


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
        made = cast(memoryview(flat.reshape(-1).view(np.uint8)), source.dtype, dtype)
        return np.frombuffer(made, f"u{DTYPE_BYTES[dtype]}").reshape(matrix.shape)
    return matrix
