"""Files of rows, each row with the place it came from.

JSON is read strictly: what parsers silently change (a repeated key, NaN) or cannot write again (half of a surrogate
pair) is a bad line, not a surprise later.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from blake3 import blake3

from mst_core import files
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


@dataclass(frozen=True)
class BadLine:
    """A line that is no row: its text as far as it can be shown, and why."""

    file: str
    line: int
    text: str
    error: RowError


def check_files(paths: Sequence[Path]) -> None:
    """Refuse files that are missing, of another kind or given twice, all in their order. For plans; reads a byte each.

    Raises InputError.
    """
    if not paths:
        raise InputError("no file of rows was given")
    seen: dict[Path, Path] = {}
    for path in paths:
        if not path.is_file():
            raise InputError("no such file" if not path.exists() else "is not a file", where=path)
        if path.suffix not in (".jsonl", ".ndjson"):
            with path.open("rb") as file:
                array = file.read(64).lstrip()[:1] == b"["
            raise InputError(
                f"rows come as .jsonl, one JSON object a line, not {path.suffix or 'without a suffix'}",
                where=path,
                hint=f"jq -c '.[]' {path} > {path.stem}.jsonl" if array else None,
            )
        if (same := seen.setdefault(path.resolve(), path)) is not path:
            raise InputError(f"was given twice (also as {same})", where=path)


def read(paths: Sequence[Path]) -> Iterator[Row | BadLine]:
    """The rows of JSONL files in order, or the error of a line that is none. Blank lines are not rows.

    Raises InputError for a file that is missing or of another kind.
    """
    check_files(paths)
    for path in paths:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if number == 1:
                    line = line.removeprefix(b"\xef\xbb\xbf")
                if line.strip():
                    yield _row(path, number, line)


def digest(paths: Sequence[Path]) -> str:
    """``blake3:`` and the hash over the files' contents in their order: the id of the data for lineage."""
    total = blake3()
    for path in paths:
        total.update(bytes.fromhex(files.hash_file(path)[1]))
    return "blake3:" + total.hexdigest()


def _row(path: Path, number: int, line: bytes) -> Row | BadLine:
    try:
        text = line.decode("utf-8")
        data = json.loads(text, object_pairs_hook=_once, parse_constant=_no_constant)
        json.dumps(data, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as error:
        reason = f"is not UTF-8 (byte {error.start + 1})"
    except UnicodeEncodeError:
        reason = "holds half of a surrogate pair (\\ud800 to \\udfff), which is no character"
    except RecursionError:
        reason = "is nested too deeply"
    except json.JSONDecodeError as error:
        reason = f"is not JSON: {error.msg} (column {error.colno})"
    except ValueError as error:
        reason = f"is not JSON: {error}"
    else:
        if isinstance(data, dict):
            return Row(str(path), number, data)
        reason = f"is {kind(data)}, not an object"
    shown = line.decode("utf-8", errors="replace").rstrip("\r\n")
    return BadLine(str(path), number, shown, RowError(reason, where=f"{path}:{number}"))


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
