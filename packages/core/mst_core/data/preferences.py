"""What to know of preferences before they are learnt from: copies, contradictions, answers that are equal, margins.

Two rows are the same if the same tokens are learnt from them. A pair contradicts another with chosen and rejected
exchanged, a judged answer the same one with the other label. Both are kept; equal answers are refused (shapes.py).
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from blake3 import blake3

from mst_core.data import records
from mst_core.data.records import Row
from mst_core.data.render import Sample
from mst_core.data.shapes import SAME

SHOWN = 3
"""How many places are told of each kind."""
SAID = {
    "copies": "copies of earlier ones, which are kept",
    "contradictions": "contradictions of earlier ones (answers exchanged, or the other label), which are kept",
    "equal_answers": "pairs with two equal answers, which teach nothing and were set aside",
}


class Preferences:
    """Rows as they are read; ``found`` is JSON, its places as (number of the file, line, those of the earlier row)."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = {str(path): number for number, path in enumerate(files)}
        self._seen: dict[bytes, tuple[int, int]] = {}
        self.found: dict[str, Any] = {kind: {"count": 0, "first": []} for kind in ("copies", "contradictions")}
        self.found["margins"] = 0

    def add(self, row: Row, samples: Sequence[Sample]) -> None:
        """A pair, or one judged answer."""
        own, opposite = _keys(samples)
        place = (self._files[row.file], row.line)
        for kind, key in (("copies", own), ("contradictions", opposite)):
            if (earlier := self._seen.get(key)) is not None:
                self.found[kind]["count"] += 1
                if len(self.found[kind]["first"]) < SHOWN:
                    self.found[kind]["first"].append([*place, *earlier])
        self._seen.setdefault(own, place)
        self.found["margins"] += samples[0].margin is not None


def told(found: Mapping[str, Any], files: Sequence[Path], rejected: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """``found`` for a person and the manifest, with the rows set aside for equal answers: counts, and first places."""
    made: dict[str, Any] = {"margins": found["margins"]}
    for kind in ("copies", "contradictions"):
        places = [
            f"{records.place(files[file], line)} (of {records.place(files[other], before)})"
            for file, line, other, before in found[kind]["first"]
        ]
        made[kind] = {"count": found[kind]["count"], "first": places}
    equal = [records.place(row["file"], row["line"]) for row in rejected if row["reason"].startswith(SAME)]
    return made | {"equal_answers": {"count": len(equal), "first": equal[:SHOWN]}}


def lines(preferences: Mapping[str, Any]) -> list[str]:
    """What ``told`` made, a line for each kind that is there."""
    made = []
    for kind, what in SAID.items():
        if count := preferences[kind]["count"]:
            more = ", ..." if count > SHOWN else ""
            made.append(f"{count} {what}: {', '.join(preferences[kind]['first'])}{more}")
    return made


def _keys(samples: Sequence[Sample]) -> tuple[bytes, bytes]:
    """Of a pair or a judged answer, and of its contradiction."""
    first, *second = (blake3(array("i", sample.tokens).tobytes()).digest(16) for sample in samples)
    if second:
        return first + second[0], second[0] + first
    return first + bytes([bool(samples[0].desirable)]), first + bytes([not samples[0].desirable])
