"""What to write: files of literal bytes and arrays, and where each array's elements come from. Data only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from mst_core.archive import Segment
from mst_core.blocks import Array, Move


@dataclass(frozen=True)
class OutFile:
    """A file to write: its name in the staging directory and its segments in order."""

    name: str
    segments: Callable[[], Iterable[Segment]]


@dataclass(frozen=True)
class Recipe:
    """What to write, and where each array's elements come from (what no move covers is zeros).

    copies   arrays that hold the elements of another one once more
    """

    files: Sequence[OutFile]
    moves: Callable[[Array], list[Move]]
    copies: tuple[str, ...] = ()
