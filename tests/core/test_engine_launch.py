"""How ranks are started and how they end, with torch's real launcher and real signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mst_core.engine import launch
from mst_core.errors import SettingsError

SCRIPT = Path(__file__).with_name("launch_ranks.py")


def start(case: str, folder: Path, *, ranks: int = 2, launcher: int = 0) -> subprocess.Popen[str]:
    """The program, by itself or under torchrun with ``launcher`` processes."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment["PYTHONPATH"] = f"{SCRIPT.parent}:{os.environ.get('PYTHONPATH', '')}"
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(launcher)] if launcher else []
    words = [sys.executable, *torchrun, str(SCRIPT), case, str(ranks), str(folder)]
    return subprocess.Popen(
        words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def wait_for_ranks(folder: Path, ranks: int = 2) -> list[int]:
    """The process ids of the ranks, once all are there."""
    end = time.monotonic() + 120
    while time.monotonic() < end:
        found = [path.read_text() for path in sorted(folder.glob("pid-*"))]
        if len(found) == ranks and all(found):
            return [int(text) for text in found]
        time.sleep(0.1)
    pytest.fail("the ranks did not start")


def are_gone(pids: list[int], patience: float = 10.0) -> bool:
    """Whether none of these processes runs (a zombie runs no more)."""

    def alive(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
        except OSError:
            return False

    end = time.monotonic() + patience
    while any(alive(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.1)
    return not any(alive(pid) for pid in pids)


def test_the_result_is_rank_0s_and_stdout_is_its_own(tmp_path: Path) -> None:
    out, said = (run := start("well", tmp_path)).communicate(timeout=200)
    assert run.returncode == 0, said
    threads = str(max(1, (os.cpu_count() or 1) // 2))
    assert json.loads(out) == {"rank": 0, "world": "2", "threads": threads}  # one line: what ranks print is not there
    assert "rank 1 prints" in said


@pytest.mark.parametrize(
    ("case", "code", "says"),
    [
        ("error", 3, "error: InputError: rows.jsonl:7: cannot be used (hint: mend it)"),
        ("killed", 5, "error: RunError: rank 1 was killed by SIGKILL; the others were stopped"),
        ("bug", 5, "error: RunError: rank 1 failed: ZeroDivisionError"),
    ],
)
def test_the_first_fault_ends_the_run_and_is_named(tmp_path: Path, case: str, code: int, says: str) -> None:
    out, said = (run := start(case, tmp_path)).communicate(timeout=200)
    assert (run.returncode, out) == (code, ""), said
    assert says in said
    assert said.count("Traceback") == (case == "bug"), said
    assert are_gone(wait_for_ranks(tmp_path))


def test_sigterm_ends_the_ranks_and_the_run_with_code_6(tmp_path: Path) -> None:
    run = start("waits", tmp_path)
    pids = wait_for_ranks(tmp_path)
    run.send_signal(signal.SIGTERM)
    out, said = run.communicate(timeout=60)
    assert (run.returncode, out) == (6, ""), said
    assert "error: Stopped:" in said
    assert "Traceback" not in said
    assert are_gone(pids)


@pytest.mark.parametrize("children", [0, 1, 3])
def test_sigterm_while_ranks_start_is_code_6_too(tmp_path: Path, children: int) -> None:
    """Before there is a rank, and before the ranks have a handler of their own."""
    run = start("waits", tmp_path)
    started = Path(f"/proc/{run.pid}/task/{run.pid}/children")
    handled = "SigCgt:\t"  # SIGTERM has a handler, ours
    while not int(Path(f"/proc/{run.pid}/status").read_text().split(handled)[1].split()[0], 16) >> 14 & 1:
        time.sleep(0.005)
    while len(started.read_text().split()) < children:
        time.sleep(0.005)
    run.send_signal(signal.SIGTERM)
    out, said = run.communicate(timeout=60)
    assert (run.returncode, out) == (6, ""), said
    assert "error: Stopped:" in said


def test_ranks_do_not_outlive_the_one_that_started_them(tmp_path: Path) -> None:
    run = start("waits", tmp_path)
    pids = wait_for_ranks(tmp_path)
    run.kill()
    assert are_gone(pids)
    run.communicate(timeout=60)


def test_under_torchrun_one_process_speaks(tmp_path: Path) -> None:
    out, said = (run := start("well", tmp_path, launcher=2)).communicate(timeout=200)
    assert run.returncode == 0, said
    results = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert [(found["rank"], found["world"]) for found in results] == [(0, "2")]


def test_a_launcher_with_another_number_of_ranks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SettingsError, match="the launcher started 2 ranks, the settings ask for 4") as caught:
        launch.run_ranks("launch_ranks:behave", "megatron", 4, "well", str(tmp_path))
    assert caught.value.hint == "--nproc 2 lets data parallel fill them"
    with pytest.raises(SettingsError) as caught:
        launch.run_ranks("launch_ranks:behave", "plain", 1, "well", str(tmp_path))
    assert str(caught.value.hint).startswith("the plain engine is one process")
