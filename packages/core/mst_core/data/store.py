"""Tokenised rows on disk, kept by what they were made from, and read through the page cache: never whole in memory.

    CACHE/rows/KEY/tokens.bin    int32, all samples one after another
                   mask.bin      uint8, likewise
                   ends.bin      int64, where each sample ends
                   judged.bin    uint8, of each sample 1: a bad answer, 2: a good one, 0: not judged on its own
                   margins.bin   float64, of each sample its margin, or NaN
                   removed.jsonl what cleaning took out
                   about.json    counts, and rows set aside

KEY is a hash over the contents of the files, the tokenizer's files (chat template included), the settings that change a
token, and the code that reads, renders and tokenises: another version of any of them is another key.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import shutil
import sys
import tempfile
from array import array
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self, overload

from blake3 import blake3

from mst_core import files
from mst_core.data.render import Sample, tokenizer_dir
from mst_core.data.sources import Source
from mst_core.errors import InputError

TOKENS, MASK, ENDS, JUDGED, MARGINS = "tokens.bin", "mask.bin", "ends.bin", "judged.bin", "margins.bin"
ALL = (TOKENS, MASK, ENDS, JUDGED, MARGINS)
REMOVED, ABOUT = "removed.jsonl", "about.json"


def place(cache: Path, model_dir: Path, sources: Sequence[Source], settings: Mapping[str, Any]) -> Path:
    """The directory of the rows of ``sources``, tokenised with the model's tokenizer under ``settings``."""
    tokenizer = tokenizer_dir(model_dir)
    held = [tokenizer / name for name in files.TOKENIZER_FILES if (tokenizer / name).is_file()]
    code = sorted(Path(__file__).parent.glob("*.py"))
    made_from = {
        "rows": [[source.first, _hashes(source.files)] for source in sources],
        "tokenizer": [[path.name, files.hash_file(path)[1]] for path in held],
        "settings": dict(settings),
        "code": [files.hash_file(path)[1] for path in code],
        "versions": [version(name) for name in ("transformers", "tokenizers")],
        "bytes": sys.byteorder,
    }
    key = blake3(json.dumps(made_from, sort_keys=True).encode()).hexdigest()[:32]
    return cache.expanduser() / "rows" / key


def _hashes(paths: Sequence[Path]) -> list[str]:
    known = {folder: files.HashCache(folder) for folder in {path.parent for path in paths}}
    found = [known[path.parent].hash(path)[1] for path in paths]
    for cache in known.values():
        cache.save()
    return found


class Stored(Sequence[Sample]):
    """The samples of a directory, each made when it is asked for. Pickled as its path."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._maps = {name: _map(directory / name) for name in ALL}
        self._tokens, self._mask, self._ends, self._margins = (
            self._maps[TOKENS].cast("i"),
            self._maps[MASK],
            self._maps[ENDS].cast("q"),
            self._maps[MARGINS].cast("d"),
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return (Stored, (self.directory,))

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> Sample: ...

    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...

    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        start, end = self._ends[index - 1] if index else 0, self._ends[index]
        desirable = (None, False, True)[self._maps[JUDGED][index]]
        margin = None if math.isnan(self._margins[index]) else self._margins[index]
        return Sample(self._tokens[start:end].tolist(), list(self._mask[start:end]), desirable=desirable, margin=margin)

    def lengths(self) -> array[int]:
        """The tokens of each sample."""
        found, before = array("i"), 0
        for end in self._ends:
            found.append(end - before)
            before = end
        return found


class Pairs(Sequence[tuple[Sample, Sample]]):
    """Samples two by two."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples) // 2

    @overload
    def __getitem__(self, index: int) -> tuple[Sample, Sample]: ...

    @overload
    def __getitem__(self, index: slice) -> list[tuple[Sample, Sample]]: ...

    def __getitem__(self, index: int | slice) -> tuple[Sample, Sample] | list[tuple[Sample, Sample]]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        return self.samples[2 * index], self.samples[2 * index + 1]


class Writer:
    """Writes a directory that appears whole or not at all. ``extend`` and ``len`` as of a list of samples."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.count = self.tokens = 0
        try:
            directory.parent.mkdir(parents=True, exist_ok=True)
            self._staging = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
            self._files = {name: (self._staging / name).open("wb") for name in (*ALL, REMOVED)}
        except OSError as error:
            what = f"the cache cannot be written: {error.strerror}"
            raise InputError(what, where=directory.parent, hint="--cache names another directory") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()
        shutil.rmtree(self._staging, ignore_errors=True)

    def __len__(self) -> int:
        return self.count

    def extend(self, samples: Iterable[Sample]) -> None:
        """Add samples."""
        for sample in samples:
            self.count += 1
            self.tokens += len(sample.tokens)
            self._files[TOKENS].write(array("i", sample.tokens).tobytes())
            self._files[MASK].write(bytes(sample.mask))
            self._files[ENDS].write(array("q", [self.tokens]).tobytes())
            self._files[JUDGED].write(bytes([0 if sample.desirable is None else 1 + sample.desirable]))
            self._files[MARGINS].write(array("d", [math.nan if sample.margin is None else sample.margin]).tobytes())

    def remove(self, entry: Mapping[str, Any]) -> None:
        """Keep what cleaning took out."""
        self._files[REMOVED].write(json.dumps(entry, ensure_ascii=False).encode() + b"\n")

    def commit(self, about: Mapping[str, Any]) -> None:
        """Make the directory appear. One that another process made meanwhile is as good."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        about = {**about, "samples": self.count, "tokens": self.tokens}
        (self._staging / ABOUT).write_text(json.dumps(about), encoding="utf-8")
        if about_of(self.directory) is None:
            shutil.rmtree(self.directory, ignore_errors=True)
            try:
                self._staging.rename(self.directory)
            except OSError:
                if about_of(self.directory) is None:
                    raise


def about_of(directory: Path) -> dict[str, Any] | None:
    """What ``commit`` was given; None where no whole directory is."""
    try:
        about: dict[str, Any] = json.loads((directory / ABOUT).read_text(encoding="utf-8"))
        sizes = [(directory / name).stat().st_size for name in ALL]
        tokens, samples = about["tokens"], about["samples"]
        return about if sizes == [4 * tokens, tokens, 8 * samples, samples, 8 * samples] else None
    except (OSError, ValueError, KeyError):
        return None


def _map(path: Path) -> memoryview:
    with path.open("rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if path.stat().st_size else b"")
