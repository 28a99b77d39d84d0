"""A file written by several threads, so that its pages do not pile up in memory.

A page cache that grows costs more than the copy itself (a virtual machine has to ask its host for each page), and the
output is not read again soon. Linux 6.14 and later store the pages of a write at once and let go of them
(RWF_DONTCACHE); where the kernel or the file system cannot, written pages are handed to the disk early and reused.
MEGATRON.md, "How fast a conversion can be", has the first measurements.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
from pathlib import Path

DONTCACHE = 0x80
"""RWF_DONTCACHE of linux/fs.h, for which Python has no name."""
AHEAD = 1 << 28
"""Bytes that are allocated before they are written, for long files lie in one stretch then."""
PASS_ON = 1 << 25
"""Bytes between two hand-overs of written pages to the disk, where there is no RWF_DONTCACHE."""


class DiskFile:
    """An output file. ``write`` may be called by any thread, for pieces that tile the file."""

    def __init__(self, path: Path, keep: bool) -> None:
        """``keep`` what an earlier run wrote."""
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (0 if keep else os.O_TRUNC)
        self.path = path
        self._handle = os.open(path, flags, 0o666)
        self._flags = DONTCACHE
        self._passed = self._allocated = 0
        self._lock = threading.Lock()

    def write(self, at: int, view: memoryview) -> None:
        self._allocate(at + len(view))
        while view:
            try:
                count = os.pwritev(self._handle, [view], at, self._flags)
            except OSError as error:
                if error.errno != errno.EOPNOTSUPP or not self._flags:
                    raise
                self._flags = 0
                continue
            view, at = view[count:], at + count

    def _allocate(self, end: int) -> None:
        """Room for ``end`` bytes; ``close`` gives back what is too much."""
        with self._lock:
            while self._allocated < end:
                try:
                    os.posix_fallocate(self._handle, self._allocated, AHEAD)
                except OSError:  # no room for so much, or the file system cannot
                    self._allocated = sys.maxsize
                    return
                self._allocated += AHEAD

    def read(self, at: int, into: memoryview) -> int:
        """Fill ``into`` from what is there; how many bytes there were."""
        return os.preadv(self._handle, [into], at)

    def written(self, end: int) -> None:
        """All before ``end`` was written: without RWF_DONTCACHE, start to store it, and let go of what is stored."""
        if self._flags or end - self._passed < PASS_ON:
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
