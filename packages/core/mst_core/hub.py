"""Hugging Face Hub, ModelScope and local paths behind one name. Never remote code."""

from __future__ import annotations

from pathlib import Path

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
    if scheme not in ("hf", "ms") or repository.count("/") != 1 or not all(repository.split("/")):
        raise InputError("is not a model's name", where=name, hint="hf://org/name, ms://org/name, or a directory")
    path = (
        _hugging_face(name, repository, revision or None)
        if scheme == "hf"
        else _modelscope(name, repository, revision or None)
    )
    console.say(f"{name} is {path}")
    return path


def _hugging_face(name: str, repository: str, revision: str | None) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ImportError as error:
        raise MissingPackage("hf:// needs huggingface_hub", hint="pip install 'mst-tools-core[hub]'") from error
    import httpx2

    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=list(WANTED)))
    except (HFValidationError, HfHubHTTPError) as error:
        raise InputError(_first_line(error), where=name, hint="check the name, the revision and HF_TOKEN") from error
    except (LocalEntryNotFoundError, httpx2.HTTPError, OSError) as error:
        raise InputError(
            "the Hugging Face Hub cannot be reached and the model is not in the local cache",
            where=name,
            hint="download it where there is a network (hf download) and give the directory",
        ) from error


def _modelscope(name: str, repository: str, revision: str | None) -> Path:
    try:
        from modelscope import snapshot_download
    except ImportError as error:
        raise MissingPackage("ms:// needs modelscope", hint="pip install 'mst-tools-core[hub]'") from error
    import requests

    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=list(WANTED)))
    except (requests.RequestException, OSError, ValueError) as error:
        raise InputError(
            f"ModelScope did not give it: {_first_line(error)}",
            where=name,
            hint="download it where there is a network (modelscope download) and give the directory",
        ) from error


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
