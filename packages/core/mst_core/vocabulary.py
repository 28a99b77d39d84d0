"""--add-tokens, as far as files tell: which are asked for, whether the tokenizer has them, and what has a row for each
token. Pure, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mst_core import families, manifest, tensors
from mst_core.errors import InputError, SettingsError
from mst_core.files import TOKENIZER_FILES

FAST = "tokenizer.json"
WRITE = "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR) writes one"
BESIDE = ("chat_template.jinja", "chat_template.json", "special_tokens_map.json", "tokenizer_config.json")
"""Files of a tokenizer that say nothing of its tokens' numbers."""


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
    path = hf / FAST
    if not path.is_file():
        what = f"has no {FAST}, so its tokenizer cannot be given tokens"
        raise InputError(what, where=hf, hint=WRITE)
    known = set(_numbers(path).values())
    if there := [token for token in tokens if token in known]:
        are = "is" if len(there) == 1 else "are"
        what = f"--add-tokens: {', '.join(map(repr, there[:5]))} {are} in the tokenizer already"
        raise InputError(what, where=path, hint="leave them out")


def check_same(hf: Path, other: Path) -> None:
    """InputError where a number is one token to the tokenizer in ``hf`` and another one, or none, to that in ``other``.

    Without tokenizer.json, the files that a tokenizer reads its tokens from must be the same.
    """
    fast = all((folder / FAST).is_file() for folder in (hf, other))
    names = [FAST] if fast else [name for name in TOKENIZER_FILES if name not in BESIDE]
    held = [[(folder / name).read_bytes() for name in names if (folder / name).is_file()] for folder in (hf, other)]
    if held[0] == held[1]:
        return
    if not fast:
        what = f"cannot be compared with the tokenizer in {hf}: one of them has no {FAST}"
        raise InputError(what, where=other, hint=WRITE)
    one, two = _numbers(hf / FAST), _numbers(other / FAST)
    if differ := sorted(number for number in one.keys() | two.keys() if one.get(number) != two.get(number)):
        first = differ[0]
        what = f"its tokenizer is not that in {hf}: of {len(differ)} numbers that differ"
        raise InputError(f"{what}, {first} is {two.get(first)!r} and {one.get(first)!r} there", where=other)


def _numbers(path: Path) -> dict[int, str]:
    """What each number of a tokenizer.json is."""
    content = tensors.read_json(path)
    model: Any = content.get("model") or {}
    vocab = model.get("vocab") or {}
    tokens = vocab.items() if isinstance(vocab, dict) else ((entry[0], number) for number, entry in enumerate(vocab))
    found = {number: token for token, number in tokens}
    return found | {entry["id"]: entry["content"] for entry in content.get("added_tokens") or []}
