"""The arithmetic of a LoRA merge: W + B @ A * scale.

Shapes: W [out, in] in the base's dtype; A [r, in] and B [out, r] in any float dtype. The delta is computed in fp32,
added to the fp32 upcast of W, and rounded once to W's dtype (peft #1035: rounding the delta first loses up to half
of it). The order of operations is PEFT's own, so that an fp32 merge equals its ``merge_and_unload``.

Rows are done in blocks of a fixed number of elements: a 2 GB matrix needs a few MiB of fp32, and the block does not
depend on the machine, so neither do the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

BLOCK_ELEMENTS = 1 << 21
"""Elements of one block of rows: 8 MiB of fp32, three of which are alive at once."""


@dataclass(frozen=True)
class Outcome:
    """One merged tensor, how many of its elements differ from the base's, and how many are not finite."""

    tensor: torch.Tensor
    changed: int
    not_finite: int


def merge(base: torch.Tensor, a: torch.Tensor, b: torch.Tensor, factor: float) -> Outcome:
    """``base`` [out, in] plus ``b`` [out, r] @ ``a`` [r, in] times ``factor``, in ``base``'s dtype."""
    rows, columns = base.shape
    merged = torch.empty_like(base, memory_format=torch.contiguous_format)
    a32 = a.float()
    step = max(1, BLOCK_ELEMENTS // max(1, columns))
    changed = not_finite = 0
    for start in range(0, rows, step):
        old = base[start : start + step]
        block = torch.matmul(b[start : start + step].float(), a32).mul_(factor)
        block.add_(old)  # old is upcast: exact for bf16 and fp16
        new = merged[start : start + step]
        new.copy_(block)
        changed += int(torch.count_nonzero(new != old))
        not_finite += new.numel() - int(torch.count_nonzero(torch.isfinite(new)))
    return Outcome(merged, changed, not_finite)
