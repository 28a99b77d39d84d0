"""--add-tokens, as far as files tell: which are asked for, whether the tokenizer has them, and what has a row for each
token. Pure, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mst_core import families, manifest, tensors
from mst_core.errors import InputError, SettingsError


def asked(given: Sequence[str]) -> list[str]:
    """The tokens of --add-tokens: as they stand, or the lines of a file. SettingsError for none, blanks, doubles."""
    found: list[str] = []
    for item in given:
        if Path(item).is_file():
            try:
                found += Path(item).read_text(encoding="utf-8").splitlines()
            except UnicodeDecodeError as error:
                raise SettingsError(f"--add-tokens: {item} is not UTF-8: {error}") from error
        else:
            found.append(item)
    if not found:
        raise SettingsError(f"--add-tokens: no token in {', '.join(given)}", hint="a token a line")
    for number, token in enumerate(found, 1):
        if token != token.strip() or not token:
            what = f"--add-tokens: token {number} is {token!r}: empty, or with a blank at an end"
            raise SettingsError(what, hint="a token a line; a tokenizer cuts such blanks off")
        if token in found[: number - 1]:
            raise SettingsError(f"--add-tokens: {token!r} is given twice")
    return found


def tables(model: families.Model) -> list[str]:
    """The Hugging Face tensors with a row for each token: the embedding, and a head that is not tied to it."""
    ends = ("word_embeddings.weight", "output_layer.weight")
    found = (task.hf[0] for task in families.tasks(model) if task.native.endswith(ends))
    return [spec.name for spec in found if spec.rows == model.dims.vocab]


def by_vocab(model: families.Model) -> set[str]:
    """``tables``, and the copies of them that a directory may hold."""
    names = set(tables(model))
    return names | {copy for copy, original in model.duplicates().items() if original in names}


def added(model_dir: Path) -> tuple[list[str], list[int]]:
    """The tokens that a directory was grown by (engine/grow.py), and their numbers."""
    made = manifest.read(model_dir)
    tokens, first = made.made_by.settings["add_tokens"] if made.made_by else [], int(made.notes.get("first", 0))
    return tokens, list(range(first, first + len(tokens)))


def check(tokens: Sequence[str], hf: Path) -> None:
    """InputError for tokens that the tokenizer in ``hf`` has already: their rows would be trained ones."""
    path = hf / "tokenizer.json"
    if not path.is_file():
        what = "has no tokenizer.json, so its tokenizer cannot be given tokens"
        raise InputError(what, where=hf, hint="AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR) writes one")
    content = tensors.read_json(path)
    model: Any = content.get("model") or {}
    vocab = model.get("vocab") or {}
    known = set(vocab if isinstance(vocab, dict) else (entry[0] for entry in vocab))
    known |= {entry["content"] for entry in content.get("added_tokens") or []}
    if there := [token for token in tokens if token in known]:
        are = "is" if len(there) == 1 else "are"
        what = f"--add-tokens: {', '.join(map(repr, there[:5]))} {are} in the tokenizer already"
        raise InputError(what, where=path, hint="leave them out")
