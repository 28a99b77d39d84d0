"""Ranks that hang, stop, die or diverge in a real run: one error that names them, and the last checkpoint stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mst_core import checkpoint, resume

BIN = Path(sys.executable).parent
HOOK = """
import os, signal, sys, time
from mst_core.engine import schedule

schedule_lr = schedule.lr


def lr(step, **known):
    if step == 3 and os.environ.get("RANK") == "1":
        print("rank 1 does it now", file=sys.stderr, flush=True)
        {does}
    return schedule_lr(step, **known)


schedule.lr = lr
"""
ENGINES = {
    "fsdp": ["--engine", "fsdp", "--nproc-per-node", "2"],
    "megatron": ["--engine", "megatron", "--pp", "2"],
    "deepspeed": ["--engine", "deepspeed", "--nproc", "2", "--zero", "1"],
}


@pytest.fixture
def run(tiny_hf: Callable[..., Path], data: Path, tmp_path: Path) -> Callable[..., tuple[int, str]]:
    """(exit code, stderr) of a run whose rank 1 does something before step 4; steps 1 to 3 are saved."""

    def trained(engine: str, does: str = "pass", *more: Any, launcher: tuple[str, ...] = ()) -> tuple[int, str]:
        (tmp_path / "sitecustomize.py").write_text(HOOK.format(does=does))
        path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
        words = ["--model", tiny_hf("llama", num_hidden_layers=2), "--data", data, "--out", tmp_path / "out"]
        fixed = ["--global-batch", 4, "--steps", 6, "--save-every", 1, "--keep", 1, "--precision", "fp32"]
        command = [*launcher, BIN / "mst-train", *words, *ENGINES[engine], *fixed, *more]
        done = subprocess.run(
            list(map(str, command)), capture_output=True, text=True, timeout=200,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        )  # fmt: skip
        assert done.stdout == ("" if done.returncode else f"{tmp_path / 'out'}\n")
        return done.returncode, done.stderr

    return trained


def stands(out: Path, step: int) -> None:
    """The checkpoint of ``step`` is whole and the newest."""
    assert resume.stopped_at(out) == step
    assert checkpoint.verify(out.with_name("out.partial") / "checkpoints" / resume.name_of(step)) == []


SLEEPS = r"for rank 1, which stands in lr \(.+/sitecustomize.py:11\)"
HUNG = {
    "fsdp": ("time.sleep(600)", SLEEPS),
    "megatron": ("time.sleep(600)", SLEEPS),
    "deepspeed": ("os.kill(os.getpid(), signal.SIGSTOP)", r"for rank 1, which is stopped \(process \d+, by a signal"),
}


@pytest.mark.parametrize(
    "engine", [name if name == "megatron" else pytest.param(name, marks=pytest.mark.slow) for name in HUNG]
)
def test_a_hung_collective_names_who_waits_where_and_for_whom(
    engine: str, run: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    does, says = HUNG[engine]
    code, err = run(engine, does, "--timeout", 8)
    assert code == 5, err
    (told,) = re.findall(r"^mst-train: error: (.+)$", err, re.MULTILINE)
    assert re.fullmatch(rf"rank 0 waited 8 s in [\w.()]+ \(.+\.py:\d+, in \w+\), {says}.*", told)
    assert "hint: step 3 is saved, --resume goes on from it" in err
    assert "Traceback" not in err
    stands(tmp_path / "out", 3)
    # What every rank wrote is shown, and kept.
    assert re.search(r"^rank 1, process \d+ on .+: its last lines\n  \| rank 1 does it now$", err, re.MULTILINE)
    assert "rank 1 does it now" in (tmp_path / "out.partial" / "logs" / "rank-00001.log").read_text()


def test_a_rank_that_is_killed(run: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    code, err = run("fsdp", "os.kill(os.getpid(), signal.SIGKILL)")
    assert (code, err.count("mst-train: error:")) == (5, 1), err
    assert "error: rank 1 was killed by SIGKILL; the others were stopped" in err
    assert "step 3 is saved" in err
    assert "Traceback" not in err
    stands(tmp_path / "out", 3)
    code, err = run("fsdp", "pass", "--resume")
    assert code == 0, err
    assert "goes on after step 3 of 6" in err
    assert checkpoint.verify(tmp_path / "out") == []


def test_a_loss_that_is_not_finite_is_one_error(run: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    """On both ranks at once, whoever started them."""
    hot = ("--lr", "1e30", "--schedule", "constant", "--warmup", "0")
    torchrun = (str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2")
    for launcher in ((), torchrun):
        code, err = run("fsdp", "pass", *hot, "--overwrite", launcher=launcher)
        assert err.count("mst-train: error: step 2: loss nan") == 1, err
        assert err.count("mst-train: error") == 1
        assert launcher or code == 5
        stands(tmp_path / "out", 1)


@pytest.mark.parametrize(
    ("does", "says"),
    [
        ("time.sleep(600)", SLEEPS),
        pytest.param(
            "os.kill(os.getpid(), signal.SIGSTOP)",
            "for rank 1, which does not answer: it is stopped",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_under_torchrun_a_hung_collective_names_the_same(
    does: str, says: str, run: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    """Its processes are not ours to look at: they ask one another, and torchrun ends those that are left."""
    torchrun = (str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2")
    code, err = run("fsdp", does, "--timeout", 8, launcher=torchrun)
    assert code, err
    (told,) = re.findall(r"^mst-train: error: (.+)$", err, re.MULTILINE)
    assert re.fullmatch(rf"rank 0 waited 8 s in [\w.()]+ \(.+\.py:\d+, in \w+\), {says}.*", told)
    assert "hint: step 3 is saved, --resume goes on from it" in err
    stands(tmp_path / "out", 3)
