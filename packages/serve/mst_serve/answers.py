"""The bodies of answers, in OpenAI's shapes. Everything here is a pure function of pieces and token scores."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import time
from typing import Any

from mst_serve.output import Piece, TokenScore

Raw = Callable[[int], bytes]
"""The bytes of a token id."""


@dataclass
class Choice:
    """One answer, put together from its pieces."""

    text: str = ""
    tokens: list[TokenScore] = field(default_factory=list)
    finish: str | None = None

    def add(self, piece: Piece) -> None:
        """Append a piece."""
        self.text += piece.text
        self.tokens += piece.tokens
        self.finish = piece.finish


@dataclass(frozen=True)
class Head:
    """What every chunk of one answer repeats."""

    id: str
    created: int
    model: str

    @classmethod
    def new(cls, prefix: str, model: str) -> Head:
        """A fresh id."""
        return cls(f"{prefix}-{uuid.uuid4().hex}", int(time()), model)

    def body(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """The JSON body of an answer or a chunk."""
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return {**head, "choices": choices, **more}


def usage(prompt: int, completion: int) -> dict[str, int]:
    """Token counts. An end-of-turn token counts: it was generated."""
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def chat_logprobs(tokens: Sequence[TokenScore], raw: Raw) -> dict[str, Any]:
    """logprobs of a chat choice: for each token its text, bytes, log-probability and the likeliest there."""

    def entry(token: int, logprob: float | None) -> dict[str, Any]:
        data = raw(token)
        return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data)}

    content = [
        {**entry(token.id, token.logprob), "top_logprobs": [entry(*other) for other in token.top]} for token in tokens
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(tokens: Sequence[TokenScore], raw: Raw, shift: int = 0) -> dict[str, Any]:
    """logprobs of a completion choice; ``shift`` is added to the offsets (the length of an echoed prompt).

    top_logprobs always has the token itself, so it may have one entry more than was asked for (as at OpenAI).
    """
    tops: list[dict[str, float | None] | None] = []
    for token in tokens:
        best = {_name(raw(other)): logprob for other, logprob in token.top}
        tops.append(None if token.logprob is None else {**best, _name(raw(token.id)): token.logprob})
    return {
        "tokens": [_name(raw(token.id)) for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": tops,
        "text_offset": [token.offset + shift for token in tokens],
    }


def _name(data: bytes) -> str:
    """A token's text; where its bytes are no text by themselves, OpenAI's spelling of them."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_choice(index: int, choice: Choice, logprobs: dict[str, Any] | None) -> dict[str, Any]:
    """A whole chat choice."""
    message = {"role": "assistant", "content": choice.text, "refusal": None}
    return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": choice.finish}


def chat_delta(
    index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, finish: str | None = None
) -> dict[str, Any]:
    """A chat choice in a chunk."""
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}


def text_choice(
    index: int, text: str, logprobs: dict[str, Any] | None = None, finish: str | None = None
) -> dict[str, Any]:
    """A completion choice, whole or in a chunk."""
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}
