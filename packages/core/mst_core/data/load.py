"""Rows of files as samples, all bad rows in one error, or set aside and counted."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal, Protocol

from blake3 import blake3

from mst_core import console
from mst_core.data import pack, preferences, rows, shapes, store
from mst_core.data.clean import Cleaner, Rules
from mst_core.data.documents import Documents
from mst_core.data.order import Order
from mst_core.data.preferences import Preferences
from mst_core.data.records import BadLine, Row
from mst_core.data.render import Renderer, Sample
from mst_core.data.sources import Source
from mst_core.errors import InputError, RowError, many

BadRows = Literal["error", "skip"]
Data = Sequence[Source] | Sequence[Path]


class Sink[T](Protocol):
    """Where samples go: a list, or a store.Writer."""

    def extend(self, samples: list[T], /) -> None: ...

    def __len__(self) -> int: ...


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

    notes: list[str] = field(default_factory=list)
    """What else a person should know."""
    cleaned: dict[str, int] = field(default_factory=dict)
    """Rows that each rule of cleaning removed (``unicode``: repaired)."""
    removed: Path | None = None
    """The file of those removed."""
    preferences: dict[str, Any] = field(default_factory=dict)
    """Of pairs and judged answers: what preferences.told knows of them."""

    def report(self, what: str) -> None:
        """Say what was loaded, and what was not."""
        console.say(f"{what}: {self.rows} rows, {len(self.samples)} samples")
        for source, _ in self.counts:
            if source.left:
                listed = ", ".join(source.left[:5]) + (" ..." if len(source.left) > 5 else "")
                console.warn(f"{source.name}: {len(source.left)} files (or directories) of it were not read: {listed}")
        for note in self.notes:
            console.warn(note)
        if self.cleaned:
            counts = ", ".join(f"{rule} {count}" for rule, count in sorted(self.cleaned.items()))
            console.say(f"{what}: cleaning removed rows (unicode: repaired them): {counts}; see removed.jsonl")
        for line in preferences.lines(self.preferences) if self.preferences else ():
            console.warn(f"{what}: {line}")
        if self.duplicates and not self.preferences:
            console.warn(f"{what}: {self.duplicates} rows are copies of earlier ones; they are kept")
        if self.truncated:
            console.warn(f"{what}: {self.truncated} samples were cut to --seq-length, as --truncate asks")
        if self.rejected:
            first = self.rejected[0]
            console.warn(
                f"{what}: {len(self.rejected)} of {self.rows + len(self.rejected)} rows were set aside, see "
                f"rejected.jsonl; the first is {first['file']}:{first['line']}: {first['reason']}"
            )

    def pack(self: Loaded[Sample], size: int, seed: int) -> str:
        """Pack the samples into rows of ``size`` tokens; those of a source with a share only with one another. Returns
        what a person should know of it."""
        held = self.samples
        lengths = held.lengths() if isinstance(held, store.Stored) else [len(sample.tokens) for sample in held]
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
        return f"{len(lengths)} samples packed into {len(made)} rows of {size} tokens, {fill:.0%} full"

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


@dataclass(frozen=True)
class Cache:
    """Where tokenised rows are kept, and whose tokenizer made them."""

    directory: Path
    model_dir: Path


def sft(given: Data, renderer: Renderer, bad_rows: BadRows = "error", cache: Cache | None = None) -> Loaded[Sample]:
    """Conversations, the assistant's turns learnt."""
    settings = {"stage": "sft", "seq_length": renderer.seq_length, "truncate": renderer.truncate}
    return _samples(given, lambda row: renderer.samples(shapes.conversation(row), row.where), bad_rows, settings, cache)


def cpt(
    given: Data,
    documents: Documents,
    bad_rows: BadRows = "error",
    cache: Cache | None = None,
    rules: Rules | None = None,
) -> Loaded[Sample]:
    """Documents, every token learnt."""
    settings = {"stage": "cpt", "seq_length": documents.seq_length}
    return _samples(given, documents.samples, bad_rows, settings, cache, rules)


def pairs(
    given: Data, renderer: Renderer, bad_rows: BadRows = "error", cache: Cache | None = None
) -> Loaded[tuple[Sample, Sample]]:
    """(chosen, rejected) of each preference row."""
    settings = {"stage": "pairs", "seq_length": renderer.seq_length, "truncate": renderer.truncate}

    def make(row: Row) -> list[Sample]:
        return list(renderer.pair(shapes.pair(row), row.where))

    flat = _samples(given, make, bad_rows, settings, cache, prefer=True)
    counts = [(source, count // 2) for source, count in flat.counts]
    return Loaded(**{**vars(flat), "samples": store.Pairs(flat.samples), "counts": counts})


def judged(given: Data, renderer: Renderer, bad_rows: BadRows = "error", cache: Cache | None = None) -> Loaded[Sample]:
    """The last answer of each row, which its label calls good or bad."""
    settings = {"stage": "judged", "seq_length": renderer.seq_length, "truncate": renderer.truncate}

    def make(row: Row) -> list[Sample]:
        return [renderer.judged(*shapes.judged(row), row.where)]

    return _samples(given, make, bad_rows, settings, cache, prefer=True)


def _samples(
    given: Data,
    make: Callable[[Row], list[Sample]],
    bad_rows: BadRows,
    settings: dict[str, Any],
    cache: Cache | None,
    rules: Rules | None = None,
    prefer: bool = False,
) -> Loaded[Sample]:
    """The samples of each row, from the cache where they are, and read through it. ``prefer``: they are preferences."""
    sources = _sources(given)
    paths = [path for source in sources for path in source.files]
    truncated, seen = 0, Preferences(paths)

    def counted(row: Row) -> list[Sample]:
        nonlocal truncated
        made = make(row)
        truncated += sum(sample.truncated for sample in made)
        if prefer:
            seen.add(row, made)
        return made

    if cache is None:
        loaded = load(sources, counted, bad_rows)
        loaded.truncated = truncated
        loaded.preferences = preferences.told(seen.found, paths, loaded.rejected) if prefer else {}
        return loaded
    settings |= {"bad_rows": bad_rows, "rules": rules.model_dump(mode="json") if rules else None}
    if rules or bad_rows == "skip":  # what is kept of the rows that go names their files
        settings["files"] = [str(path) for path in paths]
    directory = store.place(cache.directory, cache.model_dir, sources, settings)
    about = store.about_of(directory)
    if about is None:
        with store.Writer(directory) as writer:
            cleaner = Cleaner(rules, writer.remove) if rules else None
            loaded = load(sources, counted, bad_rows, into=writer, cleaner=cleaner)
            about = {name: getattr(loaded, name) for name in ("rows", "duplicates", "rejected", "notes", "cleaned")}
            about |= {"truncated": truncated, "counts": [count for _, count in loaded.counts], "seen": seen.found}
            writer.commit(about)
    else:
        console.say(f"tokenised before: {directory}")
    found: Loaded[Sample] = Loaded(store.Stored(directory), removed=directory / store.REMOVED if rules else None)
    for name in ("rows", "duplicates", "rejected", "notes", "cleaned", "truncated"):
        setattr(found, name, about[name])
    found.counts = list(zip(sources, about["counts"], strict=True))
    found.preferences = preferences.told(about["seen"], paths, found.rejected) if prefer else {}
    return found


def _sources(given: Data) -> list[Source]:
    return [item if isinstance(item, Source) else Source(str(item), (item,)) for item in given]


def load[T](
    given: Data,
    make: Callable[[Row], list[T]],
    bad_rows: BadRows = "error",
    into: Sink[T] | None = None,
    cleaner: Cleaner | None = None,
) -> Loaded[T]:
    """``make`` of each row, into ``into`` where it is given. Raises one error that lists every bad row, or InputError
    if no row is left."""
    held: list[T] = []
    loaded: Loaded[T] = Loaded(held)
    samples: Sink[T] = held if into is None else into
    errors: list[RowError] = []
    seen: set[bytes] = set()
    sources = _sources(given)
    for source in sources:
        before, taken = len(samples), 0
        for row in islice(rows.read(source.files), source.first):
            taken += 1
            try:
                if isinstance(row, BadLine):
                    raise row.error
                kept = cleaner.clean(row) if cleaner else row
                if kept is None:
                    continue
                samples.extend(make(kept))
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
            loaded.notes.append(f"{source.name}: it holds {taken} rows, fewer than the {source.first} asked for")
        loaded.counts.append((source, len(samples) - before))
    loaded.cleaned = dict(cleaner.counts) if cleaner else {}
    if not errors and not len(samples):
        what = "--clean removed every row" if loaded.cleaned else "holds no rows"
        raise InputError(what, where=", ".join(source.name for source in sources))
    if errors and (bad_rows == "error" or not len(samples)):
        hint = "mend them, or --bad-rows skip sets them aside in rejected.jsonl" if len(samples) else "mend them"
        count = f"{len(errors)}" if len(samples) else "none"
        verb = "cannot" if len(samples) else "can"
        raise many(errors, what=f"{count} of {loaded.rows + len(errors)} rows {verb} be used:", hint=hint)
    return loaded
