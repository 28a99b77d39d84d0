"""mst.json: what a directory holds, where it came from, and the id that names it.

The id is the blake3 of the canonical JSON (sorted keys, no spaces, UTF-8) of every field but ``attachments`` and
``notes``. Same inputs and same settings give the same id; docs/manifest.md describes each field.
"""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from blake3 import blake3
from pydantic import BaseModel, ConfigDict, ValidationError

from mst_core import files
from mst_core.errors import InputError

if TYPE_CHECKING:
    from mst_core.families import Model

NAME = "mst.json"
FORMAT: Literal[1] = 1

Kind = Literal["model", "adapter", "reward", "data", "report"]
Layout = Literal["hf", "megatron", "megatron-legacy", "peft", "report"]
Role = Literal["source", "base", "policy", "reference", "adapter", "data", "model"]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class FileEntry(_Strict):
    """One file: its path inside the directory, its size and its blake3 (hex)."""

    path: str
    bytes: int
    blake3: str


class Parent(_Strict):
    """Something this directory was made from.

    ``lossless`` says that the weights are the parent's, only arranged in another way (a conversion).
    ``weights`` is the parent's digest of weights, so that an edited template does not break a merge.
    """

    role: Role
    id: str
    weights: str | None = None
    lossless: bool = False


class ModelInfo(_Strict):
    """The model inside: family and architecture (Hugging Face's class name), dims, dtype of most weights."""

    family: str
    architecture: str
    dims: dict[str, int]
    dtype: str
    tied: bool
    parameters: int


class Digests(_Strict):
    """blake3 over the (path, hash) lists of three groups of files; None where there are none."""

    weights: str | None = None
    config: str | None = None
    tokenizer: str | None = None


class MadeBy(_Strict):
    """The tool and its effective settings that can change bytes: no paths, workers or parts."""

    tool: str
    version: str
    settings: dict[str, Any]


class Manifest(_Strict):
    """The content of mst.json."""

    format: Literal[1] = FORMAT
    kind: Kind
    layout: Layout
    encoding: dict[str, Any] = {}
    model: ModelInfo | None = None
    digests: Digests
    files: list[FileEntry]
    parents: list[Parent] = []
    made_by: MadeBy | None = None
    attachments: list[FileEntry] = []
    notes: dict[str, Any] = {}

    @cached_property
    def id(self) -> str:
        """``blake3:`` and 64 hex digits."""
        body = self.model_dump(mode="json", exclude={"attachments", "notes"})
        return "blake3:" + blake3(canonical(body)).hexdigest()

    def parent(self, role: Role) -> Parent | None:
        """The first parent in a role."""
        return next((parent for parent in self.parents if parent.role == role), None)

    def dump(self) -> bytes:
        """The file's bytes. The id stands in it for people and is checked when it is read."""
        body = {"id": self.id, **self.model_dump(mode="json")}
        return (json.dumps(body, indent=2, ensure_ascii=False) + "\n").encode()


def canonical(value: Any) -> bytes:
    """JSON with sorted keys and no spaces: one text for one value."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def short(identity: str) -> str:
    """An id for a person: ``blake3:1f3c9a…``."""
    kind, _, digest = identity.partition(":")
    return f"{kind}:{digest[:12]}…"


def is_finished(directory: Path) -> bool:
    """Whether the directory was finished by an mst tool (it has a manifest and is no work in progress)."""
    return (directory / NAME).is_file() and not directory.name.endswith(".partial")


def read(directory: Path) -> Manifest:
    """The manifest of a directory. Raises InputError when it is missing, edited, newer or not a manifest."""
    path = directory / NAME
    if directory.name.endswith(".partial"):
        raise InputError("this is a work in progress, not a checkpoint", where=directory)
    try:
        return parse(path.read_bytes(), path)
    except FileNotFoundError:
        what = "no such directory" if not directory.exists() else f"has no {NAME}: it was not finished by an mst tool"
        raise InputError(what, where=directory) from None


def parse(content: bytes, where: Path) -> Manifest:
    """A manifest from its bytes."""
    try:
        body = json.loads(content)
        if not isinstance(body, dict):
            raise TypeError("not an object")
    except (ValueError, TypeError, RecursionError) as error:
        raise InputError(f"is not a manifest: {error}", where=where) from None
    if isinstance(body.get("format"), int) and body["format"] > FORMAT:
        raise InputError(
            f"has format {body['format']}, this mst knows up to {FORMAT}", where=where, hint="upgrade mst-tools-core"
        )
    stated = body.pop("id", None)
    try:
        manifest = Manifest.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise InputError(f"is not a manifest: {place}: {first['msg']}", where=where) from None
    if stated != manifest.id:
        raise InputError("was edited: its content does not give the id it states", where=where)
    return manifest


def schema() -> dict[str, Any]:
    """The JSON schema of mst.json (docs/manifest.schema.json is generated from this)."""
    body = Manifest.model_json_schema()
    body["properties"] = {"id": {"type": "string", "pattern": "^blake3:[0-9a-f]{64}$"}, **body["properties"]}
    return body


def identify(directory: Path) -> Manifest:
    """The manifest of any checkpoint: the one it has, else one built from a Hugging Face or PEFT directory.

    Building reads every byte of the weights once (hashes are cached by path, size, mtime and inode).
    Raises InputError for a directory that is neither.
    """
    if (directory / NAME).exists() or directory.name.endswith(".partial"):
        return read(directory)
    adapter = (directory / "adapter_config.json").is_file()
    if not adapter and not (directory / "config.json").is_file():
        what = "no such directory" if not directory.is_dir() else "is no checkpoint: no mst.json and no config.json"
        raise InputError(what, where=directory)
    cache = files.HashCache(directory)
    entries = []
    for path in sorted(directory.iterdir()):
        if path.is_file() and any(test(path.name) for test in (files.is_weights, files.is_tokenizer, files.is_config)):
            count, digest = cache.hash(path)
            entries.append(FileEntry(path=path.name, bytes=count, blake3=digest))
    cache.save()
    model = None if adapter else _model_of(directory)
    return Manifest(
        kind="adapter" if adapter else model.kind if model else "model",
        layout="peft" if adapter else "hf",
        model=model and model.info(),
        digests=digests(entries),
        files=entries,
        notes={"origin": _origin(directory)},
    )


def digests(entries: list[FileEntry]) -> Digests:
    """The digests of the three groups of files."""
    groups = {
        name: files.group_digest((entry.path, entry.blake3) for entry in entries if test(entry.path))
        for name, test in (
            ("weights", files.is_weights),
            ("config", files.is_config),
            ("tokenizer", files.is_tokenizer),
        )
    }
    return Digests(**groups)


def _model_of(directory: Path) -> Model | None:
    """What the config says, or None for an architecture that mst does not know (its tools refuse it by themselves)."""
    from mst_core import families, tensors

    config = tensors.config(directory)
    try:
        return families.family_for(config, str(directory)).model(config)
    except InputError:
        return None


def _origin(directory: Path) -> str:
    """``hub://name@commit`` for a snapshot in Hugging Face's cache layout, else the directory's name."""
    resolved = directory.resolve()
    if resolved.parent.name == "snapshots" and resolved.parent.parent.name.startswith("models--"):
        return f"hf://{resolved.parent.parent.name[8:].replace('--', '/')}@{resolved.name}"
    return resolved.name
