"""Files that stay in memory until a thread writes them: what a checkpoint written behind the training is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from mst_core.checkpoint import HashingFile, Staging
from mst_core.engine.seam import create


class _MemoryFile(HashingFile):
    """Append only, as the file it stands in for."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self._count = 0

    def write(self, data: Any) -> int:
        """Copy any bytes-like object whole."""
        self.parts.append(bytes(memoryview(data).cast("B")))
        self._count += len(self.parts[-1])
        return len(self.parts[-1])


class Memory:
    """Files and where they are to be written, in order."""

    def __init__(self) -> None:
        self._held: list[tuple[Callable[[], AbstractContextManager[Any]], list[bytes]]] = []

    @contextmanager
    def hold(self, target: Callable[[], AbstractContextManager[Any]]) -> Iterator[HashingFile]:
        """A file in memory, for the one that ``target`` opens."""
        file = _MemoryFile()
        yield file
        self._held.append((target, file.parts))

    def create(self, path: Path) -> AbstractContextManager[Any]:
        """seam.create, later."""
        return self.hold(lambda: create(path))

    def pour(self) -> None:
        """Write the files, and forget each."""
        while self._held:
            target, parts = self._held.pop(0)
            with target() as file:
                for part in parts:
                    file.write(part)


class Held(Staging):
    """A staging whose files are held in ``memory``, for the one ``behind`` it."""

    def __init__(self, behind: Staging, memory: Memory) -> None:
        super().__init__(behind.out, overwrite=False)
        self._behind, self._memory = behind, memory

    @contextmanager
    def open(self, name: str) -> Iterator[HashingFile]:
        """A new file in memory."""
        with self._memory.hold(lambda: self._behind.open(name)) as file:
            yield file
