"""Rows of files as samples, all bad rows in one error, or set aside and counted."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from blake3 import blake3

from mst_core import console
from mst_core.data import pack, rows, shapes
from mst_core.data.documents import Documents
from mst_core.data.order import Order
from mst_core.data.records import BadLine, Row
from mst_core.data.render import Renderer, Sample
from mst_core.data.sources import Source
from mst_core.errors import InputError, RowError, many

BadRows = Literal["error", "skip"]
Data = Sequence[Source] | Sequence[Path]


@dataclass
class Loaded[T]:
    """What files gave. A row can give several samples (templates that rewrite history)."""

    samples: Sequence[T] = field(default_factory=list)
    rows: int = 0
    duplicates: int = 0
    truncated: int = 0
    counts: list[tuple[Source, int]] = field(default_factory=list)
    """How many samples each source gave; they lie one source after another."""
    packed: int = 0
    """How many samples stand in the packed rows that ``samples`` are; 0: they are not packed."""
    rejected: list[dict[str, Any]] = field(default_factory=list)
    """Rows set aside: file, line, reason and the row itself (its text where it is no JSON object)."""

    def report(self, what: str) -> None:
        """Say what was loaded, and what was not."""
        console.say(f"{what}: {self.rows} rows, {len(self.samples)} samples")
        for source, _ in self.counts:
            if source.left:
                listed = ", ".join(source.left[:5]) + (" ..." if len(source.left) > 5 else "")
                console.warn(f"{source.name}: {len(source.left)} files of other kinds were not read: {listed}")
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

    def pack(self: Loaded[Sample], size: int, seed: int) -> None:
        """Pack the samples into rows of ``size`` tokens; those of a source with a share only with one another."""
        lengths = [len(sample.tokens) for sample in self.samples]
        apart = any(source.weight is not None for source, _ in self.counts)
        counts, made, first = [], [], 0
        for source, count in self.counts if apart else [(None, len(lengths))]:
            rows = pack.bins(lengths[first : first + count], size, seed)
            made += [[first + index for index in row] for row in rows]
            counts.append((source, len(rows)))
            first += count
        self.packed = len(lengths)
        self.samples = pack.Packed(self.samples, made)
        self.counts = [(source, count) for source, count in counts if source is not None]
        fill = sum(lengths) / (len(made) * size)
        console.say(f"{len(lengths)} samples packed into {len(made)} rows of {size} tokens, {fill:.0%} full")

    def order(self, seed: int, size: int | None) -> Order:
        """The order of the samples: ``size`` of an epoch (--num-samples; None: all), in the sources' shares."""
        shares = [(count, source.weight) for source, count in self.counts if source.weight is not None]
        for source, count in self.counts:
            if source.weight is not None and not count:
                raise InputError("has a share and no usable row", where=source.name)
        rows = len(self.samples)
        if size is not None:
            size = max(1, round(size * rows / self.packed)) if self.packed else size
        return Order(rows, seed, rows if size is None else size, shares)

    def rejects(self) -> str:
        """The content of rejected.jsonl."""
        return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in self.rejected)


def sft(given: Data, renderer: Renderer, bad_rows: BadRows = "error") -> Loaded[Sample]:
    """Conversations, the assistant's turns learnt."""
    loaded = load(given, lambda row: renderer.samples(shapes.conversation(row), row.where), bad_rows)
    loaded.truncated = sum(sample.truncated for sample in loaded.samples)
    return loaded


def cpt(given: Data, documents: Documents, bad_rows: BadRows = "error") -> Loaded[Sample]:
    """Documents, every token learnt."""
    return load(given, documents.samples, bad_rows)


def pairs(given: Data, renderer: Renderer, bad_rows: BadRows = "error") -> Loaded[tuple[Sample, Sample]]:
    """(chosen, rejected) of each preference row."""
    loaded = load(given, lambda row: [renderer.pair(shapes.pair(row), row.where)], bad_rows)
    loaded.truncated = sum(sample.truncated for pair in loaded.samples for sample in pair)
    return loaded


def load[T](given: Data, make: Callable[[Row], list[T]], bad_rows: BadRows = "error") -> Loaded[T]:
    """``make`` of each row. Raises one error that lists every bad row, or InputError if no row is left."""
    loaded: Loaded[T] = Loaded()
    errors: list[RowError] = []
    samples: list[T] = []
    loaded.samples = samples
    seen: set[bytes] = set()
    for source in (item if isinstance(item, Source) else Source(str(item), (item,)) for item in given):
        before, taken = len(samples), 0
        for row in islice(rows.read(source.files), source.first):
            taken += 1
            try:
                if isinstance(row, BadLine):
                    raise row.error
                samples += make(row)
            except RowError as error:
                errors.append(error)
                content = row.text if isinstance(row, BadLine) else row.data
                loaded.rejected.append({"file": row.file, "line": row.line, "reason": error.what, "row": content})
                continue
            loaded.rows += 1
            digest = blake3(json.dumps(row.data, sort_keys=True).encode()).digest(16)
            loaded.duplicates += digest in seen
            seen.add(digest)
        if source.first and taken < source.first:
            console.warn(f"{source.name}: it holds {taken} rows, fewer than the {source.first} asked for")
        loaded.counts.append((source, len(samples) - before))
    if not errors and not loaded.samples:
        raise InputError("holds no rows", where=", ".join(str(getattr(item, "name", item)) for item in given))
    if errors and (bad_rows == "error" or not loaded.samples):
        hint = "mend them, or --bad-rows skip sets them aside in rejected.jsonl" if loaded.samples else "mend them"
        count = "none" if not loaded.samples else f"{len(errors)}"
        verb = "can" if not loaded.samples else "cannot"
        raise many(errors, what=f"{count} of {loaded.rows + len(errors)} rows {verb} be used:", hint=hint)
    return loaded
