"""Whose config and tokenizer a merged model gets: the base's, unless the adapter's would read text otherwise.

Trainers put a tokenizer beside the adapter. Saved again it often differs in nothing that matters (padding, truncation,
the order of keys), or in the chat template, which the user may have edited on either side. Only a different vocabulary
makes other token ids of the same text; then --tokenizer has to say.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from mst_core.errors import InputError
from mst_core.files import TOKENIZER_FILES

VOCABULARY = (
    "added_tokens.json",
    "merges.txt",
    "sentencepiece.bpe.model",
    "spiece.model",
    "tekken.json",
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
)
"""The tokenizer files that decide which ids a text becomes."""


def tokenizer_files(
    base: Path, adapters: Sequence[Path], choice: Literal["base", "adapter"] | None
) -> tuple[dict[str, Path], list[str]]:
    """The tokenizer files to copy, by name, and the names in which the adapters' differ from the base's.

    Raises InputError if the vocabularies differ and ``choice`` does not say which to take.
    """
    ours, theirs = _present(base), _present_in_one(adapters, strict=choice == "adapter")
    if choice == "adapter":
        if not theirs:
            raise InputError("--tokenizer adapter: it has no tokenizer files", where=adapters[0])
        return theirs, []
    differing = sorted({name for adapter in adapters for name in _differing(ours, _present(adapter))})
    vocabulary = [name for name in differing if name in VOCABULARY and name in ours]
    if vocabulary and not choice:
        raise InputError(
            f"the adapter brings a tokenizer with another vocabulary than the base's ({', '.join(vocabulary)})",
            where=next(a for a in adapters if set(vocabulary) & set(_differing(ours, _present(a)))),
            hint="--tokenizer base or --tokenizer adapter says which one the merged model gets",
        )
    return (ours or theirs), differing if ours and choice is None else []


def _present_in_one(adapters: Sequence[Path], *, strict: bool) -> dict[str, Path]:
    """The first adapter's files that has any. ``strict``: the others' must mean the same."""
    found: dict[str, Path] = {}
    for files in map(_present, adapters):
        if strict and found and files and (_differing(found, files) or _differing(files, found)):
            where = next(iter(files.values())).parent
            raise InputError("--tokenizer adapter: the adapters have different tokenizers", where=where)
        found = found or files
    return found


def _differing(ours: dict[str, Path], theirs: dict[str, Path]) -> list[str]:
    return [name for name in theirs if name not in ours or not _same(ours[name], theirs[name])]


def _present(directory: Path) -> dict[str, Path]:
    return {name: directory / name for name in TOKENIZER_FILES if (directory / name).is_file()}


def _same(first: Path, second: Path) -> bool:
    one, two = first.read_bytes(), second.read_bytes()
    if one == two:
        return True
    return first.suffix == ".json" and _meaning(first.name, one) == _meaning(second.name, two)


def _meaning(name: str, content: bytes) -> Any:
    """The JSON without what a trainer leaves behind in tokenizer.json; the bytes where it is no JSON."""
    try:
        value = json.loads(content)
    except ValueError:
        return content
    if name != "tokenizer.json" or not isinstance(value, dict):
        return value
    value = {key: item for key, item in value.items() if key not in ("padding", "truncation")}
    model = value.get("model")
    if isinstance(model, dict) and isinstance(model.get("merges"), list):
        # Older tokenizers wrote "a b", newer ones ["a", "b"].
        model["merges"] = [merge if isinstance(merge, str) else " ".join(map(str, merge)) for merge in model["merges"]]
    return value
