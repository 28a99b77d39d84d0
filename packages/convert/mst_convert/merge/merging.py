"""The arithmetic of a merge: W + sum of scale * L @ R, and for DoRA m / ||W + scale * L @ R|| times that.

Shapes: W [rows, columns] in the base's dtype; L [rows, r] and R [r, columns] in any float dtype; m [rows], or [columns]
where the norm is over rows, as on an embedding. The deltas are computed and summed in fp32, added to the fp32 upcast
of W, and rounded once to W's dtype (peft #1035: rounding the delta first loses up to half of it). The order of
operations is PEFT's own, so that an fp32 merge equals its ``merge_and_unload``.

Rows are done in blocks of a fixed number of elements: a 2 GB matrix needs a few MiB of fp32, and the block does not
depend on the machine, so neither do the bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK_ELEMENTS = 1 << 21
"""Elements of one block of rows: 8 MiB of fp32, three of which are alive at once."""


@dataclass(frozen=True)
class Outcome:
    """One merged tensor, how many of its elements differ from the base's, and how many are not finite."""

    tensor: Tensor
    changed: int
    not_finite: int


@dataclass(frozen=True)
class Term:
    """``scale`` * ``left`` [rows, r] @ ``right`` [r, columns]."""

    left: Tensor
    right: Tensor
    scale: float


@dataclass(frozen=True)
class Magnitude:
    """DoRA's ``values``, one for each row; or, ``by_column``, for each column."""

    values: Tensor
    by_column: bool = False


def merge(base: Tensor, terms: Sequence[Term], magnitude: Magnitude | None = None) -> Outcome:
    """``base`` [rows, columns] with ``terms`` added, in its dtype."""
    merged = torch.empty_like(base, memory_format=torch.contiguous_format)
    squares = torch.zeros(base.shape[1], dtype=torch.float64)
    if magnitude is not None and magnitude.by_column:
        for _, block in _sums(base, terms):
            squares += block.double().square_().sum(0)
    for rows, block in _sums(base, terms):
        if magnitude is not None and magnitude.by_column:
            block.mul_(magnitude.values.float() / squares.sqrt().float())
        elif magnitude is not None:
            block.mul_((magnitude.values[rows].float() / torch.linalg.norm(block, dim=1))[:, None])
        merged[rows].copy_(block)
    return compare(base, merged)


def _sums(base: Tensor, terms: Sequence[Term]) -> Iterator[tuple[slice, Tensor]]:
    """Blocks of rows of the sum in fp32."""
    rights = [term.right.float() for term in terms]
    step = max(1, BLOCK_ELEMENTS // max(1, base.shape[1]))
    for start in range(0, base.shape[0], step):
        rows = slice(start, start + step)
        block: Tensor | None = None
        for term, right in zip(terms, rights, strict=True):
            delta = torch.matmul(term.left[rows].float(), right).mul_(term.scale)
            block = delta if block is None else block.add_(delta)
        # The base is upcast: exact for bf16 and fp16.
        yield rows, base[rows].float() if block is None else block.add_(base[rows])


def replace(base: Tensor, new: Tensor, rows: Sequence[int] | None = None) -> Outcome:
    """``new``, or ``base`` with ``new`` in its ``rows``, in ``base``'s dtype."""
    if rows is None:
        return compare(base, new.to(base.dtype))
    merged = base.clone()
    merged[list(rows)] = new.to(base.dtype)
    return compare(base, merged)


def compare(base: Tensor, merged: Tensor) -> Outcome:
    """Count, block by block of rows, what differs and what is not finite."""
    step = max(1, BLOCK_ELEMENTS // max(1, base[:1].numel()))
    changed = not_finite = 0
    for old, new in zip(torch.split(base, step), torch.split(merged, step), strict=True):
        changed += int(torch.count_nonzero(new != old))
        not_finite += new.numel() - int(torch.count_nonzero(torch.isfinite(new)))
    return Outcome(merged, changed, not_finite)
