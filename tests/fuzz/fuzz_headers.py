"""Fuzz every reader of headers, indexes and pickles with atheris, by hand:

    pip install atheris && python tests/fuzz/fuzz_headers.py -max_total_time=300 CORPUS_DIR

The first byte of an input chooses the reader. Anything but success or InputError stops it, and so do 500 MB of memory
or 10 s for one input.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["mst_core"]):
    from mst_core import hf_weights, legacy, tensors, torch_dist, torch_pickle, unpickling, untrusted  # noqa: F401

sys.path.insert(0, str(Path(__file__).parent))
import harness

KINDS = sorted(harness.TARGETS)
WHERE = harness.prepare(Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None)))


def one(data: bytes) -> None:
    if data:
        harness.attempt(KINDS[data[0] % len(KINDS)], data[1:], WHERE)


if __name__ == "__main__":
    corpus = [Path(word) for word in sys.argv[1:] if not word.startswith("-")]
    for place in corpus[:1]:
        place.mkdir(parents=True, exist_ok=True)
        for number, kind in enumerate(KINDS):
            (place / f"seed-{kind}").write_bytes(bytes([number]) + harness.TARGETS[kind][0])
    atheris.Setup([*sys.argv, "-rss_limit_mb=500", "-timeout=10", "-max_len=6000"], one)
    atheris.Fuzz()
