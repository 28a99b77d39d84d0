"""Files written from a recipe: literal bytes and arrays whose elements are moved from other files, by a few workers.

One stream of pieces, stretches of 1 MB of the output in order, feeds all workers. Each fills its piece, waits for its
file's turn to hash it, so that the digest and the zip crc are of the bytes in order however many workers there are, and
writes it while the next one is hashed.

``JOURNAL`` in the staging directory notes, every 32 MB, up to where a file is written, and its digest up to there. A
later run that resumes reads what is there instead of the source, and goes on where the digest still agrees.
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
from typing import TYPE_CHECKING, Any, NamedTuple

from blake3 import blake3
from zlib_ng import zlib_ng

from mst_convert import reading
from mst_convert.disk import DiskFile
from mst_convert.reading import Fill, Sources
from mst_convert.recipe import OutFile, Recipe
from mst_core import archive
from mst_core.archive import Late
from mst_core.blocks import Array, Move
from mst_core.errors import InputError

if TYPE_CHECKING:
    from mst_core.checkpoint import Staging

NOTED = 1 << 25
"""Bytes between two lines of the journal."""
JOURNAL = "journal.jsonl"
PART_JOURNAL = "journal-{}-of-{}.jsonl"
MARK = ""
"""Stands in the journal where a file's name would: what is being written."""


class _Part(NamedTuple):
    """Bytes ``first`` to ``first + nbytes`` of a segment. ``ends``: the last ones of its entry."""

    first: int
    nbytes: int
    segment: bytes | Late | Fill
    ends: bool


@dataclass
class _Piece:
    """A stretch of a file, and what it is made of."""

    file: _Out
    index: int
    offset: int
    parts: list[_Part] = field(default_factory=list)
    nbytes: int = 0
    closes: bool = False

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


@dataclass
class _Out:
    """A file being written, hashed in order."""

    name: str
    disk: DiskFile
    done: tuple[int, str] | None = None
    """The end and digest up to which an earlier run wrote it."""
    turn: int = 0
    digest: Any = field(default_factory=blake3)
    crc: int = 0
    crcs: list[int] = field(default_factory=list)
    late: bytes = b""
    noted: int = 0
    written: int = 0
    """How many pieces are written, without a gap."""
    waiting: dict[int, tuple[_Piece, str]] = field(default_factory=dict)
    """Pieces that are written before one in front of them, and the digest up to there, where it will be noted."""
    change: threading.Condition = field(default_factory=threading.Condition)

    def hash(self, piece: _Piece, view: memoryview) -> str:
        """Make what depends on what is before it, and hash the piece. The digest, where it will be noted."""
        at = 0
        for part in piece.parts:
            part_view = view[at : at + part.nbytes]
            at += part.nbytes
            if isinstance(part.segment, Late):
                part_view[:] = self._made(part, part.segment)
            elif not isinstance(part.segment, bytes):
                self.crc = zlib_ng.crc32(part_view, self.crc)
                if part.ends:
                    self.crcs.append(self.crc)
                    self.crc = 0
        self.digest.update(view)
        again = self.done is not None and piece.end == self.done[0]
        if not again and not piece.closes and piece.end - self.noted < NOTED:
            return ""
        self.noted = piece.end
        found = str(self.digest.hexdigest())
        if self.done is not None and again and found != self.done[1]:
            raise InputError(
                "changed since the run that is resumed", where=self.disk.path, hint="start again without --resume"
            )
        return found

    def _made(self, part: _Part, segment: Late) -> bytes:
        self.late = self.late or segment.make(self.crcs)
        found = self.late[part.first : part.first + part.nbytes]
        if part.ends:
            self.late = b""
            if segment.closes:
                self.crcs.clear()
        return found


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
        self._stream = self._all_pieces()

    def run(self) -> None:
        """Write every file. The first error of any worker is raised when all have stopped."""
        with ThreadPoolExecutor(self._workers) as pool:
            workers = [pool.submit(self._work) for _ in range(self._workers)]
        self._sources.close()
        os.close(self._journal)
        for out in self._files:
            out.disk.close(None)
        for worker in workers:
            worker.result()

    # --- the stream of pieces ----------------------------------------------------------------------------------

    def _all_pieces(self) -> Iterator[_Piece]:
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
            out = _Out(file.name, DiskFile(path, keep=done is not None), done)
            self._files.append(out)
            yield from self._pieces(file, out)

    def _pieces(self, file: OutFile, out: _Out) -> Iterator[_Piece]:
        piece = _Piece(out, 0, 0)
        room = _room(out, 0)
        for segment in file.segments():
            content, nbytes = self._content(segment), archive.size(segment)
            goes_on = isinstance(segment, Array) and segment.goes_on
            first = 0
            while True:
                took = min(room, nbytes - first)
                piece.parts.append(_Part(first, took, content, first + took == nbytes and not goes_on))
                piece.nbytes += took
                first, room = first + took, room - took
                if not room:
                    yield piece
                    piece = _Piece(out, piece.index + 1, piece.end)
                    room = _room(out, piece.offset)
                if first == nbytes:
                    break
        piece.closes = True
        yield piece

    def _content(self, segment: archive.Segment) -> bytes | Late | Fill:
        if not isinstance(segment, Array):
            return segment
        found = self._recipe.moves(segment)
        self._count(found)
        return reading.filling(segment, found, self._sources)

    def _count(self, found: Iterable[Move]) -> None:
        for move in found:
            self.moved += move.rows * move.columns
            self.used.add(move.source.name)

    # --- the workers ---------------------------------------------------------------------------------------------

    def _work(self) -> None:
        room = memoryview(bytearray(reading.PIECE))
        finished = False
        try:
            while not self._failed:
                with self._pull:
                    piece = next(self._stream, None)
                if piece is None:
                    break
                self._make(piece, room)
            finished = True
        finally:
            # One failure stops all: the others may be waiting for this worker's turn to pass.
            self._failed = self._failed or not finished
            for out in self._files if self._failed else ():
                with out.change:
                    out.change.notify_all()

    def _make(self, piece: _Piece, room: memoryview) -> None:
        """Fill, hash in the file's order, write, and note what is written without a gap."""
        out, view = piece.file, room[: piece.nbytes]
        again = out.done is not None and piece.end <= out.done[0]
        if again:
            if out.disk.read(piece.offset, view) != piece.nbytes:
                raise InputError("is shorter than its journal says", where=out.disk.path)
        else:
            _fill(piece, view)
        with out.change:
            while out.turn != piece.index:
                if self._failed:
                    return
                out.change.wait()
            digest = out.hash(piece, view)
            out.turn += 1
            out.change.notify_all()
        if not again:
            out.disk.write(piece.offset, view)
        with out.change:
            out.waiting[piece.index] = piece, digest
            while out.written in out.waiting:
                self._note(out, *out.waiting.pop(out.written))
                out.written += 1
        self._advance(sum(part.nbytes for part in piece.parts if callable(part.segment)))

    def _note(self, out: _Out, piece: _Piece, digest: str) -> None:
        if piece.closes:
            out.disk.close(piece.end)
            self._staging.enter(out.name, piece.end, digest)
        else:
            out.disk.written(piece.end)
        if digest:
            os.write(self._journal, _line(out.name, piece.end, digest, closed=piece.closes))


def _room(out: _Out, offset: int) -> int:
    """Bytes of the piece that begins there: pieces end where the file of an earlier run does, too."""
    if out.done is not None and offset < out.done[0]:
        return min(reading.PIECE, out.done[0] - offset)
    return reading.PIECE - offset % reading.PIECE


def _fill(piece: _Piece, view: memoryview) -> None:
    """All but what depends on the bytes before it."""
    at = 0
    for first, nbytes, segment, _ in piece.parts:
        if isinstance(segment, bytes):
            view[at : at + nbytes] = segment[first : first + nbytes]
        elif not isinstance(segment, Late):
            segment(first, view[at : at + nbytes])
        at += nbytes


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
