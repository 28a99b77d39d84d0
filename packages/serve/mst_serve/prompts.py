"""The tokenizer's side: prompts to ids, ids to text and bytes, and which ids end a turn."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from mst_core.errors import InputError
from mst_serve.protocol import ApiError, Message, invalid
from mst_serve.text import Detokenizer


class Prompts:
    """One model's tokenizer. Thread-safe: encoding and decoding change nothing in it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, where: Path) -> None:
        if not tokenizer.is_fast:
            raise InputError("the tokenizer has no tokenizer.json form", where=where)
        self._tokenizer = tokenizer
        self._core: Any = tokenizer.backend_tokenizer
        self._core.no_truncation()  # a cut prompt is an answer to another question
        self._core.no_padding()
        self._special = set(tokenizer.all_special_ids)
        self._added = {token_id: str(token) for token_id, token in tokenizer.added_tokens_decoder.items()}
        self._bytes = _byte_reader(json.loads(self._core.to_str()).get("decoder"))

    @classmethod
    def load(cls, model_dir: Path) -> Prompts:
        """The tokenizer in a directory; InputError if transformers cannot read it."""
        try:
            tokenizer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
            raise InputError(f"the tokenizer cannot be loaded: {error}", where=model_dir) from error
        return cls(tokenizer, model_dir)

    @property
    def has_template(self) -> bool:
        """Whether chat requests can be answered."""
        return bool(self._tokenizer.chat_template)

    @property
    def size(self) -> int:
        """Ids the tokenizer knows: 0 to size - 1."""
        return int(self._core.get_vocab_size(with_added_tokens=True))

    def end_ids(self) -> set[int]:
        """Ids that end an answer: the tokenizer's EOS, and the token that the template writes after an answer."""
        ids = {self._tokenizer.eos_token_id} - {None}
        if self.has_template:
            mark = "mst end mark"
            turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": mark}]
            try:
                text = str(self._tokenizer.apply_chat_template(turns, tokenize=False))
            except (TemplateError, TypeError, ValueError) as error:
                raise InputError(f"the chat template cannot render a conversation: {error}") from error
            after = self._core.encode(text.rpartition(mark)[2].lstrip(), add_special_tokens=False).ids
            ids |= {after[0]} & (self._special | self._added.keys()) if after else set()
        return ids

    def chat(self, messages: Sequence[Message]) -> list[int]:
        """Prompt ids of a conversation, by the model's own template and nothing else (no hidden system prompt)."""
        if not self.has_template:
            raise invalid(
                "this model has no chat template, so it cannot answer chat requests; use /v1/completions",
                "messages",
                "no_chat_template",
            )
        # OpenAI's newer name for the same role
        turns = [{"role": "system" if m.role == "developer" else m.role, "content": m.content} for m in messages]
        try:
            text = self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        except (TemplateError, TypeError, ValueError) as error:
            raise invalid(f"the model's chat template refuses these messages: {error}", "messages") from error
        return list(self._core.encode(str(text), add_special_tokens=False).ids)

    def text(self, prompt: str) -> tuple[list[int], list[int]]:
        """(ids, where each begins in the text) of a completion prompt, the tokenizer's own BOS included."""
        encoded = self._core.encode(prompt, add_special_tokens=True)
        return list(encoded.ids), [begin for begin, _ in encoded.offsets]

    def decode(self, ids: list[int]) -> str:
        """Text of ids, special tokens left out, spaces as they are."""
        return str(self._core.decode(ids, skip_special_tokens=True))

    def spell(self, ids: Sequence[int]) -> tuple[str, list[int]]:
        """(text, where each token begins) of prompt ids, special tokens written out."""
        reader = Detokenizer(lambda window: self._core.decode(window, skip_special_tokens=False))
        text, offsets = "", []
        for token in ids:
            offsets.append(len(text))
            text += reader.add(token)
        return text + reader.flush(), offsets

    def raw(self, token: int) -> bytes:
        """The bytes that a token stands for."""
        if token in self._added:
            return self._added[token].encode()
        piece = self._core.id_to_token(token)
        return b"" if piece is None else self._bytes(piece)


def check_ids(ids: Sequence[int], vocabulary: int, param: str) -> None:
    """Refuse ids that the model has no embedding for: given as such, or made by a tokenizer larger than the model."""
    worst = max(ids)
    if worst >= vocabulary:
        raise invalid(f"token id {worst} is not in the vocabulary of {vocabulary}", param)


def check_length(prompt: int, wanted: int | None, context: int, param: str) -> int:
    """Tokens the answer may have. A prompt or an answer that does not fit is refused, never cut."""
    if prompt == 0:
        raise invalid("the prompt has no tokens", param)
    if prompt + (1 if wanted is None else wanted) > context:
        asked = "" if wanted is None else f" and {wanted} tokens of answer"
        raise ApiError(
            400,
            f"the context is {context} tokens, but the request has {prompt} tokens of prompt{asked}",
            param=param,
            code="context_length_exceeded",
        )
    return context - prompt if wanted is None else wanted


def _byte_reader(decoder: Any) -> Any:
    """How a vocabulary piece becomes bytes, by the kind of decoder in tokenizer.json."""
    if "ByteLevel" in json.dumps(decoder):
        table = _byte_level()
        return lambda piece: bytes(table[c] for c in piece) if all(c in table for c in piece) else piece.encode()

    def sentencepiece(piece: str) -> bytes:
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        return piece.replace("▁", " ").encode()

    return sentencepiece


def _byte_level() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes (openai/gpt-2, encoder.py)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}
