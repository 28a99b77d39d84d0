"""A head tied to its embedding: which edits keep the two one, and what untying changes. No torch.

PEFT adapts the two apart unless told otherwise (``ensure_weight_tying``, or token rows, which it ties by itself). Its
merge then adds both deltas to the one weight, or loses the head when the model is loaded again (transformers #45127).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mst_convert.accounts import EMBEDDING, LM_HEAD
from mst_convert.merge.edits import Delta, Edit, Named, Whole
from mst_core.errors import InputError, MstError

NESTED = ("text_config", "llm_config", "language_config", "thinker_config")
"""Where models of several parts keep the config of their text part."""
UNTIE = "--untie writes both and sets tie_word_embeddings to false"


def embedding_of(names: Iterable[str]) -> str:
    """The embedding's tensor: vision-language models have a prefix of their own."""
    found = list(names)
    return EMBEDDING if EMBEDDING in found else next((n for n in found if n.endswith("embed_tokens.weight")), EMBEDDING)


def settle(
    edits: list[Named], embedding: str, config: Mapping[str, Any], *, untie: bool
) -> tuple[list[Named], list[tuple[Edit, Edit]], list[MstError]]:
    """One adapter's edits of a tied model; pairs of edits that must say the same; what needs --untie.

    A head that follows its embedding has no edits of its own while they are one, and the embedding's after untying.
    """
    head = [edit for name, edit in edits if name == LM_HEAD]
    both = [edit for name, edit in edits if name == embedding]
    rest = [(name, edit) for name, edit in edits if name != LM_HEAD]
    rows = bool(both) and not head and all(isinstance(edit, Whole) and edit.rows is not None for edit in both)
    twins = list(zip(both, head, strict=False)) if config.get("ensure_weight_tying") else []
    tied = len(twins) == len(both) == len(head) == 1 and all(_alike(*twin) for twin in twins)
    if rows or tied:
        return rest + [(LM_HEAD, edit) for edit in both if untie], twins if tied else [], []
    if untie or not (head or both):
        return edits, [], []
    where, what = ("lm_head", "the head") if head else (embedding.removesuffix(".weight"), "the embedding")
    reason = f"the head is tied to the embedding: {what} merged alone would change both, or be lost on reload; {UNTIE}"
    return edits, [], [InputError(reason, where=where)]


def _alike(embedding: Edit, head: Edit) -> bool:
    """May the two be one change? Their numbers are compared when they are read."""
    if isinstance(embedding, Delta) and isinstance(head, Delta):
        return embedding.scale == head.scale and not embedding.magnitude
    return isinstance(embedding, Whole) and isinstance(head, Whole) and embedding.rows == head.rows


def untied(config: Mapping[str, Any], *, inner: bool = False) -> dict[str, Any]:
    """config.json of the untied model: false at the top, and wherever a text config says otherwise."""
    changed = {k: untied(v, inner=True) if k in NESTED and isinstance(v, dict) else v for k, v in config.items()}
    if not inner or "tie_word_embeddings" in changed or not any(name in changed for name in NESTED):
        changed["tie_word_embeddings"] = False
    return changed
