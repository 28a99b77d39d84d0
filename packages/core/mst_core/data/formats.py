"""The formats of files of rows, each read as a stream: no file is ever whole in memory (but a .txt, which is one row).

.jsonl .ndjson   one JSON object a line; blank lines are no rows
.json            an array of objects, or, where it does not begin with [, as .jsonl
.csv             a header, then one row a record; an empty cell is an absent field, what is no text is JSON
.parquet         one row a record; columns may be nested (needs pyarrow)
.txt             one document, {"text": ...}
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mst_core.data import records
from mst_core.data.records import BadLine, Row, bad
from mst_core.errors import InputError, MissingPackage

Found = Iterator[Row | BadLine]
_BOM = b"\xef\xbb\xbf"
_CHUNK = 1 << 20
_LARGEST = 1 << 28
"""Characters of the largest item of an array; one that does not end before is taken for broken."""
AS_JSON = ("messages", "conversations", "history", "tools", "label", "margin")
"""Fields that are no text: a CSV cell holds them as JSON."""


def lines(path: Path) -> Found:
    """JSONL."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if number == 1:
                line = line.removeprefix(_BOM)
            if not line.strip():
                continue
            try:
                text = line.decode("utf-8")
            except UnicodeDecodeError as error:
                shown = line.decode("utf-8", errors="replace").rstrip("\r\n")
                yield bad(path, number, shown, f"is not UTF-8 (byte {error.start + 1})")
            else:
                yield records.row(path, number, text.rstrip("\r\n"))


def array(path: Path) -> Found:
    """A JSON array, item by item."""
    with path.open("rb") as raw:
        if raw.read(64).removeprefix(_BOM).lstrip()[:1] != b"[":
            yield from lines(path)
            return
    find_end, number = json.JSONDecoder().raw_decode, 0
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            text, at = file.read(_CHUNK).lstrip(), 1
            while True:
                text, at = _past_blanks(file, text, at)
                if number and text[at : at + 1] == ",":
                    text, at = _past_blanks(file, text, at + 1)
                elif text[at : at + 1] == "]":
                    if "".join(_past_blanks(file, text, at + 1)[0][at + 1 :].split()):
                        raise InputError("holds more than one array", where=path)
                    return
                elif number:
                    raise InputError("is not JSON: a comma or ] is missing", where=records.place(path, number))
                number += 1
                while True:
                    try:
                        end = find_end(text, at)[1]
                        break
                    except RecursionError:
                        raise InputError("is nested too deeply", where=records.place(path, number)) from None
                    except json.JSONDecodeError as error:
                        more = file.read(max(_CHUNK, len(text) - at)) if len(text) - at < _LARGEST else ""
                        if not more:
                            raise InputError(f"is not JSON: {error.msg}", where=records.place(path, number)) from None
                        text, at = text[at:] + more, 0
                yield records.row(path, number, text[at:end])
                text, at = (text[end:], 0) if end > _CHUNK else (text, end)
    except UnicodeDecodeError as error:
        raise InputError(f"is not UTF-8 ({error.reason})", where=records.place(path, number + 1)) from None


def _past_blanks(file: Any, text: str, at: int) -> tuple[str, int]:
    """Move over white space, reading on at the end of what was read."""
    while True:
        while at < len(text) and text[at] in " \t\r\n":
            at += 1
        if at < len(text) or not (more := file.read(_CHUNK)):
            return text, at
        text += more


def table(path: Path) -> Found:
    """CSV; a record's line is where it begins."""
    csv.field_size_limit(sys.maxsize)
    with path.open("rb") as file:
        reader = csv.reader(_decoded(path, file), strict=True)
        try:
            header = next(reader, None)
            if header is None:
                return
            if len(set(header)) < len(header) or not all(header):
                raise InputError("its header names a column twice, or one not at all", where=f"{path}:1")
            while True:
                number = reader.line_num + 1
                cells = next(reader, None)
                if cells is None:
                    return
                if cells:
                    yield _record(path, number, header, cells)
        except csv.Error as error:
            raise InputError(f"is not CSV: {error}", where=f"{path}:{reader.line_num}") from None


def _decoded(path: Path, file: Any) -> Iterator[str]:
    for number, line in enumerate(file, start=1):
        try:
            yield (line.removeprefix(_BOM) if number == 1 else line).decode("utf-8")
        except UnicodeDecodeError as error:
            raise InputError(f"is not UTF-8 (byte {error.start + 1})", where=f"{path}:{number}") from None


def _record(path: Path, number: int, header: list[str], cells: list[str]) -> Row | BadLine:
    if len(cells) != len(header):
        return bad(path, number, ",".join(cells), f"has {len(cells)} cells, the header has {len(header)}")
    data: dict[str, Any] = {}
    for name, cell in zip(header, cells, strict=True):
        try:
            data[name] = None if not cell else records.parse(cell) if name in AS_JSON else cell
        except ValueError as error:
            return bad(path, number, ",".join(cells), f"{name} {error}")
    return Row(str(path), number, data)


def parquet(path: Path) -> Found:
    """Parquet, a batch of records at a time."""
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise MissingPackage("parquet needs pyarrow", hint="pip install 'mst-tools-core[data]'") from error
    number = 0
    try:
        with ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=256):
                for data in batch.to_pylist():
                    number += 1
                    yield _checked(path, number, {name: _dense(value) for name, value in data.items()})
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(f"is not a Parquet file: {str(error).splitlines()[0]}", where=path) from None


def _dense(value: Any) -> Any:
    """Without the nulls of a table's nested columns: a message without tool calls has the column all the same."""
    if isinstance(value, dict):
        return {name: _dense(inner) for name, inner in value.items() if inner is not None}
    return [_dense(inner) for inner in value] if isinstance(value, list) else value


def _checked(path: Path, number: int, data: dict[str, Any]) -> Row | BadLine:
    for name, value in data.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError):
            return bad(path, number, repr(data), f"{name} holds what is no JSON value ({type(value).__name__})")
    return Row(str(path), number, data)


def document(path: Path) -> Found:
    """A text file, one row."""
    content = path.read_bytes().removeprefix(_BOM)
    try:
        yield Row(str(path), 1, {"text": content.decode("utf-8")})
    except UnicodeDecodeError as error:
        yield bad(path, 1, content.decode("utf-8", errors="replace"), f"is not UTF-8 (byte {error.start + 1})")


READERS: dict[str, Callable[[Path], Found]] = {
    ".jsonl": lines,
    ".ndjson": lines,
    ".json": array,
    ".csv": table,
    ".parquet": parquet,
    ".txt": document,
}
"""Every suffix that is read."""
