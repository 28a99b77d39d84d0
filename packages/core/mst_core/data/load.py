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
from mst_core.data.rows import Row
from mst_core.errors import InputError, RowError, many

BadRows = Literal["error", "skip"]


@dataclass
class Loaded[T]:
    """What files gave. A row can give several samples (templates that rewrite history)."""

    samples: list[T] = field(default_factory=list)
    rows: int = 0
    duplicates: int = 0
    rejected: list[dict[str, Any]] = field(default_factory=list)
    """Rows set aside: file, line, reason and the row itself."""

    def report(self, what: str) -> None:
        """Say what was loaded, and what was not."""
        console.say(f"{what}: {self.rows} rows, {len(self.samples)} samples")
        if self.duplicates:
            console.warn(f"{what}: {self.duplicates} rows are copies of earlier ones; they are kept")
        if self.rejected:
            console.warn(f"{what}: {len(self.rejected)} rows were set aside, see rejected.jsonl")

    def rejects(self) -> str:
        """The content of rejected.jsonl."""
        return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in self.rejected)


def sft(paths: Sequence[Path], renderer: Renderer, bad_rows: BadRows = "error") -> Loaded[Sample]:
    """Conversations, the assistant's turns learnt."""
    return load(paths, lambda row: renderer.samples(shapes.conversation(row), row.where), bad_rows)


def pairs(paths: Sequence[Path], renderer: Renderer, bad_rows: BadRows = "error") -> Loaded[tuple[Sample, Sample]]:
    """(chosen, rejected) of each preference row."""
    return load(paths, lambda row: [renderer.pair(shapes.pair(row), row.where)], bad_rows)


def load[T](paths: Sequence[Path], make: Callable[[Row], list[T]], bad_rows: BadRows = "error") -> Loaded[T]:
    """``make`` of each row. Raises one error that lists every bad row, or InputError if no row is left."""
    loaded: Loaded[T] = Loaded()
    errors: list[RowError] = []
    seen: set[str] = set()
    for row in rows.read(paths):
        if isinstance(row, RowError):
            errors.append(row)
            loaded.rejected.append({"where": row.where, "reason": row.what, "row": None})
            continue
        try:
            loaded.samples += make(row)
        except RowError as error:
            errors.append(error)
            loaded.rejected.append({"where": row.where, "reason": error.what, "row": row.data})
            continue
        loaded.rows += 1
        text = json.dumps(row.data, sort_keys=True)
        loaded.duplicates += text in seen
        seen.add(text)
    names = ", ".join(path.name for path in paths)
    if errors and bad_rows == "error":
        total = loaded.rows + len(errors)
        raise many(
            errors,
            what=f"{len(errors)} of {total} rows cannot be used:",
            hint="mend them, or --bad-rows skip sets them aside in rejected.jsonl",
        )
    if not loaded.samples:
        raise InputError("no usable row" if not errors else f"none of {len(errors)} rows can be used", where=names)
    return loaded
