"""A row and its place, and JSON read strictly.

What parsers silently change (a repeated key, NaN) or cannot write again (half of a surrogate pair) is a bad row, not a
surprise later.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from mst_core.errors import RowError


@dataclass(frozen=True)
class Row:
    """One row: its fields, its file, and its line or number (from 1)."""

    file: str
    line: int
    data: dict[str, Any]

    @property
    def where(self) -> str:
        """The place, for an error."""
        return place(self.file, self.line)


@dataclass(frozen=True)
class BadLine:
    """A place where no row is: its text as far as it can be shown, and why."""

    file: str
    line: int
    text: str
    error: RowError


def place(file: str | Path, number: int) -> str:
    """``file:line``; a number in an array or a table, which have no lines; a text file is one row."""
    suffix = Path(file).suffix.lower()
    if suffix == ".txt":
        return str(file)
    return f"{file}: row {number}" if suffix in (".json", ".parquet") else f"{file}:{number}"


def bad(file: Path, number: int, shown: str, reason: str) -> BadLine:
    """A BadLine with its error."""
    return BadLine(str(file), number, shown, RowError(reason, where=place(file, number)))


def parse(text: str) -> Any:
    """A JSON value. Raises ValueError with the reason."""
    try:
        data = json.loads(text, object_pairs_hook=_once, parse_constant=_no_constant)
        json.dumps(data, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("holds half of a surrogate pair (\\ud800 to \\udfff), which is no character") from None
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON: {error.msg} (column {error.colno})") from None
    except ValueError as error:
        raise ValueError(f"is not JSON: {error}") from None
    return data


def row(file: Path, number: int, text: str) -> Row | BadLine:
    """A row from its JSON text, or why it is none."""
    try:
        data = parse(text)
    except ValueError as error:
        return bad(file, number, text, str(error))
    if isinstance(data, dict):
        return Row(str(file), number, data)
    return bad(file, number, text, f"is {kind(data)}, not an object")


def kind(value: Any) -> str:
    """A JSON value's kind, for an error."""
    if value is None:
        return "null"
    names = {str: "text", bool: "true or false", dict: "an object", list: "a list", int: "a number", float: "a number"}
    return names.get(type(value), type(value).__name__)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} stands twice")
    return made


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value")
