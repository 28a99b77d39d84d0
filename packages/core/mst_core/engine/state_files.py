"""The training state as rectangles of named matrices, so that a run goes on under any layout of ranks.

Every rank writes what no rank before it has: of each trained parameter, seen as a matrix, the rectangles it holds of
the fp32 weights and of AdamW's moments. A rank that goes on names the rectangles it needs and gets them from whichever
files have them: its own first, which under the same layout is the only one it opens. No rank holds a whole matrix.

``rank-00000.safetensors`` has tensors "NAME ROW COLUMN KIND" of shape (rows, columns), and "random"; beside it
``rank-00000.json`` has the engine's facts and {NAME: [rows, columns, updates AdamW counted]} of the whole matrices.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mst_core import tensors
from mst_core.engine.seam import Create, create
from mst_core.errors import InputError

MOMENTS = ("exp_avg", "exp_avg_sq")
RANDOM = "random"


@dataclass(frozen=True)
class Part:
    """A rectangle of a matrix.

    name         of the matrix, the same under every layout; no spaces
    whole        rows and columns of the matrix
    row, column  where the rectangle begins
    held         its elements by kind ("weight", "exp_avg", "exp_avg_sq"), each (rows, columns)
    updates      how many AdamW has counted (to be written)
    """

    name: str
    whole: tuple[int, int]
    row: int
    column: int
    held: Mapping[str, Tensor]
    updates: float = 0.0


@dataclass(frozen=True)
class Loaded:
    """What came with the rectangles: the engine's facts, and AdamW's count of updates by name."""

    facts: Mapping[str, Any]
    updates: Mapping[str, float]


def cut(
    name: str, whole: tuple[int, int], at: tuple[int, int], columns: int, start: int, held: Mapping[str, Tensor],
    updates: float = 0.0,
) -> Iterator[Part]:  # fmt: skip
    """The rectangles (three at most) of a flat range: ``held`` are elements, from ``start`` on, of a block that is
    ``columns`` wide and stands ``at`` (row, column) of the whole."""
    total, done = next(iter(held.values())).numel(), 0
    while done < total:
        row, column = divmod(start + done, columns)
        rows = 0 if column else (total - done) // columns
        width = columns if rows else min(total - done, columns - column)
        size = max(rows, 1) * width
        views = {kind: value[done : done + size].view(-1, width) for kind, value in held.items()}
        yield Part(name, whole, at[0] + row, at[1] + column, views, updates)
        done += size


def save(
    directory: Path, rank: int, ranks: int, parts: Sequence[Part], facts: Mapping[str, Any], create: Create = create
) -> None:
    """This rank's files, written tensor by tensor, and its random state."""
    held = {f"{part.name} {part.row} {part.column} {kind}": v for part in parts for kind, v in part.held.items()}
    held[RANDOM] = torch.get_rng_state()
    wanted = [(key, tensors.dtype_name(value.dtype), tuple(value.shape)) for key, value in held.items()]
    path = directory / _file(rank)
    with create(path) as file:
        file.write(tensors.safetensors_header(wanted))
        for value in held.values():
            tensors.write_slices(file, tensors.raw(value))
    matrices = {part.name: [*part.whole, part.updates] for part in parts}
    told = {"ranks": ranks, "facts": dict(facts), "matrices": matrices}
    with create(path.with_suffix(".json")) as file:
        file.write(json.dumps(told).encode() + b"\n")


def load(directory: Path, rank: int, ranks: int, parts: Sequence[Part], padded: Sequence[str] = ()) -> Loaded:
    """Fill ``parts`` from what any number of ranks saved, cast to their dtypes.

    With as many ranks as saved it, each takes up its random state again. ``padded``: matrices whose number of rows
    depends on the layout; rows that were not saved stay as they are. InputError: one of another shape, or missing.
    """
    own = directory / _file(rank)
    files = sorted(directory.glob("rank-*.safetensors"), key=lambda path: (path != own, path.name))
    wanted: dict[str, list[_Wanted]] = {}
    for part in parts:
        wanted.setdefault(part.name, []).extend(_Wanted(part, kind, into) for kind, into in part.held.items())
    facts: dict[str, Any] = {}
    updates: dict[str, float] = {}
    for path in files:
        told = tensors.read_json(path.with_suffix(".json"))
        facts = facts or told["facts"]
        for name, (rows, columns, count) in told["matrices"].items():
            for one in wanted.get(name, ()) if name not in updates else ():
                one.agree(rows, columns, name in padded, path)
            updates[name] = count
        stored = _stored(path)
        random = stored.pop(RANDOM)
        if path == own and told["ranks"] == ranks:
            torch.set_rng_state(random.clone())
        for key, matrix in stored.items():
            name, row, column, kind = key.rsplit(" ", 3)
            for one in wanted.get(name, ()):
                if one.kind == kind:
                    one.take(matrix, int(row), int(column))
        if not any(one.left for found in wanted.values() for one in found):
            break
    missing = sorted({f"{one.kind} of {name}" for name, found in wanted.items() for one in found if one.left})
    if missing or not files:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        what = f"lacks {missing[0]}{more}" if missing else "holds no training state"
        raise InputError(what, where=directory, hint="a rank's file is gone, or another run or version wrote it")
    return Loaded(facts, updates)


class _Wanted:
    """A rectangle to fill, and how many of its elements have yet to come."""

    def __init__(self, part: Part, kind: str, into: Tensor) -> None:
        self.part, self.kind, self.into, self.left = part, kind, into, into.numel()

    def agree(self, rows: int, columns: int, padded: bool, where: Path) -> None:
        """Before the first ``take``: the matrix that was saved has this shape."""
        if self.part.whole != (rows, columns) and not (padded and self.part.whole[1] == columns):
            what = f"{self.part.name} was {rows} x {columns}, is {self.part.whole[0]} x {self.part.whole[1]}"
            raise InputError(what, where=where, hint="go on with the model and the adapter of before")
        height, width = self.into.shape
        self.left = min(height, max(0, rows - self.part.row)) * width

    def take(self, matrix: Tensor, row: int, column: int) -> None:
        """What a stored rectangle that begins at (row, column) has of this one."""
        top, left = max(row, self.part.row), max(column, self.part.column)
        bottom = min(row + matrix.shape[0], self.part.row + self.into.shape[0])
        right = min(column + matrix.shape[1], self.part.column + self.into.shape[1])
        if top >= bottom or left >= right:
            return
        found = matrix[top - row : bottom - row, left - column : right - column]
        y, x = top - self.part.row, left - self.part.column
        self.into[y : y + bottom - top, x : x + right - left].copy_(found)
        self.left -= found.numel()


def _stored(path: Path) -> dict[str, Tensor]:
    """Every tensor of a file, mapped: only what is copied from is read."""
    size = path.stat().st_size
    mapped = torch.from_file(str(path), size=size, dtype=torch.uint8)
    return {
        key: mapped[ref.offset : ref.offset + ref.nbytes].view(tensors.torch_dtype(ref.dtype)).view(ref.shape)
        for key, ref in tensors.file_headers(path).items()
    }


def _file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def moments(inner: Any, parameter: Tensor) -> dict[str, Tensor]:
    """AdamW's moments of a parameter of ``inner``; before its first step, those that it would begin with."""
    state = inner.state[parameter]
    if not state:
        state.update({kind: torch.zeros_like(parameter) for kind in MOMENTS})
        if isinstance(inner, torch.optim.Adam):
            state["step"] = torch.zeros((), dtype=torch.float32)
    return {kind: state[kind] for kind in MOMENTS}


def updates(inner: Any, parameter: Tensor) -> float:
    """How many updates AdamW has counted: torch's by parameter, Apex's and TransformerEngine's by group."""
    step = inner.state[parameter].get("step")
    return float(max(group.get("step", 0) for group in inner.param_groups) if step is None else step)


def count(inner: Any, parameter: Tensor, number: float) -> None:
    """Make that ``number``."""
    state = inner.state[parameter]
    if isinstance(state.get("step"), Tensor):
        state["step"].fill_(number)
    elif "step" in state:
        state["step"] = int(number)
    else:
        for group in inner.param_groups:
            group["step"] = int(number)
