"""What the engine hands out: pieces of answers, and the state of one answer that makes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from mst_serve.text import Detokenizer, StopStrings

Finish = Literal["stop", "length"]


@dataclass
class TokenScore:
    """A token, its log-probability (None: not asked for, or the first of a prompt) and the likeliest there."""

    id: int
    logprob: float | None = None
    top: list[tuple[int, float]] = field(default_factory=list)
    offset: int = 0
    """Where the token's text begins, in characters of the answer."""


@dataclass
class Piece:
    """A part of one choice. The last one has ``finish``."""

    choice: int
    text: str = ""
    tokens: list[TokenScore] = field(default_factory=list)
    generated: int = 0
    """Tokens generated since the last piece, end of turn included."""
    finish: Finish | None = None


@dataclass
class PromptScores:
    """Scores of the prompt's tokens; the first has none."""

    tokens: list[TokenScore]


@dataclass
class Failed:
    """The engine gave up; nothing follows."""

    reason: str


class Row:
    """One choice: turns tokens into pieces, and knows when it is finished."""

    def __init__(
        self,
        choice: int,
        decode: Callable[[list[int]], str],
        stops: Sequence[str],
        max_tokens: int,
        eos: frozenset[int],
        emit: Callable[[Piece], None],
    ) -> None:
        self._choice, self._eos, self._emit = choice, eos, emit
        self._left = max_tokens
        self._text, self._stops = Detokenizer(decode), StopStrings(stops)
        self._seen = 0
        """Characters decoded so far, held ones included."""
        self._sent = 0
        self._tokens: list[TokenScore] = []
        self._generated = 0

    def add(self, score: TokenScore) -> bool:
        """Take the next token, hand out what may leave; whether the choice is finished."""
        self._left -= 1
        self._generated += 1
        if score.id in self._eos:
            return self._end("stop")
        score.offset = self._seen
        self._tokens.append(score)
        if self._push(self._text.add(score.id)):
            return True
        if self._left <= 0:
            return self._end("length")
        return False

    def _push(self, text: str) -> bool:
        """Send what may leave of ``text``; whether a stop string ended the choice."""
        self._seen += len(text)
        leaves, stopped = self._stops.add(text)
        self._sent += len(leaves)
        tokens = self._released(self._sent)
        if stopped:
            self._emit(Piece(self._choice, leaves, tokens, self._generated, "stop"))
        elif leaves:
            self._emit(Piece(self._choice, leaves, tokens, self._generated))
            self._generated = 0
        else:
            self._tokens = tokens + self._tokens
        return stopped

    def _end(self, finish: Finish) -> bool:
        """The last tokens are there: an unfinished character, then held text; a stop string may still come of it."""
        leaves, stopped = self._stops.add(self._text.flush())
        if not stopped:
            leaves += self._stops.flush()
        self._sent += len(leaves)
        tokens = self._released(self._sent) if stopped else self._tokens
        self._emit(Piece(self._choice, leaves, tokens, self._generated, "stop" if stopped else finish))
        return True

    def _released(self, sent: int) -> list[TokenScore]:
        """Tokens whose text begins before character ``sent``, taken from those that wait."""
        count = sum(token.offset < sent for token in self._tokens)
        released, self._tokens = self._tokens[:count], self._tokens[count:]
        return released
