"""Files of rows, each row with the place it came from."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mst_core.errors import InputError, RowError


@dataclass(frozen=True)
class Row:
    """One row: its fields, and its file and line (from 1)."""

    file: str
    line: int
    data: dict[str, Any]

    @property
    def where(self) -> str:
        """``file:line`` for an error."""
        return f"{self.file}:{self.line}"


def read(paths: Sequence[Path]) -> Iterator[Row | RowError]:
    """The rows of JSONL files in order, or the error of a line that is none. Blank lines are not rows.

    Raises InputError for a file that is missing or of another kind.
    """
    for path in paths:
        if not path.is_file():
            raise InputError("no such file" if not path.exists() else "is not a file", where=path)
        if path.suffix not in (".jsonl", ".ndjson"):
            raise InputError(f"rows come as .jsonl, not {path.suffix or 'without a suffix'}", where=path)
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _row(path, number, line)


def _row(path: Path, number: int, line: bytes) -> Row | RowError:
    where = f"{path.name}:{number}"
    try:
        data = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        return RowError("is not UTF-8", where=where)
    except (ValueError, RecursionError) as error:
        return RowError(f"is not JSON: {error}", where=where)
    if not isinstance(data, dict):
        return RowError(f"is a {type(data).__name__}, not an object", where=where)
    return Row(path.name, number, data)
