"""Convert: stream one tensor at a time from the source into a staged directory, count, commit."""

from __future__ import annotations

import json
from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mst_convert import accounts
from mst_convert.accounts import EMBEDDING, LM_HEAD, Exports, Imports
from mst_convert.plan import CARRIED, ConvertPlan, Job
from mst_convert.spec import ConvertSpec
from mst_core import checkpoint, console, files, manifest, tensors, torch_dist
from mst_core.errors import InputError, MstError
from mst_core.families import pack, unpack
from mst_core.manifest import Parent
from mst_core.spec import Result
from mst_core.tensors import TORCH_NAMES
from mst_core.torch_dist import StoredTensor

TOOL = "mst-convert"


def work(spec: ConvertSpec, plan: ConvertPlan) -> Result:
    """Do what ``plan`` says."""
    if plan.layout == "gguf":
        from mst_convert.gguf_work import convert

        return convert(spec, plan)
    if plan.to == "megatron":
        return _to_megatron(spec, plan)
    return _to_hf(spec, plan)


class Ledger:
    """Counts uses of sources and elements written, and refuses to commit unless all add up."""

    def __init__(self) -> None:
        self.used: Counter[str] = Counter()
        self.written: Counter[str] = Counter()

    def settle(self, sources: set[str], targets: dict[str, int], where: Path) -> None:
        """``sources`` each used once; ``targets``: elements of each tensor, each written once."""
        wrong = sorted(name for name in sources | self.used.keys() if self.used[name] != (name in sources))
        wrong += sorted(n for n in targets.keys() | self.written.keys() if self.written[n] != targets.get(n))
        if wrong:
            raise MstError(f"the counts of {wrong[0]} and {len(wrong) - 1} more do not add up", where=where)


def _to_megatron(spec: ConvertSpec, plan: ConvertPlan) -> Result:
    job = plan.job
    moves = _imports(job)
    if moves.lm_head is not None:
        _check_tied_copy(moves)
    parent, parent_dirs = parent_of(job, plan.lossless)
    ledger = Ledger()
    with checkpoint.stage(spec.out, spec.overwrite) as staging:
        writer = torch_dist.TorchDistWriter(staging)
        with console.progress("converting", plan.bytes_out, "B") as bar:
            for move in moves.moves:
                task = move.task
                sources = [_cast(tensors.read(ref), move.dtype) for ref in move.sources]
                native = pack(task, sources)
                writer.put(task.key, native, None if task.layer is None else (task.layer, task.layers))
                ledger.used.update(ref.name for ref in move.sources)
                ledger.written[task.native] += native.numel()
                bar.advance(move.nbytes)
        writer.finish(torch_dist.release_state(job.family, job.config, job.vocab_rows, job.hf_dir))
        sources_used = {ref.name for move in moves.moves for ref in move.sources}
        ledger.settle(sources_used, {m.task.native: prod(m.task.shape) for m in moves.moves}, spec.out)
        torch_dist.write_megatron_sidecar(staging, carried_files(job, spec.dtype))
        made = staging.commit(
            kind="model",
            layout="megatron",
            encoding={
                "keys": "te",
                "form": "stacked",
                "vocab_padding": spec.vocab_padding,
                "vocab_rows": job.vocab_rows,
                "vocab_fill": "zeros",
                **({"lm_head": "copy"} if moves.lm_head is not None else {}),
            },
            model=job.model.info(_dtype(moves.moves[0].dtype)),
            parents=[parent],
            parent_dirs=parent_dirs,
            tool=TOOL,
            settings=spec.changing_bytes(),
            notes=_notes(ledger, plan),
        )
    return _result(spec, plan, made, ledger)


def _to_hf(spec: ConvertSpec, plan: ConvertPlan) -> Result:
    job = plan.job
    moves = job.exports
    parent, parent_dirs = parent_of(job, plan.lossless)
    targets = {s.name: (move.dtype, s.shape) for move in moves.moves for s in move.task.hf}
    if job.emit_lm_head:
        targets[LM_HEAD] = targets[EMBEDDING]
    # A tied copy follows its embedding, so that one reading serves both.
    order = [name for name in targets if name != LM_HEAD or not job.emit_lm_head]
    if job.emit_lm_head:
        order.insert(order.index(EMBEDDING) + 1, LM_HEAD)
    ledger = Ledger()
    with checkpoint.stage(spec.out, spec.overwrite) as staging:
        wanted = [(name, *targets[name]) for name in order]
        writer = tensors.write_hf(staging, wanted, int(spec.max_shard_size))
        with console.progress("converting", plan.bytes_out, "B") as bar:
            for move in moves.moves:
                native = _cast(torch_dist.read(move.stored, move.layer), move.dtype)
                for spec_, tensor in zip(move.task.hf, unpack(move.task, native), strict=True):
                    copies = [spec_.name, LM_HEAD] if job.emit_lm_head and spec_.name == EMBEDDING else [spec_.name]
                    for name in copies:
                        writer.put(name, tensor)
                        ledger.written[name] += tensor.numel()
                ledger.used[_place(move.stored, move.layer)] += 1
                bar.advance(move.nbytes)
        writer.finish()
        ledger.settle(_places(moves), {name: prod(shape) for name, (_, shape) in targets.items()}, spec.out)
        for name, source in carried_files(job, written_dtype(moves)).items():
            if isinstance(source, bytes):
                staging.write(name, source)
            else:
                staging.copy(source, name)
        made = staging.commit(
            kind="model",
            layout="hf",
            model=job.model.info(_dtype(moves.moves[0].dtype)),
            parents=[parent],
            parent_dirs=parent_dirs,
            tool=TOOL,
            settings=spec.changing_bytes(),
            notes=_notes(ledger, plan),
        )
    return _result(spec, plan, made, ledger)


def _imports(job: Job) -> Imports:
    if not isinstance(job.moves, Imports):
        raise MstError("the plan holds no moves to Megatron")
    return job.moves


def _cast(tensor: Tensor, dtype: str) -> Tensor:
    return tensor.to(tensors.torch_dtype(dtype))


def _dtype(name: str) -> str:
    return TORCH_NAMES[name]


def _place(stored: StoredTensor, layer: int | None) -> str:
    return stored.key if layer is None else f"{stored.key}[{layer}]"


def _places(moves: Exports) -> set[str]:
    """Every stored tensor, layer by layer where it is stacked."""
    stored = {move.stored.key: (move.stored, move.layer) for move in moves.moves}
    return {
        _place(tensor, layer)
        for tensor, stacked in stored.values()
        for layer in (range(tensor.shape[0]) if stacked is not None else [None])
    }


def _check_tied_copy(moves: Imports) -> None:
    """A tied model may ship its lm_head, but only as the embedding's copy: else something would be lost."""
    head = moves.lm_head
    embedding = next(ref for move in moves.moves for ref in move.sources if ref.name == EMBEDDING)
    if head is not None and not torch.equal(tensors.read(head), tensors.read(embedding)):
        raise InputError(
            f"config.json says tied, but {LM_HEAD} differs from {EMBEDDING}",
            where=head.file,
            hint="if it was trained apart, set tie_word_embeddings to false in config.json; else remove the tensor",
        )


def written_dtype(moves: Exports) -> str | None:
    """The one dtype of all weights, or None where they differ."""
    dtypes = {move.dtype for move in moves.moves}
    return next((name for name, cast in accounts.CASTS.items() if dtypes == {cast}), None)


def carried_files(job: Job, dtype: str | None) -> dict[str, Path | bytes]:
    """config.json and the files that travel with it; config.json is rewritten only where it names another dtype."""
    carried: dict[str, Path | bytes] = {
        name: job.hf_dir / name for name in ("config.json", *CARRIED) if (job.hf_dir / name).is_file()
    }
    named = job.config.get("dtype", job.config.get("torch_dtype"))
    if dtype is not None and named is not None and named != _dtype(accounts.CASTS[dtype]):
        key = "dtype" if "dtype" in job.config else "torch_dtype"
        changed = {**job.config, key: _dtype(accounts.CASTS[dtype])}
        carried["config.json"] = (json.dumps(changed, indent=2, ensure_ascii=False) + "\n").encode()
    return carried


def parent_of(job: Job, lossless: bool, role: manifest.Role = "source") -> tuple[Parent, list[Path]]:
    """The source as a parent. A Megatron directory that mst did not write is named by its files' hashes."""
    if job.parent is None and not isinstance(job.moves, Imports):
        entries = [(path.name, files.hash_file(path)[1]) for path in _weight_files(job.exports, job.source)]
        digest = files.group_digest(entries)
        return Parent(role=role, id=f"blake3:{digest}", weights=digest, lossless=lossless), []
    made = manifest.identify(job.source)
    return Parent(role=role, id=made.id, weights=made.digests.weights, lossless=lossless), [job.source]


def _weight_files(moves: Exports, source: Path) -> list[Path]:
    data = {chunk.file for move in moves.moves for chunk in move.stored.chunks}
    return sorted({*data, torch_dist.checkpoint_dir(source) / ".metadata"})


def _notes(ledger: Ledger, plan: ConvertPlan) -> dict[str, Any]:
    return {
        "sources_used_once": len(ledger.used),
        "elements_written_once": sum(ledger.written.values()),
        "left_out": plan.left_out,
    }


def _result(spec: ConvertSpec, plan: ConvertPlan, made: manifest.Manifest, ledger: Ledger) -> Result:
    sources, written = len(ledger.used), sum(ledger.written.values())
    console.say(f"{sources} source tensors used once, {written:,} elements written once, {manifest.short(made.id)}")
    data = {"out": str(spec.out), "id": made.id, "lossless": plan.lossless, "sources": sources, "elements": written}
    return Result(text=str(spec.out), data=data)
