"""Stacked expert parameters: what transformers 5 keeps as one [experts, rows, columns], and where the base has it.

In memory ``X.mlp.experts.gate_up_proj`` [E, 2I, H] and ``X.mlp.experts.down_proj`` [E, H, I]. A base holds them either
so (or transposed), or as matrices of their own, ``X.mlp.experts.{e}.gate_proj.weight`` [I, H] ...; Mixtral's are
``X.block_sparse_moe.experts.{e}.w1.weight`` ... peft 0.21 adapts such a parameter with ``target_parameters``
(``ParamWrapper``): A [E * r, in], expert by expert, and B [out, r * E], the experts of one rank side by side.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Shapes = Mapping[str, Sequence[int]]
ORDER = ("gate_up_proj", "down_proj")
"""As the classes of transformers define them: PEFT wraps in this order, the first becomes the innermost."""
SINGLE = re.compile(r"(?P<box>.+\.experts)\.(?P<expert>\d+)\.(?P<part>[^.]+)\.weight")
STACKED = re.compile(r"(?P<box>.+\.experts)\.(?P<part>gate_up_proj|down_proj)")
PARTS = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "down_proj": (("down_proj",), ("w2",)),
}
SWAPPED_SINCE = (0, 19)
"""The peft release that exchanged in and out for [E, out, in] (peft PR #3112)."""


@dataclass(frozen=True)
class Piece:
    """Rows ``start`` to ``stop`` of one expert are the tensor ``name``; expert None: it is the whole stack."""

    name: str
    expert: int | None
    start: int
    stop: int


@dataclass(frozen=True)
class Stack:
    """One parameter by its name in memory. ``out_in``: its matrices are [out, in], or None where that is not known."""

    name: str
    shape: tuple[int, int, int]
    pieces: tuple[Piece, ...]
    out_in: bool | None


def in_memory(name: str) -> str:
    """Mixtral's and MiniMax's block has another name in files."""
    return name.replace(".block_sparse_moe.", ".mlp.")


def stacks(base: Shapes) -> dict[str, list[Stack]]:
    """The stacked parameters of each expert module by its name in memory, in the order of PEFT's wrapping."""
    single: dict[str, dict[str, dict[int, str]]] = {}
    found: dict[str, dict[str, Stack]] = {}
    for name, shape in base.items():
        if (match := SINGLE.fullmatch(name)) and len(shape) == 2:
            single.setdefault(match["box"], {}).setdefault(match["part"], {})[int(match["expert"])] = name
        elif (match := STACKED.fullmatch(name)) and len(shape) == 3:
            experts, rows, columns = shape
            box, piece = in_memory(match["box"]), Piece(name, None, 0, rows)
            stack = Stack(in_memory(name), (experts, rows, columns), (piece,), None)
            found.setdefault(box, {})[match["part"]] = stack
    for box, of_box in found.items():
        found[box] = {part: _oriented(stack, of_box) for part, stack in of_box.items()}
    for box, parts in single.items():
        for param, dialects in PARTS.items():
            for dialect in dialects:
                if all(part in parts for part in dialect):
                    stack = _gathered(f"{in_memory(box)}.{param}", [parts[part] for part in dialect], base)
                    found.setdefault(in_memory(box), {})[param] = stack
    return {box: [of_box[param] for param in ORDER if param in of_box] for box, of_box in found.items()}


def _gathered(name: str, parts: Sequence[Mapping[int, str]], base: Shapes) -> Stack:
    pieces = []
    for expert in sorted(parts[0]):
        start = 0
        for part in parts:
            rows, columns = base[part[expert]]
            pieces.append(Piece(part[expert], expert, start, start + rows))
            start += rows
    return Stack(name, (len(parts[0]), start, columns), tuple(pieces), True)


def _oriented(stack: Stack, of_box: Mapping[str, Stack]) -> Stack:
    """[E, 2I, H] beside [E, H, I] is [out, in]. Else (transposed, or alone) only the adapter's shapes can tell."""
    if set(of_box) == set(ORDER):
        (_, twice, hidden), (_, out, inner) = (of_box[param].shape for param in ORDER)
        if twice == 2 * inner and hidden == out:
            return Stack(stack.name, stack.shape, stack.pieces, True)
    return stack


def transposed(stack: Stack, a: Sequence[int], b: Sequence[int], version: Any) -> bool | str:
    """Whether the delta of an expert is (B A).T; or the reason why ``a`` [E r, in] and ``b`` [out, r E] do not fit."""
    _, rows, columns = stack.shape
    made = (b[0], a[1])
    if made not in ((rows, columns), (columns, rows)):
        return f"B {list(b)} and A {list(a)} make {list(made)} for each expert, the base's are {[rows, columns]}"
    if rows != columns:
        return made != (rows, columns)
    if stack.out_in is None:
        return "the experts' matrices are square, and the base does not show which side is out"
    new = _is_new(version)
    if new is None:
        return f"the experts' matrices are square, and peft_version {version!r} does not show which side is out"
    return not new


def _is_new(version: Any) -> bool | None:
    """Of the release that swapped or later? None for no version, and for what was made between the two releases."""
    match = re.match(r"(\d+)\.(\d+)(.*)", version) if isinstance(version, str) else None
    if match is None:
        return None
    release = (int(match[1]), int(match[2]))
    if "dev" in match[3] and release in ((0, 18), SWAPPED_SINCE):
        return None
    return release >= SWAPPED_SINCE
