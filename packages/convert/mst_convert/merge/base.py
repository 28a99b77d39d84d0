"""The base of a merge, in either layout, as Hugging Face tensors: which there are (headers), and one after the other.

Both layouts give the same tensors in the same order, so that a merge into one equals a merge into the other byte for
byte.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from mst_convert import accounts
from mst_convert.accounts import EMBEDDING, LM_HEAD, Imports
from mst_convert.plan import Job, layout_of, manifest_of, open_megatron, read_model
from mst_core import tensors, torch_dist
from mst_core.errors import InputError
from mst_core.families import tasks, unpack
from mst_core.tensors import TensorRef, Wanted

if TYPE_CHECKING:
    import torch


def open_base(source: Path) -> Job:
    """The base in ``source``, its headers matched with its architecture. InputError for all that does not fit."""
    layout = layout_of(source)
    if layout == "megatron":
        return open_megatron(source)
    if layout == "gguf":
        hint = f"mst-convert --model {source} --to hf --out DIR, and merge into that"
        raise InputError("is a GGUF file; its weights are quantised and rounded again if they change", hint=hint)
    job = Job()
    job.source = job.hf_dir = source
    job.parent = manifest_of(source)
    read_model(job, source)
    job.moves = accounts.account_hf(job.model, tasks(job.model), tensors.headers(source), None, source, mixed=True)
    return job


def wanted(job: Job) -> list[Wanted]:
    """Name, dtype and shape of every tensor to write, in the order in which ``stream`` gives them."""
    if isinstance(job.moves, Imports):
        return [(ref.name, ref.dtype, ref.shape) for ref in _refs(job, job.moves)]
    found: list[Wanted] = []
    for move in job.exports.moves:
        for spec in move.task.hf:
            found.append((spec.name, move.dtype, spec.shape))
            if spec.name == EMBEDDING and job.emit_lm_head:
                found.append((LM_HEAD, move.dtype, spec.shape))
    return found


def stream(job: Job) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of ``wanted``, read when its turn comes: one (of a Megatron base, one fused tensor) is in memory."""
    if isinstance(job.moves, Imports):
        for ref in _refs(job, job.moves):
            yield ref.name, tensors.read(ref)
        return
    for move in job.exports.moves:
        parts = unpack(move.task, torch_dist.read(move.stored, move.layer))
        for spec in move.task.hf:
            tensor = parts.pop(0)
            yield spec.name, tensor
            if spec.name == EMBEDDING and job.emit_lm_head:
                yield LM_HEAD, tensor
            del tensor  # or it would live on while the next one is read


def _refs(job: Job, moves: Imports) -> Iterator[TensorRef]:
    """All tensors of a Hugging Face base: those of the architecture, a tied head's copy, computed buffers."""
    for move in moves.moves:
        for ref in move.sources:
            yield ref
            if ref.name == EMBEDDING and moves.lm_head is not None:
                yield moves.lm_head
    stored = tensors.headers(job.source) if moves.buffers else {}
    yield from (stored[name] for name in moves.buffers)
