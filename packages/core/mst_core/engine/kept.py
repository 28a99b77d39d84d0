"""Reference log-probabilities on disk, so that another run with the same reference and rows reads them.

    CACHE/references/KEY/NAME.logp    a line of JSON: ``of``, count, width and blake3 of what follows;
                                      count names of 16 bytes; count x width numbers, fp32

KEY is a hash of ``of``: what the numbers depend on besides the rows. A name is a hash of a unit's tokens and of what
each counts. A file appears whole and never changes; a run adds what it lacked as one more, named by its names: runs
that write at once write two files, or the same.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor

from mst_core import console, manifest
from mst_core.version import VERSION

NAME, SUFFIX = 16, ".logp"


class Kept:
    """What is kept of one reference. One process of a run has it."""

    def __init__(self, cache: Path, of: Mapping[str, Any]) -> None:
        """``of``: JSON values."""
        self.of = {**of, "version": VERSION, "bytes": sys.byteorder}
        self.folder = cache.expanduser() / "references" / blake3(manifest.canonical(self.of)).hexdigest()[:32]

    def read(self, places: Mapping[bytes, int], into_NR: Tensor) -> dict[int, Path]:
        """Fill the rows of ``into_NR`` whose names are known; which, and the files they are from.

        A file that is broken, or of something else, is named and passed over.
        """
        found: dict[int, Path] = {}
        for path in sorted(self.folder.glob(f"*{SUFFIX}")):
            try:
                names, logp_KR = self._open(path)
            except (OSError, ValueError, KeyError, TypeError) as error:
                console.warn(f"{path}: passed over, its rows are computed anew: {error}")
                continue
            if logp_KR.shape[1] != into_NR.shape[1]:
                continue
            for number in range(len(logp_KR)):
                place = places.get(names[NAME * number : NAME * (number + 1)])
                if place is not None and place not in found:
                    into_NR[place], found[place] = logp_KR[number], path
        return found

    def write(self, names: list[bytes], logp_KR: Tensor) -> None:
        """Add a file. A cache that cannot be written is a warning: the numbers are there, for this run."""
        joined = b"".join(names)
        body = joined + logp_KR.numpy().tobytes()
        told = {"of": self.of, "count": len(names), "width": logp_KR.shape[1], "blake3": blake3(body).hexdigest()}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.folder, delete=False) as file:
                try:
                    file.write(manifest.canonical(told) + b"\n" + body)
                    file.flush()
                    os.fsync(file.fileno())
                    os.replace(file.name, self.folder / f"{blake3(joined).hexdigest()[:32]}{SUFFIX}")
                finally:
                    Path(file.name).unlink(missing_ok=True)
        except OSError as error:
            console.warn(f"{self.folder}: reference log-probabilities are not kept: {error.strerror}")

    def _open(self, path: Path) -> tuple[bytes, Tensor]:
        line, _, body = path.read_bytes().partition(b"\n")
        told = json.loads(line)
        if told["of"] != self.of:
            raise ValueError("it is of another reference")
        count, width = told["count"], told["width"]
        if len(body) != count * (NAME + 4 * width) or blake3(body).hexdigest() != told["blake3"]:
            raise ValueError("it is broken, its content is not what was written")
        logp = torch.frombuffer(bytearray(body[NAME * count :]), dtype=torch.float32) if count else torch.empty(0)
        return body[: NAME * count], logp.view(count, width)
