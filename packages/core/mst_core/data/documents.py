"""Documents as samples for continued pre-training: every token that another precedes is learnt once.

A document is ``{"text": "..."}``, or a whole .txt file. It becomes what the tokenizer makes of a text (with a BOS token
where it adds one) and the EOS token. A document longer than the sequence is cut into pieces; a piece begins with the
last token of the one before, so that the cut costs no token its probability.
"""

from __future__ import annotations

from typing import Any

from mst_core.data import shapes
from mst_core.data.records import Row, kind
from mst_core.data.render import Sample
from mst_core.data.shapes import Shape
from mst_core.errors import InputError, RowError

TEXT = Shape("text", ("text",))


def text_of(row: Row) -> str:
    """The document of a row. Raises RowError."""
    if set(row.data) & {field for shape in shapes.SFT_SHAPES for field in shape.needed} and "text" not in row.data:
        raise RowError("is a conversation, not a text; --stage sft learns it", where=row.where)
    text = shapes.match(row, (TEXT,))[1].data["text"]
    if not isinstance(text, str):
        raise RowError(f"text is {kind(text)}, not text", where=row.where)
    if not text.strip():
        raise RowError("has an empty text", where=row.where)
    return text


class Documents:
    """Tokenises with one tokenizer; ``seq_length`` is the longest piece."""

    def __init__(self, tokenizer: Any, seq_length: int) -> None:
        if tokenizer.eos_token_id is None:
            raise InputError("the tokenizer has no EOS token to end a document with")
        self.tokenizer = tokenizer
        self.seq_length = seq_length

    def samples(self, row: Row) -> list[Sample]:
        """The pieces of a row's document, all tokens learnt but the first of each. Raises RowError."""
        text = text_of(row)
        for token in (self.tokenizer.bos_token, self.tokenizer.eos_token):
            if token and token in text:
                raise RowError(
                    f"spells the special token {token}, which would end or begin a document", where=row.where
                )
        tokens = list(self.tokenizer(text, verbose=False)["input_ids"])
        end = self.tokenizer.eos_token_id
        tokens += [end] if tokens[-1:] != [end] else []
        if len(tokens) < 2:
            raise RowError("has no token that follows another", where=row.where)
        step = self.seq_length - 1
        pieces = [tokens[start : start + self.seq_length] for start in range(0, len(tokens) - 1, step)]
        return [Sample(piece, [0] + [1] * (len(piece) - 1)) for piece in pieces]
