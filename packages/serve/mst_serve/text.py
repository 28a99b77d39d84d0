"""From token ids to text, piece by piece.

Two promises hold for every piece that leaves: it never ends inside a UTF-8 character, and it never holds any part
of a stop string. The pieces of one answer joined are the same text whether it is streamed or not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

UNFINISHED = "�"
"""What a decoder writes for bytes that are not (yet) a character."""


class Detokenizer:
    """Incremental decoding of one sequence.

    A piece is what ``decode`` adds for a short window of tokens when one more joins. The window starts at a token
    whose text has left already, so that decoders which treat the first token apart (sentencepiece drops its space)
    see one. Based on the two-offset scheme of text-generation-inference and vLLM.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._start = 0
        self._read = 0

    def add(self, token: int) -> str:
        """The text that ``token`` completes; empty while a character is unfinished."""
        self._ids.append(token)
        known = self._decode(self._ids[self._start : self._read])
        text = self._decode(self._ids[self._start :])
        if text.endswith(UNFINISHED) or len(text) <= len(known):
            return ""
        self._start, self._read = self._read, len(self._ids)
        return text[len(known) :]

    def flush(self) -> str:
        """What is left at the end: the replacement character of bytes that never became one."""
        known = self._decode(self._ids[self._start : self._read])
        text = self._decode(self._ids[self._start :])
        self._start = self._read = len(self._ids)
        return text[len(known) :]


class StopStrings:
    """Holds back text that may be the beginning of a stop string, and cuts at the first one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def add(self, text: str) -> tuple[str, bool]:
        """(text that may leave now, whether a stop string came)."""
        pending = self._held + text
        found = [at for at in (pending.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self._held = ""
            return pending[: min(found)], True
        keep = max((_overlap(pending, stop) for stop in self._stops), default=0)
        self._held = pending[len(pending) - keep :]
        return pending[: len(pending) - keep], False

    def flush(self) -> str:
        """The text still held: no stop string came of it."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop`` (and is not all of it)."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
