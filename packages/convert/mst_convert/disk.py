"""A file written by several threads at aligned places, so that its pages do not pile up in memory.

A page cache that grows costs more than the copy itself (a virtual machine has to ask its host for each page), and the
output is not read again soon. On a local disk the pages are passed by (O_DIRECT); elsewhere they are handed to the
disk early and reused. MEGATRON.md, "How fast a conversion can be", has the first measurements.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import sys
import threading
from pathlib import Path

BLOCK = 4096
"""What O_DIRECT asks of places, lengths and buffers, at most."""
AHEAD = 1 << 28
"""Bytes that are allocated before they are written: writes that make a file longer wait for one another."""
PASS_ON = 1 << 25
"""Bytes between two hand-overs of written pages to the disk, where there is no O_DIRECT."""


def buffer(nbytes: int) -> mmap.mmap:
    """Memory that begins at a page, as O_DIRECT wants it."""
    return mmap.mmap(-1, -(-nbytes // BLOCK) * BLOCK)


class DiskFile:
    """An output file. ``write`` may be called by any thread, for pieces that tile the file."""

    def __init__(self, path: Path, keep: bool) -> None:
        """``keep`` what an earlier run wrote."""
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (0 if keep else os.O_TRUNC)
        self.path = path
        self._handle = os.open(path, flags, 0o666)
        self._direct = _go_direct(self._handle)
        self._passed = self._allocated = 0
        self._lock = threading.Lock()

    def write(self, at: int, view: memoryview, room: memoryview, last: bool) -> None:
        """The bytes of ``view``, the beginning of the aligned buffer ``room``; ``last``: the file ends with them."""
        if self._direct and last:  # what goes beyond the end, to fill a block, is cut off by ``close``
            view = room[: -(-len(view) // BLOCK) * BLOCK]
        self._allocate(at + len(view))
        while view:
            if self._direct and (at % BLOCK or len(view) % BLOCK):
                self._direct = _go_buffered(self._handle)
            try:
                count = os.pwrite(self._handle, view, at)
            except OSError as error:
                if error.errno != errno.EINVAL or not self._direct:
                    raise
                self._direct = _go_buffered(self._handle)  # this disk wants larger blocks
                continue
            view, at = view[count:], at + count

    def _allocate(self, end: int) -> None:
        """Room for ``end`` bytes; ``close`` gives back what is too much."""
        with self._lock:
            while self._direct and self._allocated < end:
                try:
                    os.posix_fallocate(self._handle, self._allocated, AHEAD)
                except OSError:  # no room for so much, or the file system cannot
                    self._allocated = sys.maxsize
                    return
                self._allocated += AHEAD

    def read(self, at: int, into: memoryview) -> int:
        """Fill ``into`` from what is there; how many bytes there were."""
        with self.path.open("rb", buffering=0) as file:
            return os.preadv(file.fileno(), [into], at)

    def written(self, end: int) -> None:
        """All before ``end`` was written: without O_DIRECT, start to store the last pages and let go of older ones."""
        if self._direct or end - self._passed < PASS_ON:
            return
        os.posix_fadvise(self._handle, self._passed, end - self._passed, os.POSIX_FADV_DONTNEED)
        os.posix_fadvise(self._handle, 0, max(0, self._passed - PASS_ON), os.POSIX_FADV_DONTNEED)
        self._passed = end

    def close(self, end: int | None) -> None:
        """Close. With ``end``, the file is that long and durable."""
        if self._handle < 0:
            return
        if end is not None:
            os.ftruncate(self._handle, end)
            os.fsync(self._handle)
        os.close(self._handle)
        self._handle = -1


def _go_direct(handle: int) -> bool:
    """Pass the page cache by, if the file is on a block device: network file systems write better behind."""
    if os.major(os.fstat(handle).st_dev) == 0:
        return False
    try:
        fcntl.fcntl(handle, fcntl.F_SETFL, fcntl.fcntl(handle, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError:
        return False
    return True


def _go_buffered(handle: int) -> bool:
    fcntl.fcntl(handle, fcntl.F_SETFL, fcntl.fcntl(handle, fcntl.F_GETFL) & ~os.O_DIRECT)
    return False
