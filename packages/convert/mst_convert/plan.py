"""What a conversion will do, from settings, config.json and headers alone. No torch, nothing written."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field

from mst_convert import accounts, gguf
from mst_convert.accounts import Exports, Imports
from mst_convert.gguf import GGUFHeader
from mst_convert.spec import ConvertSpec
from mst_core import checkpoint, console, hub, manifest, tensors, torch_dist
from mst_core.errors import InputError, MstError
from mst_core.families import Family, Model, family_for, padded_vocab, tasks
from mst_core.files import TOKENIZER_FILES
from mst_core.spec import Plan
from mst_core.tensors import TORCH_NAMES

SLACK = 1 << 20
"""Bytes for what is not weights: config, tokenizer, manifest, headers."""
CARRIED = ("generation_config.json", *TOKENIZER_FILES)
"""Files that travel beside config.json, byte for byte."""


class Job:
    """What the work needs and the plan does not print."""

    source: Path
    hf_dir: Path
    """Where config.json and the tokenizer are."""
    config: dict[str, Any]
    family: Family
    model: Model
    moves: Imports | Exports | None = None
    gguf: GGUFHeader | None = None
    vocab_rows: int = 0
    emit_lm_head: bool = False
    parent: manifest.Manifest | None = None

    @property
    def exports(self) -> Exports:
        """The moves of a job that goes out of Megatron."""
        if not isinstance(self.moves, Exports):
            raise MstError("the plan holds no moves to Hugging Face")
        return self.moves


class ConvertPlan(Plan):
    """The table of a conversion."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    source: str
    layout: str
    to: str
    out: str
    architecture: str
    parameters: int
    dtype: str
    lossless: bool
    tensors_in: int
    tensors_out: int
    bytes_out: int
    padding_rows: int = 0
    left_out: list[str] = Field(default_factory=list)
    job: Job = Field(exclude=True, repr=False)

    def rows(self) -> list[tuple[str, str]]:
        """The plan for a person."""
        table = [
            ("from", f"{self.source} ({self.layout})"),
            ("to", f"{self.out} ({self.to})"),
            ("model", f"{self.architecture}, {self.parameters:,} parameters" if self.parameters else self.architecture),
            ("tensors", f"{self.tensors_in} -> {self.tensors_out}" if self.tensors_out else str(self.tensors_in)),
            ("dtype", self.dtype),
            ("bytes", console.size(self.bytes_out)),
            ("lossless", "yes" if self.lossless else "no"),
        ]
        if self.padding_rows:
            table.append(("vocabulary", f"padded with {self.padding_rows} rows of zeros"))
        table += [("left out", text) for text in self.left_out]
        return table


def plan(spec: ConvertSpec) -> ConvertPlan:
    """Plan a conversion. InputError for all that headers can tell; see docs/convert.md."""
    source = hub.resolve(spec.model)
    layout = layout_of(source)
    _check_places(spec, source, layout)
    if layout == "gguf":
        planned = _from_gguf(spec, source)
    elif layout == "hf":
        planned = _from_hf(spec, source)
    else:
        planned = _from_megatron(spec, source)
    checkpoint.check_free(spec.out, planned.bytes_out + SLACK)
    return planned


def layout_of(source: Path) -> str:
    if source.is_file():
        if source.suffix == ".gguf":
            return "gguf"
        raise InputError("is a file; a model is a directory or a .gguf file", where=source)
    if source.name.endswith(".partial"):
        raise InputError("this is a work in progress, not a checkpoint", where=source)
    if (source / "adapter_config.json").is_file():
        hint = f"merge it first: mst-merge --model BASE --adapter {source} --out DIR"
        raise InputError("is a LoRA adapter, not a model", where=source, hint=hint)
    if torch_dist.is_megatron(source):
        return "megatron"
    if (source / "config.json").is_file():
        return "hf"
    files = sorted(source.glob("*.gguf"))
    hint = f"--model {files[0]}" if files else "a Hugging Face directory has config.json and model.safetensors"
    raise InputError("is neither a Hugging Face nor a Megatron directory", where=source, hint=hint)


def _check_places(spec: ConvertSpec, source: Path, layout: str) -> None:
    if layout == spec.to:
        other = "hf" if spec.to == "megatron" else "megatron"
        raise InputError(f"is in the {layout} layout already", where=source, hint=f"did you mean --to {other}?")
    if layout == "gguf" and spec.to != "hf":
        raise InputError("a GGUF file goes to Megatron in two steps", where=source, hint="convert it --to hf first")
    if spec.out.absolute() == source.absolute():
        raise InputError("--out is the model itself", where=spec.out, hint="choose another --out")
    checkpoint.check_out(spec.out, spec.overwrite)


def read_model(job: Job, where: Path) -> None:
    job.config = tensors.config(where)
    path = where / "config.json"
    job.family = family_for(job.config, path)
    accounts.check_config(job.config, path)
    job.model = job.family.model(job.config, path)


def manifest_of(source: Path) -> manifest.Manifest | None:
    """The manifest, if the directory has one: it must be a model's."""
    if not (source / manifest.NAME).is_file():
        return None
    made = manifest.read(source)
    if made.kind != "model":
        raise InputError(f"holds a {made.kind}, not a model", where=source)
    return made


def _from_hf(spec: ConvertSpec, source: Path) -> ConvertPlan:
    job = Job()
    job.source = job.hf_dir = source
    job.parent = manifest_of(source)
    read_model(job, source)
    refs = tensors.headers(source)
    work = tasks(job.model, spec.vocab_padding)
    moves = accounts.account_hf(job.model, work, refs, spec.dtype, source)
    job.moves = moves
    job.vocab_rows = padded_vocab(job.model.dims.vocab, spec.vocab_padding)
    left = [f"{len(moves.buffers)} computed buffers, like {moves.buffers[0]}"] if moves.buffers else []
    if moves.lm_head:
        left.append("lm_head.weight, a copy of the tied embedding (compared before anything is written)")
    return ConvertPlan(
        title="mst-convert",
        source=str(source),
        layout="hf",
        to="megatron",
        out=str(spec.out),
        architecture=job.family.architecture,
        parameters=job.model.parameters,
        dtype=_dtypes(ref.dtype for ref in refs.values()) + (f" -> {spec.dtype}" if spec.dtype else ""),
        lossless=all(ref.dtype == move.dtype for move in moves.moves for ref in move.sources),
        tensors_in=len(refs),
        tensors_out=len({move.task.key for move in moves.moves}),
        bytes_out=sum(move.nbytes for move in moves.moves),
        padding_rows=job.vocab_rows - job.model.dims.vocab,
        left_out=left,
        job=job,
    )


def open_megatron(source: Path, hf_config: Path | None = None, dtype: str | None = None) -> Job:
    """A Megatron directory as a job: its model and one export for each native tensor. InputError as in accounts."""
    job = Job()
    job.source = source
    job.parent = manifest_of(source)
    stored = torch_dist.metadata(source)
    inside = source / "hf"
    if hf_config is None and not (inside / "config.json").is_file():
        raise InputError(
            "holds no hf/config.json, so the model is not known",
            where=source,
            hint="mst-convert --hf-config DIR: a Hugging Face directory of the same model (config.json and tokenizer)",
        )
    job.hf_dir = hf_config or inside
    read_model(job, job.hf_dir)
    moves = accounts.account_megatron(job.model, tasks(job.model), stored, dtype, source)
    job.moves = moves
    job.emit_lm_head = bool(job.parent and job.model.tied and job.parent.encoding.get("lm_head") == "copy")
    head = next(move for move in moves.moves if move.task.hf[0].name == accounts.EMBEDDING)
    job.vocab_rows = head.stored.shape[0]
    return job


def _from_megatron(spec: ConvertSpec, source: Path) -> ConvertPlan:
    job = open_megatron(source, spec.hf_config, spec.dtype)
    moves = job.exports
    head = next(move for move in moves.moves if move.task.hf[0].name == accounts.EMBEDDING)
    left = [f"{moves.training_state} tensors of training state"] if moves.training_state else []
    if job.vocab_rows > job.model.dims.vocab:
        left.append(f"{job.vocab_rows - job.model.dims.vocab} rows of vocabulary padding")
    return ConvertPlan(
        title="mst-convert",
        source=str(source),
        layout="megatron",
        to="hf",
        out=str(spec.out),
        architecture=job.family.architecture,
        parameters=job.model.parameters,
        dtype=_dtypes(move.stored.dtype for move in moves.moves) + (f" -> {spec.dtype}" if spec.dtype else ""),
        lossless=all(move.stored.dtype == move.dtype for move in moves.moves),
        tensors_in=len({move.stored.key for move in moves.moves}),
        tensors_out=sum(len(move.task.hf) for move in moves.moves) + job.emit_lm_head,
        bytes_out=sum(move.nbytes for move in moves.moves) + (head.nbytes if job.emit_lm_head else 0),
        left_out=left,
        job=job,
    )


def _from_gguf(spec: ConvertSpec, source: Path) -> ConvertPlan:
    if spec.hf_config is not None:
        raise InputError("--hf-config is for Megatron checkpoints; a GGUF file holds its own", where=source)
    job = Job()
    job.source = source
    job.gguf = gguf.read_header(source)
    elements = sum(prod(tensor.shape) for tensor in job.gguf.tensors)
    dtype = spec.dtype or "bf16"
    return ConvertPlan(
        title="mst-convert",
        source=str(source),
        layout="gguf",
        to="hf",
        out=str(spec.out),
        architecture=job.gguf.architecture,
        parameters=elements,
        dtype=f"{job.gguf.kinds} -> {dtype}",
        lossless=False,
        tensors_in=len(job.gguf.tensors),
        tensors_out=0,
        bytes_out=elements * tensors.DTYPE_BYTES[accounts.CASTS[dtype]],
        job=job,
    )


def _dtypes(names: Any) -> str:
    return ", ".join(TORCH_NAMES[name] for name in sorted(set(names)))
