"""What will be measured, and why not: everything that file names and tensor headers can tell, without torch."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

from mst_core import checkpoint, families, hub, manifest, tensors
from mst_core.data import render, rows
from mst_core.errors import InputError
from mst_core.spec import Plan
from mst_evalkit.spec import EvalSpec


class EvalPlan(Plan):
    """What mst-eval is about to do."""

    directory: Path
    architecture: str
    parameters: int
    stored: str
    tasks: tuple[str, ...]
    data: tuple[Path, ...]
    out: Path
    precision: str
    seq_length: int
    batch_size: int

    def rows(self) -> list[tuple[str, str]]:
        """The plan for a person."""
        return [
            ("model", f"{self.directory} ({self.architecture}, {self.parameters:,} parameters in {self.stored})"),
            ("tasks", ", ".join(self.tasks)),
            ("data", ", ".join(map(str, self.data))),
            ("out", str(self.out)),
            ("precision", self.precision),
            ("longest row", f"{self.seq_length} tokens"),
            ("batch size", str(self.batch_size)),
        ]


def plan(spec: EvalSpec) -> EvalPlan:
    """Check the directory, the files and the output. Raises InputError."""
    directory = hub.resolve(spec.model)
    _check_kind(directory)
    config = tensors.config(directory)
    _check_task(config, spec, directory)
    refs = tensors.headers(directory)
    if "perplexity" not in spec.tasks and not render.has_template(directory):
        raise InputError("has no chat template, and questions are asked through it", where=directory, hint=_TEMPLATE)
    rows.check_files(spec.data)
    checkpoint.check_out(spec.out, spec.overwrite)
    largest = max(refs.values(), key=lambda ref: ref.nbytes)
    return EvalPlan(
        title="mst-eval",
        directory=directory,
        architecture=str((config.get("architectures") or ["unknown"])[0]),
        parameters=sum(prod(ref.shape) for ref in refs.values()),
        stored=tensors.TORCH_NAMES[largest.dtype],
        tasks=spec.tasks,
        data=spec.data,
        out=spec.out,
        precision=spec.precision,
        seq_length=_seq_length(directory, config, spec.seq_length),
        batch_size=spec.batch_size,
    )


_TEMPLATE = render.TEMPLATE_HINT


def _check_kind(directory: Path) -> None:
    """Refuse what is not a Hugging Face model, each kind with the command that makes it one."""
    name = directory.resolve().name
    if directory.is_file():
        hint = f"mst-convert --model {directory} --to hf --out {directory.stem}"
        raise InputError(
            "is a file, not a directory", where=directory, hint=hint if directory.suffix == ".gguf" else None
        )
    if directory.name.endswith(".partial"):
        raise InputError("this is a work in progress, not a checkpoint", where=directory)
    if (directory / "adapter_config.json").is_file():
        hint = f"mst-merge --model BASE --adapter {directory} --to hf --out {name}-merged, then measure that"
        raise InputError("is an adapter, not a model", where=directory, hint=hint)
    if any((directory / file).exists() for file in ("latest_checkpointed_iteration.txt", "release", ".metadata")):
        hint = f"mst-convert --model {directory} --to hf --out {name}-hf, then measure that"
        raise InputError("is a Megatron checkpoint; mst-eval reads the Hugging Face layout", where=directory, hint=hint)
    if manifest.is_finished(directory) and (kind := manifest.read(directory).kind) not in ("model", "reward"):
        raise InputError(f"holds a {kind}, not a model", where=directory)


def _check_task(config: dict[str, Any], spec: EvalSpec, directory: Path) -> None:
    """A reward model scores answers, a language model gives their tokens probabilities."""
    scores = families.is_classifier(config)
    if scores and "reward" not in spec.tasks:
        raise InputError("is a reward model, which gives tokens no probability", where=directory, hint="--tasks reward")
    if not scores and "reward" in spec.tasks:
        what = "is no reward model: its architecture has no head that scores"
        raise InputError(what, where=directory, hint="--tasks choice asks which answer it finds likelier")
    if scores:
        families.check_labels(config, directory)


def _seq_length(directory: Path, config: dict[str, Any], wanted: int | None) -> int:
    limit = config.get("max_position_embeddings")
    if not isinstance(limit, int) or limit < 2:
        if wanted is None:
            raise InputError(
                "does not say max_position_embeddings", where=directory / "config.json", hint="give --seq-length"
            )
        return wanted
    if wanted is not None and wanted > limit:
        raise InputError(
            f"--seq-length {wanted} is more than the model's {limit} positions",
            where=directory / "config.json",
            hint=f"--seq-length {limit}, or none",
        )
    return wanted or limit
