"""SIGKILL at any moment of any tool: afterwards the whole output is there, or nothing that any tool accepts.

A kill ends the tool's own process; ranks that it started must end with it, or an orphan could still commit.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mst_core import checkpoint, manifest
from mst_core.errors import InputError

BIN = Path(sys.executable).parent
KILLS, SAMPLED = 24, 4


@pytest.fixture(scope="module")
def inputs(tiny_hf: Callable[..., Path], mst: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in both layouts, rows, pairs, and an adapter."""
    folder = tmp_path_factory.mktemp("kill")
    (folder / "hf").symlink_to(tiny_hf("llama"))
    rows = [{"prompt": f"{i} or {i + 1}?", "completion": str(i)} for i in range(16)]
    pairs = [{"prompt": f"{i} or {i + 1}?", "chosen": str(i), "rejected": str(i + 1)} for i in range(16)]
    for name, content in (("sft", rows), ("pairs", pairs)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    mst("mst-convert", "--model", folder / "hf", "--to", "megatron", "--out", folder / "megatron")
    mst(
        "mst-align", "--model", folder / "hf", "--data", folder / "pairs.jsonl", "--lora-rank", 2, "--lr", 1e-3,
        "--steps", 2, "--out", folder / "adapter",
    )  # fmt: skip
    return folder


COMMANDS = {
    "convert": ["mst-convert", "--model", "hf", "--to", "megatron"],
    "merge": ["mst-merge", "--model", "megatron", "--adapter", "adapter", "--to", "hf"],
    "train": ["mst-train", "--model", "megatron", "--data", "sft.jsonl", "--pp", "2"],
    "align": ["mst-align", "--model", "hf", "--data", "pairs.jsonl", "--lora-rank", "2"],
}


def start(inputs: Path, tool: str, out: Path) -> subprocess.Popen[bytes]:
    words = [str(BIN / COMMANDS[tool][0]), *COMMANDS[tool][1:], "--out", str(out), "--overwrite"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        words, cwd=inputs, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    )


def session_is_over(session: int, patience: float = 15.0) -> bool:
    """Whether every process of the tool's session ended by itself."""
    end = time.monotonic() + patience
    while time.monotonic() < end:
        if not [stat for stat in Path("/proc").glob("[0-9]*/stat") if in_session(stat, session)]:
            return True
        time.sleep(0.2)
    return False


def in_session(stat: Path, session: int) -> bool:
    """Whether a process (its /proc/PID/stat) belongs to a session and is not a zombie."""
    try:
        state, _, _, found = stat.read_text().rpartition(")")[2].split()[:4]
    except OSError:
        return False
    return int(found) == session and state != "Z"


def kill_and_check(inputs: Path, tool: str, out: Path, delay: float) -> None:
    process = start(inputs, tool, out)
    time.sleep(delay)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert session_is_over(process.pid), f"{tool} left processes behind after a kill at {delay:.2f} s"
    if out.exists():
        assert checkpoint.verify(out) == []
    for leftover in out.parent.glob("*.partial"):
        with pytest.raises(InputError):
            manifest.identify(leftover)


def run_kills(inputs: Path, folder: Path, tool: str, kills: int, seed: int) -> None:
    """One whole run to know how long it takes, then kills at random moments of it, then the same command to its end."""
    out = folder / "out"
    begin = time.monotonic()
    process = start(inputs, tool, out)
    _, said = process.communicate()
    seconds = time.monotonic() - begin
    assert process.returncode == 0, said.decode()
    whole = manifest.read(out).id
    moments = random.Random(seed)
    for _ in range(kills):
        kill_and_check(inputs, tool, out, moments.uniform(0.3, 1.05) * seconds)
    process = start(inputs, tool, out)
    _, said = process.communicate()
    assert process.returncode == 0, said.decode()
    assert manifest.read(out).id == whole
    assert [path.name for path in folder.iterdir()] == ["out"]


@pytest.mark.parametrize("tool", COMMANDS)
def test_a_kill_leaves_all_or_nothing(inputs: Path, tmp_path: Path, tool: str) -> None:
    run_kills(inputs, tmp_path, tool, SAMPLED // len(COMMANDS), seed=len(tool))


@pytest.mark.slow
@pytest.mark.parametrize("tool", COMMANDS)
def test_many_kills_leave_all_or_nothing(inputs: Path, tmp_path: Path, tool: str) -> None:
    run_kills(inputs, tmp_path, tool, KILLS // len(COMMANDS), seed=100 + len(tool))
