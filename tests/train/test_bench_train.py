"""scripts/bench train: both sides of each case make the same steps, in turns; scripts/gpu runs end to end on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import bench_train

    yield bench_train
    for name in ("bench_train", "bench"):
        sys.modules.pop(name)


def test_two_loops_step_in_turns(bench: Any) -> None:
    turns, said = bench.Turns(("a", "b"), 4), []

    def loop(name: str) -> None:
        for _ in range(4):
            turns.begin(name)
            said.append(name)
        turns.end(name)

    with turns.beside(lambda: loop("b")):
        loop("a")
    assert "".join(said) == "abbaabba"
    assert {name: len(took) for name, took in turns.took.items()} == {"a": 4, "b": 4}


def test_a_side_that_fails_ends_the_other(bench: Any) -> None:
    turns = bench.Turns(("a", "b"), 4)

    def fails() -> None:
        turns.begin("b")
        raise ValueError("no")

    hook, threading.excepthook = threading.excepthook, lambda given: None
    try:
        with pytest.raises(RuntimeError, match="the other side failed"), turns.beside(fails):
            for _ in range(4):
                turns.begin("a")
            turns.end("a")
    finally:
        threading.excepthook = hook


SLOW = pytest.mark.slow


@pytest.mark.parametrize("name", ["padded", "megatron", *(pytest.param(n, marks=SLOW) for n in ("packed", "compiled"))])
def test_both_sides_make_the_same_steps(tiny_hf: Callable[..., Path], tmp_path: Path, bench: Any, name: str) -> None:
    texts = [("pack my box " * (1 + i % 5), "dozen jugs " * (1 + i % 3)) for i in range(40)]
    rows = [{"instruction": asked, "input": "", "output": answer} for asked, answer in texts]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    given = {"name": name, "model": str(tiny_hf("llama")), "rows": str(tmp_path / "rows.json"),
             "work": str(tmp_path / "w"), "pairs": 3, "warm": 1, "batch": 4, "seq_length": 128}  # fmt: skip
    done = subprocess.run(
        [sys.executable, SCRIPTS / "bench_train.py", "--one", json.dumps(given)], capture_output=True, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    if name != "packed":
        assert found["difference"] < 1e-5
        assert found["ours"]["tokens"] == found["theirs"]["tokens"]
    assert len(found["ours"]["cpu"]) == len(found["theirs"]["cpu"]) == len(found["ours"]["inside"]) == 3
    assert bench.line("tiny", name, found).startswith(f"| tiny | {name} |")


def test_the_gpu_script_on_a_cpu(tmp_path: Path) -> None:
    out = tmp_path / "figures"
    done = subprocess.run(
        [SCRIPTS / "gpu", "--dry", "--out", out], capture_output=True, text=True,
        env={**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    log = (out / "log.txt").read_text()
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{log}"
    figures = json.loads((out / "figures.json").read_text())
    assert [run["engine"] for run in figures["runs"]] == ["plain", "plain, compiled", "megatron"]
    first = figures["runs"][0]
    for run in figures["runs"]:
        assert run["tokens_s"] == pytest.approx(run["rows"] * run["length"] / run["step_s"])
        assert run["losses"][0] == pytest.approx(first["losses"][0], abs=0.02)  # bf16
        assert run["FLOP_s"] > 0
    assert [one.keys() & {"failed", "left out"} for one in figures["commands"]] == [set(), set()]
    page = (out / "figures.md").read_text()
    assert "| tiny | megatron | 2 x 32 |" in page
    assert done.stdout.endswith(page)
    assert (out / "profiles.txt").read_text().count("== tiny") == 3
