"""Files of a directory that somebody else made: opened only if regular and inside of it, read only up to a limit.

A shard may be a link as the Hub's cache makes them, from ``snapshots/REVISION/`` to ``blobs/`` of the same repository.
A link to anything else outside the directory is refused: it would copy a file of this machine into a model.
"""

from __future__ import annotations

import json
import stat
from collections import Counter
from pathlib import Path
from typing import Any

from mst_core.errors import InputError

MAX_JSON = 1 << 28
"""Bytes of the largest JSON file that is read: an index of two million tensors, a tokenizer."""
MAX_DIMS = 64
"""Axes of a tensor, as in torch."""
MAX_SIZE = 1 << 63
"""No size, offset or length reaches this."""


def regular(path: Path, root: Path | None = None) -> int:
    """The bytes of a regular file inside ``root`` (its own directory). InputError: missing, a FIFO, a link out."""
    try:
        status = path.stat()
        target = path.resolve(strict=True)
        roots = _roots((root or path.parent).resolve())
    except (FileNotFoundError, NotADirectoryError) as error:
        raise InputError("is missing", where=path, hint="download or copy the whole directory again") from error
    except (OSError, ValueError, RuntimeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"cannot be opened: {why}", where=str(path)[:300]) from error
    if not stat.S_ISREG(status.st_mode):
        raise InputError("is not a regular file", where=path)
    if not any(target.is_relative_to(place) for place in roots):
        raise InputError(f"is a link out of its directory, to {target}", where=path, hint="put the file itself there")
    return status.st_size


def _roots(root: Path) -> list[Path]:
    """A directory and, if it lies in a Hub's cache, the cache of its repository."""
    caches = [place.parent for place in (root, *root.parents) if place.name == "snapshots"]
    return [root, *(cache for cache in caches if (cache / "blobs").is_dir())]


def read_bytes(path: Path, most: int, root: Path | None = None) -> bytes:
    """The content of a regular file of at most ``most`` bytes."""
    size = regular(path, root)
    if size > most:
        raise InputError(f"has {size} bytes, at most {most} can be right", where=path)
    with path.open("rb") as file:
        return file.read(size)


def parse_json(data: bytes, where: Path, what: str = "cannot be read as JSON") -> dict[str, Any]:
    """A JSON object. InputError: no JSON, no object, nested too deep, or a key that is there twice."""
    try:
        value = json.loads(data, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{what}: {error}", where=where) from error
    if not isinstance(value, dict):
        raise InputError(f"{what}: it is no JSON object", where=where)
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # Readers differ in which of two equal keys they take, so a file with two has two meanings.
    made = dict(pairs)
    if len(made) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        raise ValueError(f"{counts.most_common(1)[0][0][:100]!r} is there twice")
    return made


def sizes(value: Any) -> tuple[int, ...] | None:
    """A list or tuple of sizes or offsets, if it is one (true is no size, and nor is 2**63)."""
    if not isinstance(value, (list, tuple)) or len(value) > MAX_DIMS:
        return None
    return tuple(value) if all(type(n) is int and 0 <= n < MAX_SIZE for n in value) else None
