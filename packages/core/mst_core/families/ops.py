"""Operations as region maps: which rows of which source land where in the native tensor.

All maps act on axis 0 (output rows), so one map serves a weight ``[out, in]``, its bias ``[out]`` and the
LoRA B of it ``[out, r]``. Packing, unpacking, byte-range copies and partial reads all follow from the map;
no map knows about ranks. Layouts: shared/reference/MAPPINGS.md 1.1 (qkv), 1.2 (gate and up), 1.4 (vocabulary).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from mst_core.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor


class Region(NamedTuple):
    """``rows`` rows of source number ``source``, every ``step``-th from ``source_start`` on, land at row ``start``."""

    source: int
    source_start: int
    start: int
    rows: int
    step: int = 1


class Heads(Protocol):
    """What an op may know of the model: counts of heads and their size."""

    @property
    def heads(self) -> int: ...
    @property
    def groups(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


Op = Callable[[Heads, Sequence[int]], tuple[Region, ...]]


def copy(heads: Heads, rows: Sequence[int]) -> tuple[Region, ...]:
    """One source, as it is. The vocabulary too: its padding is rows that no region covers."""
    return (Region(0, 0, 0, rows[0]),)


def concat(heads: Heads, rows: Sequence[int]) -> tuple[Region, ...]:
    """Sources one below the other: linear_fc1 is ``[gate; up]``."""
    starts = [sum(rows[:i]) for i in range(len(rows))]
    return tuple(Region(i, 0, start, count) for i, (start, count) in enumerate(zip(starts, rows, strict=True)))


def qkv(heads: Heads, rows: Sequence[int]) -> tuple[Region, ...]:
    """q, k and v interleaved by query group: ``[q of group 0 | k_0 | v_0 | q of group 1 | ...]``."""
    d, per_group = heads.head_dim, heads.heads // heads.groups
    regions = []
    for group in range(heads.groups):
        start = group * (per_group + 2) * d
        regions.append(Region(0, group * per_group * d, start, per_group * d))
        regions.append(Region(1, group * d, start + per_group * d, d))
        regions.append(Region(2, group * d, start + (per_group + 1) * d, d))
    return tuple(regions)


def fused_qkv(heads: Heads, rows: Sequence[int]) -> tuple[Region, ...]:
    """One source that holds all of q, then all of k, then all of v (Phi-3, Baichuan): the map of ``qkv``."""
    q, k = heads.heads * heads.head_dim, heads.groups * heads.head_dim
    starts = (0, q, q + k)
    return tuple(r._replace(source=0, source_start=starts[r.source] + r.source_start) for r in qkv(heads, rows))


def deinterleave(heads: Heads, rows: Sequence[int]) -> tuple[Region, ...]:
    """One source whose rows alternate gate, up, gate, up: ``[gate; up]`` (gpt-oss)."""
    half = rows[0] // 2
    return (Region(0, 0, 0, half, 2), Region(0, 1, half, half, 2))


OPS: dict[str, Op] = {"copy": copy, "concat": concat, "qkv": qkv, "fused_qkv": fused_qkv, "deinterleave": deinterleave}


def pack_rows(regions: Sequence[Region], rows: int, sources: Sequence[Tensor]) -> Tensor:
    """The native tensor ``[rows, ...]`` of ``sources``; rows that no region covers are zeros (vocabulary padding)."""
    if len(regions) == 1 and regions[0].rows == rows == sources[0].shape[0]:
        return sources[0]
    first = sources[0]
    native = first.new_zeros((rows, *first.shape[1:]))
    for source, source_start, start, count, step in regions:
        native[start : start + count] = sources[source][source_start : source_start + count * step : step]
    return native


def unpack_rows(regions: Sequence[Region], native: Tensor) -> list[Tensor]:
    """The sources of ``native``, in the order of the rule. Rows that no region covers are dropped."""
    counts: dict[int, int] = {}
    for region in regions:
        counts[region.source] = counts.get(region.source, 0) + region.rows
    if len(regions) == 1 and regions[0].rows == native.shape[0]:
        return [native]
    sources = [native.new_empty((counts[i], *native.shape[1:])) for i in range(len(counts))]
    for source, source_start, start, count, step in regions:
        sources[source][source_start : source_start + count * step : step] = native[start : start + count]
    return sources


def check_regions(regions: Sequence[Region], source_rows: Sequence[int], rows: int, where: str) -> int:
    """Refuse a map that does not use every source row once and every native row at most once.

    Returns the native rows left uncovered (padding).
    """
    for number, count in enumerate(source_rows):
        pieces = [
            (r.source_start + k, 1)
            for r in regions
            if r.source == number and r.step > 1
            for k in range(0, r.rows * r.step, r.step)
        ]
        pieces += [(r.source_start, r.rows) for r in regions if r.source == number and r.step == 1]
        _tile(pieces, count, f"{where} source {number}")
    covered = sum(r.rows for r in regions)
    end = max(r.start + r.rows for r in regions)
    _tile([(r.start, r.rows) for r in regions], covered, where)
    if end > rows:
        raise InputError(f"needs {end} rows, the tensor has {rows}", where=where)
    return rows - covered


def _tile(pieces: list[tuple[int, int]], total: int, where: str) -> None:
    position = 0
    for start, count in sorted(pieces):
        if start != position:
            raise InputError(
                f"rows {min(start, position)} to {max(start, position)} are mapped twice or not", where=where
            )
        position = start + count
    if position != total:
        raise InputError(f"{position} of {total} rows are mapped", where=where)
