"""What a conversion will do, from settings, config.json and headers alone. No torch, nothing written."""

from __future__ import annotations

from math import prod
from pathlib import Path

from pydantic import ConfigDict, Field

from mst_convert import accounts, gguf, logits, sources, sources_legacy, targets, targets_legacy, training_state
from mst_convert.gguf import GGUFHeader
from mst_convert.sources import Source
from mst_convert.spec import ConvertSpec
from mst_convert.targets import Target
from mst_core import checkpoint, console, hub, legacy, megatron_names, tensors, torch_dist
from mst_core.errors import InputError
from mst_core.families import padded_vocab
from mst_core.files import TOKENIZER_FILES
from mst_core.spec import Plan
from mst_core.tensors import TORCH_NAMES

SLACK = 1 << 20
"""Bytes for what is not weights: config, tokenizer, manifest, headers."""
CARRIED = ("generation_config.json", *TOKENIZER_FILES)
"""Files that travel beside config.json, byte for byte."""


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
    training: str = ""
    dequantised: list[str] = Field(default_factory=list)
    left_out: list[str] = Field(default_factory=list)
    memory: int = 0
    """Bytes that ``--verify logits`` takes."""
    read: Source | None = Field(None, exclude=True, repr=False)
    made: Target | None = Field(None, exclude=True, repr=False)
    gguf: GGUFHeader | None = Field(None, exclude=True, repr=False)

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
        if self.training:
            table.append(("training state", self.training))
        if self.memory:
            table.append(
                ("logits", f"both sides run on the CPU in fp32, one after the other: {console.size(self.memory)}")
            )
        table += [("dequantised", text) for text in self.dequantised]
        table += [("left out", text) for text in self.left_out]
        return table


def plan(spec: ConvertSpec) -> ConvertPlan:
    """Plan a conversion. InputError for all that headers can tell; see docs/convert.md."""
    place = hub.resolve(spec.model)
    layout = layout_of(place)
    _check_places(spec, place, layout)
    planned = _from_gguf(spec, place) if layout == "gguf" else _between(spec, place, layout)
    if not spec.dry_run:  # the plan of a large model may be read on a small machine
        checkpoint.check_free(spec.out, planned.bytes_out + SLACK)
    return planned


def open_source(place: Path, layout: str, hf_config: Path | None = None) -> Source:
    """A model of any layout but GGUF. InputError as its reader says."""
    if layout == "hf":
        if hf_config is not None:
            raise InputError("--hf-config is for Megatron checkpoints; this one has its own config.json", where=place)
        return sources.open_hf(place)
    if layout == "megatron-legacy":
        return sources_legacy.open_legacy(place, hf_config)
    return sources.open_torch_dist(place, hf_config)


def _between(spec: ConvertSpec, place: Path, layout: str) -> ConvertPlan:
    source = open_source(place, layout, spec.hf_config)
    if source.optimizer and not spec.weights_only:
        source = _with_training_state(spec, source)
    made = target_of(spec, source)
    memory = logits.check(spec, source) if spec.verify == "logits" else 0
    read = sorted(source.weight_dtypes)
    return ConvertPlan(
        title="mst-convert",
        source=str(place),
        layout=source.layout,
        to=spec.to,
        out=str(spec.out),
        architecture=source.family.architecture,
        parameters=source.model.parameters,
        dtype=", ".join(TORCH_NAMES[name] for name in read) + (f" -> {spec.dtype}" if spec.dtype else ""),
        lossless=not source.quantised
        and all(
            dtype == targets.dtype_of(source, task, spec.dtype)
            for task in source.tasks
            for dtype in source.dtypes[task.native]
        ),
        tensors_in=source.tensors,
        tensors_out=len(made.wanted),
        bytes_out=made.nbytes,
        padding_rows=made.padding_rows,
        training=f"{', '.join(kept.names)}, iteration {made.tracker}" if (kept := source.kept) else "",
        dequantised=source.quantised,
        left_out=source.left,
        memory=memory,
        read=source,
        made=made,
    )


def _with_training_state(spec: ConvertSpec, source: Source) -> Source:
    """The source with its training state. InputError where the output cannot hold it, or it cannot be carried."""
    if spec.to != "megatron" or source.training is None:
        what = "holds optimizer state, which goes from torch_dist to torch_dist only"
        raise InputError(what, where=source.directory, hint=training_state.HINT)
    if spec.dtype and (cast := source.weight_dtypes - {accounts.CASTS[spec.dtype]}):
        what = f"holds the optimizer state of weights in {', '.join(TORCH_NAMES[name] for name in sorted(cast))}"
        raise InputError(what, where=source.directory, hint=f"leave out --dtype, or {training_state.HINT}")
    return training_state.carry(source, padded_vocab(source.model.dims.vocab, spec.vocab_padding))


def target_of(spec: ConvertSpec, source: Source) -> Target:
    """The files to write, from the settings."""
    if spec.to == "hf":
        return targets.to_hf(source, spec.dtype, int(spec.max_shard_size))
    if spec.to == "megatron-legacy":
        return targets_legacy.to_legacy(source, spec)
    form = spec.form or ("stacked" if source.model.uniform and spec.spec != "hybrid" else "per-layer")
    naming = megatron_names.naming(source.model, spec.spec, form)
    rows = padded_vocab(source.model.dims.vocab, spec.vocab_padding)
    pattern = megatron_names.hybrid_pattern(source.model) if spec.spec == "hybrid" else ""
    state = torch_dist.release_state(source.family, source.config, rows, source.hf_dir, pattern)
    size = int(spec.max_shard_size)
    rest = training_state.rest(source, naming, rows) if source.kept else None
    return targets.to_torch_dist(source, spec.dtype, naming, spec.vocab_padding, size, state, rest)


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
        return "megatron-legacy" if legacy.is_legacy(source) else "megatron"
    if (source / "config.json").is_file():
        return "hf"
    files = sorted(source.glob("*.gguf"))
    hint = f"--model {files[0]}" if files else "a Hugging Face directory has config.json and model.safetensors"
    raise InputError("is neither a Hugging Face nor a Megatron directory", where=source, hint=hint)


def _check_places(spec: ConvertSpec, source: Path, layout: str) -> None:
    if layout == spec.to == "hf":
        raise InputError("is in the hf layout already", where=source, hint="did you mean --to megatron?")
    if layout == "gguf" and spec.to != "hf":
        raise InputError("a GGUF file goes to Megatron in two steps", where=source, hint="convert it --to hf first")
    if spec.out.absolute() == source.absolute():
        raise InputError("--out is the model itself", where=spec.out, hint="choose another --out")
    checkpoint.check_out(spec.out, spec.overwrite)


def _from_gguf(spec: ConvertSpec, source: Path) -> ConvertPlan:
    if spec.verify == "logits":
        raise InputError("--verify logits needs two models to run, and a GGUF file is dequantised", where=source)
    if spec.hf_config is not None:
        raise InputError("--hf-config is for Megatron checkpoints; a GGUF file holds its own", where=source)
    header = gguf.read_header(source)
    elements = sum(prod(tensor.shape) for tensor in header.tensors)
    dtype = spec.dtype or "bf16"
    return ConvertPlan(
        title="mst-convert",
        source=str(source),
        layout="gguf",
        to="hf",
        out=str(spec.out),
        architecture=header.architecture,
        parameters=elements,
        dtype=f"{header.kinds} -> {dtype}",
        lossless=False,
        tensors_in=len(header.tensors),
        tensors_out=0,
        bytes_out=elements * tensors.DTYPE_BYTES[accounts.CASTS[dtype]],
        gguf=header,
    )
