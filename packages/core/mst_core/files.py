"""Files of a checkpoint: which are weights, configuration or tokenizer, and their hashes."""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import re
from collections import deque
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path, PurePosixPath

from blake3 import blake3

TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "merges.txt",
    "sentencepiece.bpe.model",
    "special_tokens_map.json",
    "spiece.model",
    "tekken.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)
"""Every file that a Hugging Face tokenizer may consist of, chat template included."""

CONFIG_FILES = ("config.json", "generation_config.json", "adapter_config.json", "preprocessor_config.json")

_CHUNK = 1 << 22
URL = re.compile(r"([a-z][a-z0-9+.-]+):/+(.+)")
"""What pathlib makes of s3://bucket/path."""


def is_weights(path: str) -> bool:
    """Whether a path inside a checkpoint holds weights (or says where they are)."""
    name = PurePosixPath(path).name
    return name.endswith((".safetensors", ".bin", ".pt", ".distcp", ".gguf", ".index.json")) or name in (
        ".metadata",
        "common.pt",
        "metadata.json",
    )


def is_tokenizer(path: str) -> bool:
    """Whether a path inside a checkpoint belongs to the tokenizer."""
    return PurePosixPath(path).name in TOKENIZER_FILES


def is_config(path: str) -> bool:
    """Whether a path inside a checkpoint is the model's (or adapter's) configuration."""
    return PurePosixPath(path).name in CONFIG_FILES


def hash_file(path: Path) -> tuple[int, str]:
    """(bytes, blake3 hex) of a file, read once in order."""
    digest, count = blake3(), 0
    with path.open("rb", buffering=0) as file:
        while block := file.read(_CHUNK):
            digest.update(block)
            count += len(block)
    return count, digest.hexdigest()


def hash_stored(path: Path) -> tuple[int, str]:
    """``hash_file`` of what is on the disk, past the page cache where the file is on one (block device)."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if os.major(os.fstat(handle).st_dev) == 0:
            return hash_file(path)
        try:
            fcntl.fcntl(handle, fcntl.F_SETFL, fcntl.fcntl(handle, fcntl.F_GETFL) | os.O_DIRECT)
        except OSError:
            return hash_file(path)
        return _hash_ahead(handle)
    finally:
        os.close(handle)


def _hash_ahead(handle: int) -> tuple[int, str]:
    """Read by two threads, hashed in order by this one."""
    digest, count, size = blake3(), 0, os.fstat(handle).st_size
    starts = iter(range(0, size, _CHUNK))
    buffers = [memoryview(mmap.mmap(-1, _CHUNK)) for _ in range(3)]  # aligned, as O_DIRECT wants them
    with ThreadPoolExecutor(2) as pool:
        reading = deque(
            (buffer, pool.submit(os.preadv, handle, [buffer], start))
            for buffer, start in zip(buffers, islice(starts, len(buffers)), strict=False)
        )
        while reading:
            buffer, found = reading.popleft()
            nbytes = found.result()
            digest.update(buffer[:nbytes])
            count += nbytes
            if (start := next(starts, None)) is not None:
                reading.append((buffer, pool.submit(os.preadv, handle, [buffer], start)))
    return count, digest.hexdigest()


def listing(directory: Path) -> list[str]:
    """Every file below a directory, as sorted POSIX paths."""
    return sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())


def fsync_directories(directory: Path) -> None:
    """Make the names inside a directory tree survive a power cut."""
    for root, _, _ in os.walk(directory):
        fsync_directory(Path(root))


def fsync_directory(directory: Path) -> None:
    """Make the names inside one directory survive a power cut."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class HashCache:
    """Hashes of files that did not change since: by path, size, mtime and inode, below ~/.cache/mst."""

    def __init__(self, directory: Path) -> None:
        key = blake3(str(directory.resolve()).encode()).hexdigest()[:32]
        self._path = Path.home() / ".cache" / "mst" / "hashes" / f"{key}.json"
        try:
            self._known: dict[str, list[object]] = json.loads(self._path.read_text())
        except (OSError, ValueError):
            self._known = {}

    def hash(self, path: Path) -> tuple[int, str]:
        """(bytes, blake3 hex) of a file, from the cache where its stamp is unchanged."""
        status = path.stat()
        stamp = [status.st_size, status.st_mtime_ns, status.st_ino]
        known = self._known.get(str(path))
        if known and known[:3] == stamp:
            return status.st_size, str(known[3])
        count, digest = hash_file(path)
        self._known[str(path)] = [*stamp, digest]
        return count, digest

    def save(self) -> None:
        """Keep what was computed. A cache that cannot be written is no error."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary = self._path.with_suffix(f".{os.getpid()}")
            temporary.write_text(json.dumps(self._known))
            temporary.replace(self._path)
        except OSError:
            return


def group_digest(entries: Iterable[tuple[str, str]]) -> str | None:
    """blake3 over sorted (path, hash) pairs; None for an empty group."""
    pairs = sorted(entries)
    if not pairs:
        return None
    return blake3(json.dumps(pairs, separators=(",", ":")).encode()).hexdigest()
