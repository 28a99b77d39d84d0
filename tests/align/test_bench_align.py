"""scripts/bench align: mst-align and TRL make the same steps, in turns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.mark.parametrize("name", ["packed", pytest.param("padded", marks=pytest.mark.slow)])
def test_both_sides_make_the_same_steps(tiny_hf: Callable[..., Path], tmp_path: Path, name: str) -> None:
    rows = [
        {
            "conversations": [{"from": "human", "value": "pack my box " * (1 + i % 5)}],
            "chosen": {"from": "gpt", "value": "dozen jugs " * (1 + i % 7)},
            "rejected": {"from": "gpt", "value": "lazy dog " * (1 + i % 3)},
        }
        for i in range(40)
    ]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    given = {"name": name, "model": str(tiny_hf("llama")), "rows": str(tmp_path / "rows.json"),
             "work": str(tmp_path / "w"), "pairs": 3, "warm": 1, "batch": 4, "seq_length": 128}  # fmt: skip
    done = subprocess.run(
        [sys.executable, SCRIPTS / "bench_align.py", "--one", json.dumps(given)], capture_output=True, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["difference"] < 1e-5
    assert found["ours"]["tokens"] == found["theirs"]["tokens"]
    assert len(found["ours"]["cpu"]) == len(found["theirs"]["cpu"]) == len(found["ours"]["inside"]) == 3
