"""Files written from a recipe: literal bytes and arrays whose elements are moved from other files, by a few workers.

One stream of jobs, in the order of the output, feeds all workers: each reads (and converts) up to 1 MB, writes it at
its place, and waits for its file's turn to hash it, so that the digest and the zip crc are of the bytes in order,
however many workers there are. MEGATRON.md, "How fast a conversion can be", says why pages are dropped early.

``JOURNAL`` in the staging directory notes every finished array with the digest of its file up to there. A later run
that resumes reads what is there instead of the source, and goes on where the digest still agrees.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blake3 import blake3
from zlib_ng import zlib_ng

from mst_convert import reading
from mst_convert.reading import Fill, Sources
from mst_convert.recipe import OutFile, Recipe
from mst_core import archive
from mst_core.archive import Late
from mst_core.blocks import Array, Move
from mst_core.errors import InputError

if TYPE_CHECKING:
    from mst_core.checkpoint import Staging

DROP = 1 << 25
"""Written pages are handed to the disk, and forgotten, this many bytes at a time."""
JOURNAL = "journal.jsonl"
PART_JOURNAL = "journal-{}-of-{}.jsonl"
MARK = ""
"""Stands in the journal where a file's name would: what is being written."""


@dataclass
class _Job:
    """One piece of a file: ``fill`` makes its ``nbytes``, or they are ``small``, made when all before is known."""

    file: _Out
    index: int
    offset: int
    nbytes: int
    fill: Fill | None = None
    small: Sequence[bytes | Late] = ()
    array: bool = False
    ends: Array | None = None
    """The array that ends here."""
    closes: bool = False


@dataclass
class _Out:
    """A file being written, hashed in order."""

    name: str
    path: Path
    done: tuple[int, str] | None = None
    """The end and digest up to which an earlier run wrote it."""
    handle: int = -1
    turn: int = 0
    digest: Any = field(default_factory=blake3)
    crc: int = 0
    crcs: list[int] = field(default_factory=list)
    dropped: int = 0
    change: threading.Condition = field(default_factory=threading.Condition)

    def make(self, part: bytes | Late) -> bytes:
        """What stands between two arrays, their crc included."""
        if isinstance(part, bytes):
            return part
        made = part.make(self.crcs)
        if part.closes:
            self.crcs.clear()
        return made


class Copying:
    """One run of a recipe."""

    def __init__(
        self,
        recipe: Recipe,
        staging: Staging,
        workers: int,
        advance: Callable[[int], None],
        mark: str,
        journals: Sequence[str] = (JOURNAL,),
        resume: bool = False,
    ) -> None:
        """``mark`` is the same for runs that write the same bytes: only such a run is resumed.

        The first of ``journals`` is written; what all of them note as finished need not be written.
        """
        self._recipe = recipe
        self._staging = staging
        self._advance = advance
        self._workers = workers
        self._sources = Sources()
        self._pull = threading.Lock()
        self.moved = 0
        """Elements that came from a source."""
        self.used: set[str] = set()
        """The source arrays, by name."""
        self._failed = False
        self._files: list[_Out] = []
        self._known: dict[str, dict[str, Any]] = {}
        for journal in journals if resume else ():
            known = read_journal(staging.path / journal)
            if known.pop(MARK, {"blake3": mark})["blake3"] != mark:
                raise InputError(
                    "is another conversion, cut short: the model or the settings differ",
                    where=staging.path,
                    hint="start again without --resume, or remove it",
                )
            self._known |= known
        self._journal = os.open(
            staging.path / journals[0], os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666
        )
        try:
            fcntl.flock(self._journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError("another process is writing this part", where=staging.out) from None
        os.write(self._journal, _line(MARK, 0, mark))
        self._jobs = self._all_jobs()

    def run(self) -> None:
        """Write every file. The first error of any worker is raised when all have stopped."""
        with ThreadPoolExecutor(self._workers) as pool:
            workers = [pool.submit(self._work) for _ in range(self._workers)]
        self._sources.close()
        os.close(self._journal)
        for out in self._files:
            if out.handle >= 0:
                os.close(out.handle)
        for worker in workers:
            worker.result()

    # --- the stream of jobs ------------------------------------------------------------------------------------

    def _all_jobs(self) -> Iterator[_Job]:
        for file in self._recipe.files:
            known = self._known.get(file.name, {})
            path = self._staging.path / file.name
            if known.get("closed"):
                if path.stat().st_size != known["end"]:
                    raise InputError("changed since the run that is resumed", where=path)
                self._staging.enter(file.name, known["end"], known["blake3"])
                for segment in file.segments():
                    if isinstance(segment, Array):
                        self._count(self._recipe.moves(segment))
                        self._advance(segment.nbytes)
                continue
            done = (known["end"], known["blake3"]) if known else None
            out = _Out(file.name, path, done)
            path.parent.mkdir(parents=True, exist_ok=True)
            out.handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (0 if done else os.O_TRUNC), 0o666)
            self._files.append(out)
            yield from self._file_jobs(file, out)

    def _file_jobs(self, file: OutFile, out: _Out) -> Iterator[_Job]:
        position = index = 0
        between: list[bytes | Late] = []
        for segment in file.segments():
            if not isinstance(segment, Array):
                between.append(segment)
                continue
            if between:
                size = sum(map(archive.size, between))
                yield _Job(out, index, position, size, small=between)
                index, position, between = index + 1, position + size, []
            end = position + segment.nbytes
            again = out.done is not None and end <= out.done[0]
            if again:
                self._count(self._recipe.moves(segment))
            for nbytes, fill in _replay(out, position, segment) if again else self._pieces(segment):
                last = position + nbytes == end
                ends = segment if last else None
                yield _Job(out, index, position, nbytes, fill=fill, array=True, ends=ends)
                index, position = index + 1, position + nbytes
        yield _Job(out, index, position, sum(map(archive.size, between)), small=between, closes=True)

    def _pieces(self, array: Array) -> Iterator[tuple[int, Fill]]:
        found = self._recipe.moves(array)
        self._count(found)
        return reading.pieces(array, found, self._sources)

    def _count(self, found: Iterable[Move]) -> None:
        for move in found:
            self.moved += move.rows * move.columns
            self.used.add(move.source.name)

    # --- the workers ---------------------------------------------------------------------------------------------

    def _work(self) -> None:
        buffer = bytearray(reading.PIECE)
        finished = False
        try:
            while not self._failed:
                with self._pull:
                    job = next(self._jobs, None)
                if job is None:
                    break
                if job.nbytes > len(buffer):
                    buffer = bytearray(job.nbytes)
                view = memoryview(buffer)[: job.nbytes]
                if job.fill is not None:
                    job.fill(view)
                    self._put(job, view)
                self._finish(job, view)
            finished = True
        finally:
            # One failure stops all: the others may be waiting for this worker's turn to pass.
            self._failed = self._failed or not finished
            for out in self._files if self._failed else ():
                with out.change:
                    out.change.notify_all()

    def _finish(self, job: _Job, view: memoryview) -> None:
        """In the file's order: hash, make what waited for the hashes, note finished arrays."""
        out = job.file
        with out.change:
            while out.turn != job.index:
                if self._failed:
                    return
                out.change.wait()
            if job.fill is None:
                view[:] = b"".join(out.make(part) for part in job.small)
                self._put(job, view)
            out.digest.update(view)
            if job.array:
                out.crc = zlib_ng.crc32(view, out.crc)
            end = job.offset + job.nbytes
            if job.ends is not None:
                if not job.ends.goes_on:
                    out.crcs.append(out.crc)
                    out.crc = 0
                self._note(out, end)
            if end - out.dropped >= DROP or job.closes:
                os.posix_fadvise(out.handle, out.dropped, end - out.dropped, os.POSIX_FADV_DONTNEED)
                out.dropped = end
            if job.closes:
                self._close(out, end)
            out.turn += 1
            out.change.notify_all()
        if job.array:
            self._advance(job.nbytes)

    def _put(self, job: _Job, view: memoryview) -> None:
        if job.file.done is not None and job.offset + job.nbytes <= job.file.done[0]:
            return
        for start in range(0, len(view), reading.PIECE):
            block, at = view[start : start + reading.PIECE], job.offset + start
            while block:
                count = os.pwrite(job.file.handle, block, at)
                block, at = block[count:], at + count

    def _note(self, out: _Out, end: int) -> None:
        if out.done is not None and end <= out.done[0]:
            if end == out.done[0] and out.digest.hexdigest() != out.done[1]:
                raise InputError(
                    "changed since the run that is resumed", where=out.path, hint="start again without --resume"
                )
            return
        os.write(self._journal, _line(out.name, end, out.digest.hexdigest()))

    def _close(self, out: _Out, end: int) -> None:
        os.ftruncate(out.handle, end)
        os.fsync(out.handle)
        os.close(out.handle)
        out.handle = -1
        digest = out.digest.hexdigest()
        self._staging.enter(out.name, end, digest)
        os.write(self._journal, _line(out.name, end, digest, closed=True))


def _line(name: str, end: int, digest: str, *, closed: bool = False) -> bytes:
    return (json.dumps({"file": name, "end": end, "blake3": digest, "closed": closed}) + "\n").encode()


def read_journal(path: Path) -> dict[str, dict[str, Any]]:
    """The last line of each file. A torn last line (the run was killed while writing it) is left out."""
    found: dict[str, dict[str, Any]] = {}
    if not path.is_file():
        return found
    for line in path.read_bytes().split(b"\n"):
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and {"file", "end", "blake3"} <= entry.keys():
            found[str(entry["file"])] = entry
    return found


def _replay(out: _Out, position: int, array: Array) -> Iterator[tuple[int, Fill]]:
    """An array that an earlier run wrote: its bytes are read back."""
    for start in range(0, array.nbytes, reading.PIECE):
        nbytes = min(reading.PIECE, array.nbytes - start)

        def fill(into: memoryview, at: int = position + start) -> None:
            if os.preadv(out.handle, [into], at) != len(into):
                raise InputError("is shorter than its journal says", where=out.path)

        yield nbytes, fill
