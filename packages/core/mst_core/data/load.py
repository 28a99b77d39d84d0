"""Rows of files as samples, all bad rows in one error, or set aside and counted."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mst_core import console
from mst_core.data import rows, shapes
from mst_core.data.render import Renderer, Sample
from mst_core.data.rows import BadLine, Row
from mst_core.errors import InputError, RowError, many

BadRows = Literal["error", "skip"]


@dataclass
class Loaded[T]:
    """What files gave. A row can give several samples (templates that rewrite history)."""

    samples: list[T] = field(default_factory=list)
    rows: int = 0
    duplicates: int = 0
    truncated: int = 0
    rejected: list[dict[str, Any]] = field(default_factory=list)
    """Rows set aside: file, line, reason and the row itself (its text where it is no JSON object)."""

    def report(self, what: str) -> None:
        """Say what was loaded, and what was not."""
        console.say(f"{what}: {self.rows} rows, {len(self.samples)} samples")
        if self.duplicates:
            console.warn(f"{what}: {self.duplicates} rows are copies of earlier ones; they are kept")
        if self.truncated:
            console.warn(f"{what}: {self.truncated} samples were cut at --seq-length, as --truncate right asks")
        if self.rejected:
            first = self.rejected[0]
            console.warn(
                f"{what}: {len(self.rejected)} of {self.rows + len(self.rejected)} rows were set aside, see "
                f"rejected.jsonl; the first is {first['file']}:{first['line']}: {first['reason']}"
            )

    def rejects(self) -> str:
        """The content of rejected.jsonl."""
        return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in self.rejected)


def sft(paths: Sequence[Path], renderer: Renderer, bad_rows: BadRows = "error") -> Loaded[Sample]:
    """Conversations, the assistant's turns learnt."""
    loaded = load(paths, lambda row: renderer.samples(shapes.conversation(row), row.where), bad_rows)
    loaded.truncated = sum(sample.truncated for sample in loaded.samples)
    return loaded


def pairs(paths: Sequence[Path], renderer: Renderer, bad_rows: BadRows = "error") -> Loaded[tuple[Sample, Sample]]:
    """(chosen, rejected) of each preference row."""
    loaded = load(paths, lambda row: [renderer.pair(shapes.pair(row), row.where)], bad_rows)
    loaded.truncated = sum(sample.truncated for pair in loaded.samples for sample in pair)
    return loaded


def load[T](paths: Sequence[Path], make: Callable[[Row], list[T]], bad_rows: BadRows = "error") -> Loaded[T]:
    """``make`` of each row. Raises one error that lists every bad row, or InputError if no row is left."""
    loaded: Loaded[T] = Loaded()
    errors: list[RowError] = []
    seen: set[str] = set()
    for row in rows.read(paths):
        try:
            if isinstance(row, BadLine):
                raise row.error
            loaded.samples += make(row)
        except RowError as error:
            errors.append(error)
            content = row.text if isinstance(row, BadLine) else row.data
            loaded.rejected.append({"file": row.file, "line": row.line, "reason": error.what, "row": content})
            continue
        loaded.rows += 1
        text = json.dumps(row.data, sort_keys=True)
        loaded.duplicates += text in seen
        seen.add(text)
    if not errors and not loaded.samples:
        raise InputError("holds no rows", where=", ".join(map(str, paths)))
    if errors and (bad_rows == "error" or not loaded.samples):
        hint = "mend them, or --bad-rows skip sets them aside in rejected.jsonl" if loaded.samples else "mend them"
        count = "none" if not loaded.samples else f"{len(errors)}"
        verb = "can" if not loaded.samples else "cannot"
        raise many(errors, what=f"{count} of {loaded.rows + len(errors)} rows {verb} be used:", hint=hint)
    return loaded
