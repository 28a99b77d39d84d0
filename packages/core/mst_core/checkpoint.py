"""A directory that appears whole or not at all.

Everything is written in ``OUT.partial/``, hashed while it is written and fsynced; the manifest comes last; then the
directory is renamed. A flock on ``OUT.partial/`` itself keeps a second process out and ends with the process, so a
killed run leaves only a directory without a manifest, which no tool accepts and the next run clears.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from blake3 import blake3

from mst_core import console, files, manifest
from mst_core.errors import InputError
from mst_core.files import TOKENIZER_FILES as TOKENIZER_FILES
from mst_core.manifest import FileEntry, Manifest, Parent
from mst_core.version import VERSION

LINEAGE = "lineage"
_WRITE = 1 << 19
"""Bytes per write(2): larger writes cost several times the system time on ext4 now and then."""
_NOREPLACE, _EXCHANGE = 1, 2
"""Flags of renameat2(2)."""


class HashingFile:
    """A file that is hashed while it is written, and fsynced when it is closed. Append only."""

    def __init__(self, path: Path) -> None:
        self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._digest = blake3()
        self._count = 0

    def write(self, data: Any) -> int:
        """Write any bytes-like object whole."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), _WRITE):
            block = view[start : start + _WRITE]
            self._digest.update(block)
            while block:
                block = block[os.write(self._handle, block) :]
        self._count += len(view)
        return len(view)

    def tell(self) -> int:
        """Bytes written so far."""
        return self._count

    def flush(self) -> None:
        """Nothing is buffered here; libraries call it."""

    def close(self) -> tuple[int, str]:
        """Fsync and close: (bytes, blake3 hex)."""
        os.fsync(self._handle)
        os.close(self._handle)
        return self._count, self._digest.hexdigest()

    def abandon(self) -> None:
        """Close without making anything durable, after a failure."""
        os.close(self._handle)


class Staging:
    """A directory in the making, ``path``. Made by ``stage``; ``commit`` makes it appear under its name."""

    def __init__(self, out: Path, overwrite: bool) -> None:
        self.out = out
        self.path = partial(out)
        self.committed = False
        self.kept = False
        """Whether to leave it where it is, after a failure, for a run that goes on."""
        self.lock = -1
        """The locked directory's descriptor."""
        self._overwrite = overwrite
        self._files: dict[str, FileEntry] = {}
        self._attachments: dict[str, FileEntry] = {}

    @contextmanager
    def open(self, name: str) -> Iterator[HashingFile]:
        """A new file, hashed while it is written, fsynced at the end."""
        path = self._place(name)
        file = HashingFile(path)
        try:
            yield file
        except BaseException:
            file.abandon()
            raise
        self.enter(name, *file.close())

    def write(self, name: str, content: bytes | str) -> None:
        """A small file at once."""
        with self.open(name) as file:
            file.write(content.encode() if isinstance(content, str) else content)

    def copy(self, source: Path, name: str) -> None:
        """A byte-identical copy of a file."""
        with self.open(name) as file, source.open("rb", buffering=0) as reader:
            while block := reader.read(_WRITE):
                file.write(block)

    def take_over(self, keep: Collection[str]) -> bool:
        """Of a shared directory: wait until nobody else is at work on it, and remove all but the files to ``keep``.
        False if somebody else committed it."""
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        try:
            mine = os.path.samestat(os.fstat(self.lock), self.path.stat())
        except FileNotFoundError:
            return False
        if mine:
            _clear(self.path, keep)
        return mine

    def entry(self, name: str) -> FileEntry:
        """What is known of a file that was written."""
        return self._files[name]

    def adopt(self, name: str) -> None:
        """A file that a library wrote into ``path``: hashed by reading it, and fsynced."""
        self.enter(name, *self._read_back(name))

    def attach(self, name: str) -> None:
        """A file in ``path`` that belongs to the directory but not to its id: metrics, plots, logs, reports."""
        count, digest = self._read_back(name)
        self._attachments[name] = FileEntry(path=name, bytes=count, blake3=digest)

    def commit(
        self,
        *,
        kind: manifest.Kind,
        layout: manifest.Layout,
        tool: str,
        settings: dict[str, Any],
        encoding: dict[str, Any] | None = None,
        model: manifest.ModelInfo | None = None,
        parents: Sequence[Parent] = (),
        parent_dirs: Sequence[Path] = (),
        notes: dict[str, Any] | None = None,
    ) -> Manifest:
        """Write the parents' manifests (``lineage/``) and the manifest, fsync, and rename to ``out``.

        Raises InputError if files lie in the directory that nobody entered, or if ``out`` came into being meanwhile.
        """
        self._keep_lineage(parent_dirs)
        stray = set(files.listing(self.path)) - self._files.keys() - self._attachments.keys()
        if stray:
            raise InputError(f"files nobody accounted for: {', '.join(sorted(stray))}", where=self.path)
        entries = [self._files[name] for name in sorted(self._files)]
        made = Manifest(
            kind=kind,
            layout=layout,
            encoding=encoding or {},
            model=model,
            digests=manifest.digests(entries),
            files=entries,
            parents=list(parents),
            made_by=manifest.MadeBy(tool=tool, version=VERSION, settings=settings),
            attachments=[self._attachments[name] for name in sorted(self._attachments)],
            notes=notes or {},
        )
        file = HashingFile(self.path / manifest.NAME)
        file.write(made.dump())
        file.close()
        files.fsync_directories(self.path)
        _appear(self.path, self.out, self._overwrite)
        self.committed = True
        return made

    def _place(self, name: str) -> Path:
        parts = PurePosixPath(name).parts
        if not parts or ".." in parts or name.startswith("/") or name == manifest.NAME:
            raise InputError(f"not a name for a file of a checkpoint: {name!r}", where=self.out)
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def enter(self, name: str, count: int, digest: str) -> None:
        """A file in ``path`` that its writer hashed while it wrote it, and fsynced."""
        self._files[name] = FileEntry(path=name, bytes=count, blake3=digest)

    def _read_back(self, name: str) -> tuple[int, str]:
        path = self._place(name)
        with path.open("rb") as file:
            os.fsync(file.fileno())
        return files.hash_file(path)

    def _keep_lineage(self, parent_dirs: Sequence[Path]) -> None:
        kept: dict[str, bytes] = {}
        for directory in parent_dirs:
            parent = manifest.identify(directory)
            kept[f"{LINEAGE}/{parent.id[7:23]}.json"] = parent.dump()
            for path in sorted((directory / LINEAGE).glob("*.json")):
                kept[f"{LINEAGE}/{path.name}"] = path.read_bytes()
        for name, content in sorted(kept.items()):
            path = self._place(name)
            path.write_bytes(content)
            self.attach(name)


def partial(out: Path) -> Path:
    """Where ``out`` is in the making."""
    return out.with_name(out.name + ".partial")


def check_out(out: Path, overwrite: bool) -> None:
    """Refuse an output that exists (unless it may be overwritten), or that cannot be a directory. For plans."""
    if out.name.endswith(".partial") or not out.name:
        raise InputError("an output cannot be called that", where=out)
    if files.URL.fullmatch(str(out)):
        what = "is a URL; of these tools mst-train and mst-align write to a store"
        raise InputError(what, where=out, hint="write to a directory here, and copy that")
    if os.path.lexists(out):
        if not overwrite:
            raise InputError("exists", where=out, hint="--overwrite replaces it, or choose another --out")
        if not out.is_dir() or (any(out.iterdir()) and not (out / manifest.NAME).exists()):
            raise InputError("is not a directory made by mst, so it is not overwritten", where=out)


def check_free(out: Path, needed: int) -> None:
    """Refuse a work that needs more bytes than the disk of ``out`` has. For plans."""
    place = out.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if needed > free:
        raise InputError(f"needs {console.size(needed)}, the disk has {console.size(free)} free", where=out)


@contextmanager
def stage(
    out: Path,
    overwrite: bool = False,
    keep: Callable[[Path], Collection[str]] | None = None,
    shared: bool = False,
) -> Iterator[Staging]:
    """A directory in the making. If the block ends without ``commit``, nothing of it is left.

    ``keep`` names the files (relative to the directory) that a killed run left and this one goes on with; then nothing
    is removed after a failure either. ``shared``: other processes work on other files of it at the same time; the one
    that commits calls ``take_over`` first.

    Raises InputError if ``out`` exists (without ``overwrite``), if another process is at work on it, or if the disk
    is full.
    """
    out = out.absolute()
    _repair(out)
    check_out(out, overwrite)
    staging = Staging(out, overwrite)
    staging.kept = keep is not None
    out.parent.mkdir(parents=True, exist_ok=True)
    lock = _lock(staging.path, out, shared)
    staging.lock = lock
    try:
        if not shared:
            _clear(staging.path, keep(staging.path) if keep else ())
        yield staging
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise InputError("the disk is full", where=out, hint="free some space or choose another --out") from error
        raise
    finally:
        if not staging.committed and not staging.kept and not shared:
            shutil.rmtree(staging.path, ignore_errors=True)
        os.close(lock)


def verify(directory: Path) -> list[str]:
    """Compare a finished directory with its manifest: one sentence for each problem, none if all is well.

    Raises InputError if there is no readable manifest.
    """
    made = manifest.read(directory)
    problems = []
    entries = [*made.files, *made.attachments]
    for entry in entries:
        path = directory / entry.path
        if not path.is_file():
            problems.append(f"{entry.path}: missing")
        elif path.stat().st_size != entry.bytes:
            problems.append(f"{entry.path}: {path.stat().st_size} bytes, the manifest says {entry.bytes}")
        elif files.hash_file(path)[1] != entry.blake3:
            problems.append(f"{entry.path}: its content changed (blake3 differs)")
    extra = set(files.listing(directory)) - {entry.path for entry in entries} - {manifest.NAME}
    problems += [f"{name}: not in the manifest" for name in sorted(extra)]
    return problems


def _lock(path: Path, out: Path, shared: bool) -> int:
    while True:
        path.mkdir(exist_ok=True)
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise InputError("another process is writing it", where=out, hint="wait for it, or end it") from None
        # Between mkdir and flock the owner may have renamed or removed what we opened: lock the one that is there now.
        try:
            same = os.path.samestat(os.fstat(handle), path.stat())
        except FileNotFoundError:
            same = False
        if same:
            return handle
        os.close(handle)


def _clear(path: Path, keep: Collection[str]) -> None:
    """Remove what a killed run left, but the files to ``keep``."""
    for name in files.listing(path):
        if name not in keep:
            (path / name).unlink()
    for child in sorted(path.iterdir()):
        if child.is_dir() and not child.is_symlink() and not any(Path(name).parts[0] == child.name for name in keep):
            shutil.rmtree(child)


def _rename(source: Path, target: Path, flags: int) -> bool:
    """renameat2(2). False where the kernel or the file system does not know the flag."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    at_cwd = -100
    if libc.renameat2(at_cwd, os.fsencode(source), at_cwd, os.fsencode(target), flags) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS):
        return False
    raise OSError(code, os.strerror(code), str(target))


def _appear(staged: Path, out: Path, overwrite: bool) -> None:
    try:
        if overwrite and out.exists():
            if not _rename(staged, out, _EXCHANGE):
                # No atomic exchange here: a kill between these two is repaired by _repair at the next start.
                out.rename(_old(out))
                staged.rename(out)
            files.fsync_directory(out.parent)
            for leftover in (staged, _old(out)):
                shutil.rmtree(leftover, ignore_errors=True)
            return
        if not _rename(staged, out, _NOREPLACE):
            check_out(out, overwrite=False)
            staged.rename(out)
    except FileExistsError:
        raise InputError("came into being while this command worked", where=out) from None
    files.fsync_directory(out.parent)


def _old(out: Path) -> Path:
    return out.with_name(out.name + ".old.partial")


def _repair(out: Path) -> None:
    """Finish an exchange that was cut between its two renames."""
    if _old(out).exists() and not out.exists():
        _old(out).rename(out)
