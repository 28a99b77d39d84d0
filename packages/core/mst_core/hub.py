"""Hugging Face Hub, ModelScope and local paths behind one name. Never remote code."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

from mst_core import console
from mst_core.errors import InputError, MissingPackage

WANTED = ("*.safetensors", "*.json", "*.model", "*.txt", "*.jinja")
"""File patterns of a snapshot: weights, configuration, tokenizer. No Python, no pickles."""


def resolve(model: str | Path) -> Path:
    """The local directory of a model: a path, ``hf://org/name[@revision]`` or ``ms://org/name[@revision]``.

    Raises InputError when there is no such directory, repository or network; MissingPackage without the client.
    """
    name = str(model)
    scheme, separator, rest = name.partition("://")
    if not separator:
        path = Path(name).expanduser()
        if path.exists():
            return path
        hint = f"for the Hub write hf://{name}" if name.count("/") == 1 and not name.startswith((".", "/")) else None
        raise InputError("no such directory", where=name, hint=hint)
    repository, _, revision = rest.partition("@")
    if scheme not in DOWNLOADS or repository.count("/") != 1 or not all(repository.split("/")):
        raise InputError("is not a model's name", where=name, hint="hf://org/name, ms://org/name, or a directory")
    path = DOWNLOADS[scheme](Asked(name, repository, revision or None))
    console.say(f"{name} is {path}")
    return path


def dataset(name: str, suffixes: Sequence[str]) -> list[Path]:
    """The files of rows of ``hf://org/name[@revision][/path or glob]`` (or ``ms://``), downloaded. No script of it is
    ever run.

    Text files (licences, word lists) are rows only where the path asks for them. Raises InputError where nothing fits,
    or where several folders or a test split would be mixed with the training rows.
    """
    match = re.fullmatch(r"(hf|ms)://([^/@]+/[^/@]+)(?:@([^/]+))?(?:/(.+))?", name)
    if match is None:
        raise InputError("is no data set's name", where=name, hint="hf://org/name, ms://org/name@revision/folder")
    scheme, repository, revision, part = match.groups()
    asked = [part, f"{part}/*"] if part else [f"*{suffix}" for suffix in suffixes if suffix != ".txt"]
    ignored = ["dataset_infos.json", "*/dataset_infos.json", "[.]*"]  # modelscope reads .* as a regular expression
    root = DOWNLOADS[scheme](Asked(name, repository, revision, "dataset", asked, ignored))
    below = {path.relative_to(root).as_posix(): path for path in sorted(root.rglob("*")) if path.is_file()}
    fitting = [file for file in below if any(fnmatch(file, pattern) for pattern in asked)]
    found = [f for f in fitting if f.lower().endswith(tuple(suffixes)) and not any(fnmatch(f, no) for no in ignored)]
    if not found:
        raise InputError(f"holds no file of rows there ({', '.join(suffixes)})", where=name)
    held_out = [file for file in found if re.search(r"(^|[/_.-])(test|valid|validation|dev|eval)([/_.-])", file)]
    folders = sorted({file.rpartition("/")[0] for file in found})
    if (held_out and len(held_out) < len(found)) or len(folders) > 1:
        listed = ", ".join(found[:8]) + (" ..." if len(found) > 8 else "")
        hint = f"name the part to learn from, as {scheme}://{repository}/{found[0]}"
        raise InputError(f"holds several parts: {listed}", where=name, hint=hint)
    console.say(f"{name} is {len(found)} files in {root}")
    return [below[file] for file in found]


class Asked(NamedTuple):
    """What is to be downloaded: which files (globs) of which revision. ``name`` is what the user wrote."""

    name: str
    repository: str
    revision: str | None
    kind: str = "model"
    wanted: Sequence[str] = WANTED
    ignored: Sequence[str] = ()


def _hugging_face(asked: Asked) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ImportError as error:
        raise MissingPackage("hf:// needs huggingface_hub", hint="pip install 'mst-tools-core[hub]'") from error
    import httpx2

    try:
        return Path(
            snapshot_download(
                asked.repository,
                revision=asked.revision,
                repo_type=asked.kind,
                allow_patterns=list(asked.wanted),
                ignore_patterns=list(asked.ignored) or None,
            )
        )
    except (HFValidationError, HfHubHTTPError) as error:
        raise InputError(
            _first_line(error), where=asked.name, hint="check the name, the revision and HF_TOKEN"
        ) from error
    except (LocalEntryNotFoundError, httpx2.HTTPError, OSError) as error:
        raise InputError(
            f"the Hugging Face Hub cannot be reached and the {asked.kind} is not in the local cache",
            where=asked.name,
            hint="download it where there is a network (hf download) and give the directory",
        ) from error


def _modelscope(asked: Asked) -> Path:
    try:
        from modelscope import dataset_snapshot_download, snapshot_download
    except ImportError as error:
        raise MissingPackage("ms:// needs modelscope", hint="pip install 'mst-tools-core[hub]'") from error
    import requests

    try:
        download = snapshot_download if asked.kind == "model" else dataset_snapshot_download
        patterns = {"allow_patterns": list(asked.wanted), "ignore_patterns": list(asked.ignored) or None}
        return Path(download(asked.repository, revision=asked.revision, **patterns))
    except (requests.RequestException, OSError, ValueError) as error:
        raise InputError(
            f"ModelScope did not give it: {_first_line(error)}",
            where=asked.name,
            hint="download it where there is a network (modelscope download) and give the directory",
        ) from error


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


DOWNLOADS = {"hf": _hugging_face, "ms": _modelscope}
"""By the scheme of a name."""
