"""Where the elements of a native matrix lie: rectangles (Block) of arrays in files, and the moves between two layouts.

A layout, whatever it is (Hugging Face files, torch_dist chunks, legacy ranks), is a list of blocks that tile each
native matrix (families.Task). Two such lists over the same matrix, one to read and one to write, give the moves of a
conversion: no layout knows another. Nothing here reads a byte.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from mst_core.errors import InputError
from mst_core.families import Task
from mst_core.tensors import DTYPE_BYTES


@dataclass(frozen=True)
class Place:
    """Where an array's bytes begin: a file and an offset, or an archive whose data has yet to be found (torch_dist).

    archive_bytes   not 0: at ``offset`` stands a ``torch.save`` archive of that length with one tensor of ``shape``
    skip            bytes before the array, from ``offset`` or from the archive's data on
    """

    file: Path
    offset: int
    archive_bytes: int = 0
    skip: int = 0
    shape: tuple[int, ...] = ()


@dataclass(frozen=True)
class Coded:
    """How the elements of an array are computed: its place has codes, not elements.

    code     the name of the computation (mxfp4, fp8; mst_convert.dequantise)
    scales   where the scales are, of dtype ``scales_dtype``
    block    the rows and columns that share a scale
    """

    code: str
    scales: Place
    scales_dtype: str
    block: tuple[int, int]


@dataclass(frozen=True)
class Array:
    """A dense matrix of elements: in a file (``place``), or one that is to be written (None).

    transposed   stored as [columns, rows]
    coded        quantised: ``dtype`` is that of the elements once they are computed
    goes_on      the next array is written behind it as a part of the same stored tensor
    """

    name: str
    dtype: str
    rows: int
    columns: int
    place: Place | None = field(default=None, compare=False)
    transposed: bool = False
    coded: Coded | None = field(default=None, compare=False)
    goes_on: bool = False

    @property
    def nbytes(self) -> int:
        return self.rows * self.columns * DTYPE_BYTES[self.dtype]


class Block(NamedTuple):
    """``rows`` x ``columns`` elements at (``row``, ``column``) of a native matrix are at (``at_row``, ``at_column``) of
    ``array``, there every ``step``-th row."""

    row: int
    rows: int
    column: int
    columns: int
    array: Array
    at_row: int = 0
    at_column: int = 0
    step: int = 1


class Move(NamedTuple):
    """``rows`` x ``columns`` elements go from ``source`` to the array being written, each with its own row step."""

    to_row: int
    to_column: int
    to_step: int
    rows: int
    columns: int
    source: Array
    from_row: int
    from_column: int
    from_step: int


def of_regions(task: Task, arrays: Sequence[Array]) -> list[Block]:
    """The blocks of a task's Hugging Face tensors, in the order of ``task.hf``."""
    return [
        Block(start, rows, 0, task.columns, arrays[source], source_start, 0, step)
        for source, source_start, start, rows, step in task.regions
    ]


class Side:
    """All blocks of one native matrix, to be found by their rows."""

    def __init__(self, blocks: Iterable[Block]) -> None:
        self.blocks = sorted(blocks, key=lambda block: (block.row, block.column))
        self._starts = [block.row for block in self.blocks]
        self._longest = max((block.rows for block in self.blocks), default=0)

    def overlapping(self, row: int, rows: int) -> Iterator[Block]:
        """The blocks that have a row of ``rows`` from ``row`` on."""
        first = bisect_left(self._starts, row - self._longest + 1)
        for block in self.blocks[first:]:
            if block.row >= row + rows:
                return
            if block.row + block.rows > row:
                yield block


def moves(target: Sequence[Block], source: Side) -> list[Move]:
    """What must be moved into one array: ``target`` are its blocks, ``source`` the other side of the same matrix."""
    found = []
    for to in target:
        for come in source.overlapping(to.row, to.rows):
            top, bottom = max(to.row, come.row), min(to.row + to.rows, come.row + come.rows)
            left, right = max(to.column, come.column), min(to.column + to.columns, come.column + come.columns)
            if left >= right:
                continue
            found.append(
                Move(
                    to.at_row + (top - to.row) * to.step,
                    to.at_column + left - to.column,
                    to.step,
                    bottom - top,
                    right - left,
                    come.array,
                    come.at_row + (top - come.row) * come.step,
                    come.at_column + left - come.column,
                    come.step,
                )
            )
    found.sort(key=lambda move: (move.to_row, move.to_column))
    return found


def check_tiles(blocks: Sequence[Block], rows: int, columns: int, where: str) -> None:
    """Refuse blocks that overlap, or that do not cover the first ``rows`` rows of a matrix."""
    area = sum(block.rows * block.columns for block in blocks)
    side = Side(blocks)
    for block in side.blocks:
        for other in side.overlapping(block.row, block.rows):
            apart = other.column >= block.column + block.columns or block.column >= other.column + other.columns
            if other is not block and not apart:
                raise InputError(f"rows from {max(block.row, other.row)} on are stored twice", where=where)
    inside = all(b.column >= 0 and b.column + b.columns <= columns and b.row >= 0 for b in blocks)
    above = sum(max(0, min(b.row + b.rows, rows) - b.row) * b.columns for b in blocks)
    if not inside or above != rows * columns:
        raise InputError(f"{area} of {rows * columns} elements are stored", where=where)
