"""The bytes that reading.filling makes, against numpy's own slices; and files where RWF_DONTCACHE is not to be had."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mst_convert import disk, reading
from mst_core.blocks import Array, Move, Place
from mst_core.errors import InputError


def stored(folder: Path, name: str, matrix: np.ndarray[Any, Any]) -> Array:
    """A matrix of BF16 bits in a file of its own, behind 10 bytes of something else."""
    path = folder / name
    path.write_bytes(b"0123456789" + matrix.tobytes())
    return Array(name, "BF16", matrix.shape[0], matrix.shape[1], Place(path, 10))


@pytest.mark.parametrize("stretch", [64, 1000, 4096, 1 << 20])
def test_rows_of_wide_and_of_narrow_parts(tmp_path: Path, stretch: int) -> None:
    """Whole rows of two sources, columns of a third, and rows and columns that nobody fills, in any stretch."""
    draw = np.random.default_rng(0)
    for columns in (300, 30):  # above and below what the kernel scatters faster
        left, right, wide = (draw.integers(1, 1 << 16, (7, n), np.uint16) for n in (columns, columns, 3 * columns))
        arrays = [stored(tmp_path, f"{n}-{columns}", m) for n, m in enumerate((left, right, wide))]
        wanted = np.zeros((9, 3 * columns), np.uint16)
        wanted[0:7, :columns] = left
        wanted[0:4, columns : 2 * columns] = right[3:]
        wanted[4:7, columns : 2 * columns] = right[:3]
        wanted[1:6, 2 * columns :] = wide[2:, columns : 2 * columns]
        found = [
            Move(0, 0, 1, 7, columns, arrays[0], 0, 0, 1),
            Move(0, columns, 1, 4, columns, arrays[1], 3, 0, 1),
            Move(4, columns, 1, 3, columns, arrays[1], 0, 0, 1),
            Move(1, 2 * columns, 1, 5, columns, arrays[2], 2, columns, 1),
        ]
        made = Array("made", "BF16", 9, 3 * columns)
        sources = reading.Sources()
        fill = reading.filling(made, found, sources)
        out = bytearray(b"\xff" * made.nbytes)
        for start in range(0, made.nbytes, stretch):
            fill(start, memoryview(out)[start : start + stretch])
        sources.close()
        assert bytes(out) == wanted.tobytes()


def test_more_rows_than_one_call_fills_and_a_source_that_became_short(tmp_path: Path) -> None:
    matrix = np.arange(1500 * 256, dtype=np.uint16).reshape(1500, 256)
    source, made = stored(tmp_path, "source", matrix), Array("made", "BF16", 1500, 512)
    found = [Move(0, 256, 1, 1500, 256, source, 0, 0, 1)]
    sources = reading.Sources()
    out = bytearray(made.nbytes)
    reading.filling(made, found, sources)(0, memoryview(out))
    assert np.array_equal(np.frombuffer(out, np.uint16).reshape(1500, 512)[:, 256:], matrix)
    with (tmp_path / "source").open("r+b") as file:
        file.truncate(700 * 512)
    with pytest.raises(InputError, match="ended before all of a tensor was read"):
        reading.filling(made, found, sources)(0, memoryview(out))
    sources.close()


def test_a_kernel_without_dontcache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel refuses flags that it does not know: the file is written all the same, and its pages handed on."""
    monkeypatch.setattr(disk, "DONTCACHE", 1 << 20)
    monkeypatch.setattr(disk, "PASS_ON", 1 << 16)
    content = np.random.default_rng(0).bytes(300_001)
    file = disk.DiskFile(tmp_path / "file", keep=False)
    for at in range(0, len(content), 50_000):
        file.write(at, memoryview(content)[at : at + 50_000])
        file.written(min(at + 50_000, len(content)))
    file.close(len(content))
    assert (tmp_path / "file").read_bytes() == content
