"""Files of rows, each row with the place it came from. Formats: formats.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from blake3 import blake3

from mst_core import files
from mst_core.data.formats import READERS
from mst_core.data.records import BadLine, Row
from mst_core.errors import InputError


def check_files(paths: Sequence[Path]) -> None:
    """Refuse files that are missing, of another kind or given twice, all in their order. For plans; reads nothing.

    Raises InputError.
    """
    if not paths:
        raise InputError("no file of rows was given")
    seen: dict[Path, Path] = {}
    for path in paths:
        if not path.is_file():
            raise InputError("no such file" if not path.exists() else "is not a file", where=path)
        if path.suffix.lower() not in READERS:
            what = f"rows come as {', '.join(READERS)}, not {path.suffix or 'without a suffix'}"
            raise InputError(what, where=path)
        if (same := seen.setdefault(path.resolve(), path)) is not path:
            raise InputError(f"was given twice (also as {same})", where=path)


def read(paths: Sequence[Path]) -> Iterator[Row | BadLine]:
    """The rows of files in order, or the error of a place that holds none.

    Raises InputError for a file that is missing, of another kind, or broken where no next row can be found.
    """
    check_files(paths)
    for path in paths:
        yield from READERS[path.suffix.lower()](path)


def count(paths: Sequence[Path]) -> int | None:
    """How many rows the files hold; None where that takes a library (Parquet). For plans."""
    total = 0
    for path in paths:
        suffix = path.suffix.lower()
        if suffix == ".parquet":
            return None
        if suffix in (".jsonl", ".ndjson"):
            with path.open("rb") as file:
                total += sum(1 for line in file if line.strip())
        else:
            total += 1 if suffix == ".txt" else sum(1 for _ in READERS[suffix](path))
    return total


def digest(paths: Sequence[Path]) -> str:
    """``blake3:`` and the hash over the files' contents in their order: the id of the data for lineage."""
    total = blake3()
    for path in paths:
        total.update(bytes.fromhex(files.hash_file(path)[1]))
    return "blake3:" + total.hexdigest()
