"""Edits done to tensors: what ``edits`` planned, read from the adapters' files and given to ``merging``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from mst_convert.merge import merging
from mst_convert.merge.edits import Delta, Edit, Shift, Whole
from mst_convert.merge.merging import Magnitude, Outcome, Term
from mst_core import tensors
from mst_core.errors import InputError, MstError, many
from mst_core.tensors import TensorRef


class Applier:
    """Reads factors. Those of experts serve many tensors in turn: the last few, ``kept``, stay in memory."""

    def __init__(self, kept: int) -> None:
        self._keep = lru_cache(maxsize=kept)(tensors.read)

    def apply(self, base: Tensor, edits: Sequence[Edit]) -> Outcome:
        """``base`` [rows, columns], [experts, rows, columns] or [size] with ``edits`` done."""
        first = edits[0]
        if isinstance(first, Whole):  # the plan let nothing else stand beside it
            return merging.replace(base, tensors.read(first.ref), first.rows)
        if base.ndim == 3:
            return self._stack(base, edits)
        matrix = base if base.ndim == 2 else base[:, None]
        magnitude = None
        if isinstance(first, Delta) and first.magnitude is not None:
            magnitude = Magnitude(tensors.read(first.magnitude), by_column=first.transposed)
        outcome = merging.merge(matrix, [self._term(edit) for edit in edits], magnitude)
        return outcome if base.ndim == 2 else Outcome(outcome.tensor[:, 0], outcome.changed, outcome.not_finite)

    def _stack(self, base: Tensor, edits: Sequence[Edit]) -> Outcome:
        merged = torch.empty_like(base)
        changed = not_finite = 0
        for expert in range(base.shape[0]):
            outcome = merging.merge(base[expert], [self._term(edit, expert) for edit in edits])
            merged[expert] = outcome.tensor
            changed, not_finite = changed + outcome.changed, not_finite + outcome.not_finite
        return Outcome(merged, changed, not_finite)

    def _term(self, edit: Edit, expert: int = 0) -> Term:
        if isinstance(edit, Shift):
            return Term(tensors.read(edit.ref)[:, None], torch.ones(1, 1), edit.scale)
        if not isinstance(edit, Delta):
            raise MstError("a replaced tensor has other edits")
        read = tensors.read if edit.experts == 1 else self._keep
        a, b = read(edit.a), read(edit.b)
        expert = expert if edit.expert is None else edit.expert
        # One expert's rows of A follow each other; its columns of B are ``experts`` apart.
        a, b = a.view(edit.experts, edit.rank, -1)[expert], b.view(-1, edit.rank, edit.experts)[:, :, expert]
        left, right = (a.T, b.T) if edit.transposed else (b, a)
        return Term(left if edit.rows is None else left[slice(*edit.rows)], right, edit.scale)


def check_parts(edits: Sequence[Edit]) -> bool:
    """Read every part once: refuse NaN and infinity, all in one error. Whether anything can change the base."""
    faults: list[MstError] = []
    moving = False
    seen: set[TensorRef] = set()
    for edit in edits:
        if seen.issuperset(edit.refs):
            continue
        zeros = 0
        for ref in edit.refs:
            part = tensors.read(ref)
            bad = part.numel() - int(torch.count_nonzero(torch.isfinite(part)))
            if bad:
                faults.append(InputError(f"{bad} of {part.numel()} values are NaN or infinite", where=ref.name))
            zeros += not torch.count_nonzero(part)
        moving |= not zeros or isinstance(edit, Whole)
        seen.update(edit.refs)
    if faults:
        raise many(faults, what="the adapter is damaged:", hint="take an earlier checkpoint of the training")
    return moving


def check_twin(embedding: Edit, head: Edit) -> None:
    """Tied parts must say the same: lm_head is the embedding's transpose in PEFT's files, or its copy."""
    if isinstance(embedding, Delta) and isinstance(head, Delta):
        pairs = [(embedding.a, head.b, True), (embedding.b, head.a, True)]
    else:
        pairs = [(embedding.refs[0], head.refs[0], False)]
    for one, other, turned in pairs:
        first, second = tensors.read(one), tensors.read(other)
        if not torch.equal(first.T if turned else first, second):
            raise InputError(
                f"ensure_weight_tying is set, but {other.name} is not what {one.name} is",
                hint="if they were trained apart: --untie, with ensure_weight_tying false in adapter_config.json",
            )


def check_copy(base: Tensor, ref: TensorRef) -> None:
    """PEFT saves the base's embedding and head where they are targets: they must be this base's."""
    copy = tensors.read(ref)
    same = base.to(copy.dtype) if copy.element_size() < base.element_size() else base
    if not torch.equal(same, copy.to(same.dtype)):
        raise InputError(
            f"{ref.name} is a copy of the base's tensor, but not of this base's",
            hint="give the base it was trained on; if the tensor itself was trained, it belongs in modules_to_save",
        )
