"""--add-tokens: a Hugging Face directory with more tokens than the one it is made of, which the run then trains.

Every engine can train it, for it is a directory like any other. It is made once, in --cache, tensor by tensor. A new
token takes the next number of the tokenizer; its rows, of the embedding and of a head of its own, are the mean of the
rows of all tokens that were there (in fp32), as Hewitt proposes (nlp.stanford.edu/~johnhew/vocab-expansion.html): the
model then gives it the probability of an average token. Rows that padded the vocabulary are used up first; the
vocabulary grows by what is missing and is not padded anew (Megatron pads it for its ranks).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from mst_core import checkpoint, console, families, manifest, tensors, vocabulary
from mst_core.checkpoint import TOKENIZER_FILES, Staging
from mst_core.data.render import load_tokenizer
from mst_core.errors import InputError
from mst_core.families import Model
from mst_core.manifest import Parent
from mst_core.runplan import RunPlan
from mst_core.runspec import RunSpec


def prepared[P: RunPlan](spec: RunSpec, plan: P) -> P:
    """The plan of training the grown model, which is made if the cache has none; as it is without --add-tokens."""
    if not spec.add_tokens:
        return plan
    tokens, base = vocabulary.asked(spec.add_tokens), manifest.identify(plan.model_dir)
    made = cached(spec.cache, "grown", [base.id, tokens], lambda staging: _grow(staging, plan.model_dir, base, tokens))
    return plan.model_copy(update={"model": str(made)})


def cached(cache: Path, folder: str, of: Any, make: Callable[[Staging], object]) -> Path:
    """The directory in the cache that is made of ``of`` (anything that JSON has); ``make`` is called if it is not
    there."""
    key = hashlib.sha256(json.dumps(of).encode()).hexdigest()[:24]
    out = cache.expanduser().absolute() / folder / key
    out.parent.mkdir(parents=True, exist_ok=True)
    with (out.parent / f"{key}.lock").open("w") as lock:  # ranks of one run, or two runs
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not manifest.is_finished(out):
            with checkpoint.stage(out) as staging:
                make(staging)
    return out


def _grow(staging: Staging, model_dir: Path, base: manifest.Manifest, tokens: Sequence[str]) -> None:
    config, stored = tensors.config(model_dir), tensors.headers(model_dir)
    family = families.family_for(config, model_dir)
    model = family.model(config, model_dir, names=stored)
    by_vocab = vocabulary.by_vocab(model)
    old, new = _tokenizer(staging, model_dir, tokens)
    if config.get("vocab_size") != model.dims.vocab or old > model.dims.vocab:
        what = f"its tokenizer has {old} tokens, its vocab_size is {config.get('vocab_size')}: no rows for new ones"
        raise InputError(what, where=model_dir)
    rows = max(model.dims.vocab, new)
    wanted = [
        (ref.name, ref.dtype, (rows, *ref.shape[1:]) if ref.name in by_vocab else ref.shape) for ref in stored.values()
    ]
    writer = tensors.write_hf(staging, wanted)
    for ref in stored.values():
        tensor = tensors.read(ref)
        writer.put(ref.name, grown(tensor, old, new, rows) if ref.name in by_vocab else tensor)
    writer.finish()
    config = {**config, "vocab_size": rows}
    staging.write("config.json", json.dumps(config, indent=2, ensure_ascii=False) + "\n")
    if (model_dir / "generation_config.json").is_file():
        staging.copy(model_dir / "generation_config.json", "generation_config.json")
    made = family.model(config, model_dir, names=stored)
    notes = {"first": old, "vocabulary": rows}
    commit(staging, made, base, model_dir, "mst-train --add-tokens", {"add_tokens": list(tokens)}, notes)
    console.say(
        f"{len(tokens)} tokens added, {old} to {new - 1}; the vocabulary has {rows} rows (was {model.dims.vocab})"
    )


def commit(
    staging: Staging, made: Model, base: manifest.Manifest, model_dir: Path, tool: str, settings: dict[str, Any],
    notes: dict[str, Any] | None = None,
) -> manifest.Manifest:  # fmt: skip
    """A directory that was ``made`` of ``base``, which lies in ``model_dir``."""
    return staging.commit(
        kind=made.kind,
        layout="hf",
        encoding=base.encoding,
        model=made.info(base.model.dtype if base.model else None),
        parents=[Parent(role="base", id=base.id, weights=base.digests.weights)],
        parent_dirs=[model_dir],
        tool=tool,
        settings=settings,
        notes=notes or {},
    )


def grown(tensor: Tensor, old: int, new: int, rows: int) -> Tensor:
    """(rows, ...) of an embedding, head or its bias: rows ``old`` to ``new`` are the mean of those before."""
    made = tensor.new_zeros((rows, *tensor.shape[1:]))
    made[: len(tensor)] = tensor
    made[old:new] = tensor[:old].float().mean(0).to(tensor.dtype)
    return made


def _tokenizer(staging: Staging, model_dir: Path, tokens: Sequence[str]) -> tuple[int, int]:
    """Write the tokenizer with ``tokens``; the first new number, and how many there are then."""
    from transformers import AddedToken

    tokenizer: Any = load_tokenizer(model_dir, template=False)
    old = len(tokenizer)
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in tokens])
    ids = tokenizer.convert_tokens_to_ids(list(tokens))
    if ids != list(range(old, old + len(tokens))):
        raise InputError(f"its tokenizer numbers new tokens {ids[:5]}, not from {old} on", where=model_dir)
    folder = staging.path / "tokenizer"
    tokenizer.save_pretrained(folder)
    for path in sorted(folder.iterdir()):
        staging.copy(path, path.name)
        path.unlink()
    folder.rmdir()
    for name in TOKENIZER_FILES:  # a template, or a slow tokenizer's files, that transformers did not write again
        if (model_dir / name).is_file() and not (staging.path / name).exists() and name.startswith("chat_template"):
            staging.copy(model_dir / name, name)
    return old, old + len(tokens)
