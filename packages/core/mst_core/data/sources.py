"""What --data names: files, directories, globs and data sets of the Hub, with shares and limits.

rows.jsonl              a file; its suffix says the format (formats.py)
rows/                   every file of rows below a directory, in the order of their names
'rows/**/train-*.csv'   a glob
hf://org/name           a data set of the Hub; hf://org/name@revision/folder/train-*.parquet is a part of it
ms://org/name           one of ModelScope, likewise
NAME#1000               its first 1000 rows
NAME:0.7                a share of the rows of an epoch; given to all sources or to none
"""

from __future__ import annotations

import glob
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mst_core import hub
from mst_core.data import rows
from mst_core.data.formats import READERS
from mst_core.errors import InputError, SettingsError


@dataclass(frozen=True)
class Source:
    """One name of --data."""

    name: str
    files: tuple[Path, ...]
    first: int | None = None
    weight: float | None = None
    left: tuple[str, ...] = ()
    """Files of a directory that are of no known format."""


def resolve(names: Sequence[str | Path]) -> list[Source]:
    """The sources in order. Data sets of the Hub are downloaded.

    Raises InputError for what is not there, of another kind or given twice, SettingsError for a share without others.
    """
    found = [_source(str(name)) for name in names]
    rows.check_files(paths(found))
    if len({source.weight is None for source in found}) > 1:
        bare = next(source.name for source in found if source.weight is None)
        raise SettingsError(f"--data: {bare} has no share, others have: give every source one (NAME:0.3), or none")
    return found


def paths(sources: Sequence[Source]) -> list[Path]:
    """Every file, in order."""
    return [path for source in sources for path in source.files]


def taken(sources: Sequence[Source]) -> dict[str, Any]:
    """How much of each source is taken, which the hashes of its files do not tell: for the settings of a manifest."""
    if not any(source.first or source.weight for source in sources):
        return {}
    return {"data": [{"first": source.first, "share": source.weight} for source in sources]}


def _source(given: str) -> Source:
    name, first, weight = given, None, None
    # A file may be called a:2 or a#2: what is there as it is written is meant as it is written.
    while not Path(name).expanduser().exists():
        if match := re.fullmatch(r"(.+)#(\d+)", name):
            if first is not None or not int(match[2]):
                raise SettingsError(f"--data: {given}: #N is one number from 1")
            name, first = match[1], int(match[2])
        elif match := re.fullmatch(r"(.+):(\d+(?:\.\d*)?|\.\d+)", name):
            if weight is not None or not float(match[2]):
                raise SettingsError(f"--data: {given}: a share is one number above 0")
            name, weight = match[1], float(match[2])
        else:
            break
    files, left = _files(name)
    return Source(name, tuple(files), first, weight, tuple(left))


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _files(name: str) -> tuple[list[Path], list[str]]:
    if name.startswith(("hf://", "ms://")):
        return hub.dataset(name, tuple(READERS)), []
    path = Path(name).expanduser()
    if path.is_dir():
        below = {found: _is_hidden(found.relative_to(path)) for found in sorted(path.rglob("*")) if found.is_file()}
        readable = [found for found in below if found.suffix.lower() in READERS]
        files = [found for found in readable if not below[found]]
        if not files:
            raise InputError(f"holds no file of rows ({', '.join(READERS)})", where=path)
        # What the Hub's client keeps in .cache is no news; rows that are hidden are.
        return files, [str(found) for found in below if found not in files and (found in readable or not below[found])]
    if not path.exists() and glob.has_magic(name):
        matched = sorted(Path(found) for found in glob.glob(str(path), recursive=True))
        if not matched:
            raise InputError("matches no file", where=name)
        return [found for found in matched if found.is_file()], [str(found) for found in matched if found.is_dir()]
    return [path], []
