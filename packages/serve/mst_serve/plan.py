"""What will be served, and why not: everything that file names and tensor headers can tell, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mst_core import hub, manifest
from mst_core.errors import InputError, MstError, many
from mst_core.families import Model, family_for
from mst_core.spec import Plan
from mst_core.tensors import TensorRef, config, headers, read_json
from mst_serve.spec import ServeSpec

TOKENIZERS = ("tokenizer.json", "tokenizer.model")
"""One of them holds the vocabulary."""


class ServePlan(Plan):
    """What mst-serve is about to do."""

    directory: Path
    name: str
    id: str | None
    """The manifest's id, where an mst tool made the directory."""
    backend: str
    architecture: str
    parameters: int
    stored: str
    """dtype of the weights on disk."""
    context: int
    eos: tuple[int, ...]
    """EOS ids of config.json and generation_config.json; the tokenizer's own come when it is loaded."""
    chat: bool
    address: str
    max_concurrency: int
    max_queue: int
    cache_bytes_per_token: int
    """Keys and values of one token of one answer, in the stored dtype."""
    warnings: tuple[str, ...]


def plan(spec: ServeSpec) -> ServePlan:
    """Check the directory and settle every default. Raises InputError."""
    directory = hub.resolve(spec.model)
    _check_kind(directory)
    settings = config(directory)
    refs, where = headers(directory), str(directory / "config.json")
    model = family_for(settings, where).model(settings, where, names=refs)
    _check_tensors(directory, model, refs)
    _check_tokenizer(directory)
    context = _context(directory, settings, spec.seq_length)
    chat = has_template(directory)
    warnings = []
    if not chat:
        warnings.append(f"{directory} has no chat template: chat requests will get status 400, completions work")
    if not spec.host.startswith("127.") and spec.host not in ("localhost", "::1"):
        warnings.append(f"{spec.host} can be reached from other machines, and there is no authentication")
    made = manifest.read(directory) if manifest.is_finished(directory) else None
    stored = max(refs.values(), key=lambda ref: ref.nbytes).dtype
    dims = model.dims
    return ServePlan(
        title="mst-serve",
        directory=directory,
        name=spec.served_model_name or directory.resolve().name,
        id=made.id if made else None,
        backend=spec.backend,
        architecture=model.family.architecture,
        parameters=model.parameters,
        stored=stored,
        context=context,
        eos=_eos(directory, settings),
        chat=chat,
        address=f"{spec.host}:{spec.port or 'a free port'}",
        max_concurrency=spec.max_concurrency,
        max_queue=spec.max_queue,
        cache_bytes_per_token=2 * dims.layers * dims.groups * dims.head_dim * (4 if stored == "F32" else 2),
        warnings=tuple(warnings),
    )


def has_template(directory: Path) -> bool:
    """Whether a chat template lies in one of the places where transformers looks."""
    if (directory / "chat_template.jinja").is_file() or (directory / "chat_template.json").is_file():
        return True
    path = directory / "tokenizer_config.json"
    return path.is_file() and bool(read_json(path).get("chat_template"))


def _check_kind(directory: Path) -> None:
    """Refuse what is not a Hugging Face model, each kind with the command that makes it one."""
    if directory.is_file():
        hint = f"mst-convert --model {directory} --to hf --out {directory.stem}"
        raise InputError("is a file, not a directory", where=directory, hint=hint if _is_gguf(directory) else None)
    if directory.name.endswith(".partial"):
        raise InputError("this is a work in progress, not a checkpoint", where=directory)
    if (directory / "adapter_config.json").is_file():
        raise InputError(
            "is an adapter, not a model",
            where=directory,
            hint=f"mst-merge --model BASE --adapter {directory} --to hf --out merged, then serve merged",
        )
    if any((directory / name).exists() for name in ("latest_checkpointed_iteration.txt", "release", ".metadata")):
        raise InputError(
            "is a Megatron checkpoint; a server reads the Hugging Face layout",
            where=directory,
            hint=f"mst-convert --model {directory} --to hf --out {directory.resolve().name}-hf, then serve that",
        )
    if manifest.is_finished(directory) and (kind := manifest.read(directory).kind) != "model":
        raise InputError(f"holds a {kind}, not a model that generates text", where=directory)
    ggufs = sorted(directory.glob("*.gguf"))
    if ggufs and not (directory / "config.json").is_file():
        hint = f"mst-convert --model {ggufs[0]} --to hf --out {ggufs[0].stem}"
        raise InputError("holds a GGUF file, not a Hugging Face model", where=directory, hint=hint)


def _is_gguf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def _check_tensors(directory: Path, model: Model, refs: Mapping[str, TensorRef]) -> None:
    """Every tensor of the config once, with its shape, and none besides."""
    problems: list[MstError] = []
    wanted = {spec.name: spec.shape for spec in model.hf_tensors()}
    for name, shape in wanted.items():
        if name not in refs:
            why = " and config.json does not tie it to the embeddings" if name == "lm_head.weight" else ""
            problems.append(InputError(f"is missing{why}", where=name))
        elif refs[name].shape != shape:
            problems.append(InputError(f"has shape {refs[name].shape}, config.json says {shape}", where=name))
    for name in refs.keys() - wanted.keys():
        # Some writers keep a tied head; transformers ties it again and does not read it.
        if not (model.family.is_ignored(name, model.dims) or name in model.duplicates()):
            problems.append(InputError("is not a tensor of this architecture", where=name))
    if problems:
        problems.sort(key=str)
        raise many(
            problems,
            what=f"{directory}: the weights are not those of config.json",
            hint="the model would start and answer nonsense; convert or merge it again, or correct config.json",
        )


def _check_tokenizer(directory: Path) -> None:
    if not any((directory / name).is_file() for name in TOKENIZERS) and not (
        (directory / "vocab.json").is_file() and (directory / "merges.txt").is_file()
    ):
        raise InputError(
            "has no tokenizer (tokenizer.json, tokenizer.model, or vocab.json and merges.txt)",
            where=directory,
            hint=f"copy the tokenizer files of the base model into {directory}",
        )


def _context(directory: Path, settings: Mapping[str, Any], wanted: int | None) -> int:
    limit = settings.get("max_position_embeddings")
    if not isinstance(limit, int) or limit < 2:
        raise InputError("max_position_embeddings is missing or not a length", where=directory / "config.json")
    if wanted is not None and wanted > limit:
        raise InputError(
            f"--seq-length {wanted} is more than the model's {limit} positions",
            where=directory / "config.json",
            hint=f"--seq-length {limit}, or none",
        )
    return wanted or limit


def _eos(directory: Path, settings: Mapping[str, Any]) -> tuple[int, ...]:
    path = directory / "generation_config.json"
    found: set[int] = set()
    for where in (settings, read_json(path) if path.is_file() else {}):
        value = where.get("eos_token_id")
        found |= {item for item in (value if isinstance(value, list) else [value]) if isinstance(item, int)}
    return tuple(sorted(found))
