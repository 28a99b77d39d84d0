"""Ranks that end well, badly, and not at all: what the launching process says, and what is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mst_core import cluster
from mst_core.engine import launch
from mst_core.engine.launch import run_ranks
from mst_core.errors import InputError, MissingPackage, RunError, SettingsError

RANKS = """
import os, signal, sys, time
from pathlib import Path
from mst_core.errors import InputError


def answer(factor):
    print("this belongs on stderr")
    return factor * (int(os.environ["RANK"]) + 1), int(os.environ["WORLD_SIZE"])


def refuse(where):
    if os.environ["RANK"] == "1":
        raise InputError("cannot be used", where=where, hint="another one")
    time.sleep(60)


def fail():
    if os.environ["RANK"] == "1":
        raise ZeroDivisionError("one over none")
    time.sleep(60)


def die():
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def wait(folder):
    Path(folder, os.environ["RANK"]).write_text(str(os.getpid()))
    time.sleep(60)
"""
STARTER = """
import sys
from mst_core.engine.launch import run_ranks
if __name__ == "__main__":
    print(run_ranks("rank_functions:" + sys.argv[1], "megatron", 2, *sys.argv[2:]))
"""


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module of rank functions that the started processes can import."""
    (tmp_path / "rank_functions.py").write_text(RANKS)
    (tmp_path / "starter.py").write_text(STARTER)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    yield tmp_path
    sys.modules.pop("rank_functions", None)


def test_the_result_is_rank_0s_and_stdout_is_clean(functions: Path) -> None:
    done = subprocess.run(
        [sys.executable, "starter.py", "answer", "ab"], cwd=functions, capture_output=True, text=True, timeout=200
    )
    assert done.stdout == "('ab', 2)\n", done.stderr
    assert done.stderr.count("this belongs on stderr") == 2


def test_a_ranks_error_comes_back_whole(functions: Path, capfd: pytest.CaptureFixture[str]) -> None:
    start = time.monotonic()
    with pytest.raises(InputError, match="here: cannot be used") as caught:
        run_ranks("rank_functions:refuse", "megatron", 2, "here")
    assert (caught.value.where, caught.value.hint) == ("here", "another one")
    assert time.monotonic() - start < 55  # the other rank was not waited for
    assert "Traceback" not in "".join(capfd.readouterr())


def test_a_bug_in_a_rank_shows_its_traceback(functions: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RunError, match="rank 1 failed: ZeroDivisionError: one over none"):
        run_ranks("rank_functions:fail", "megatron", 2)
    said = capfd.readouterr().err
    assert said.count("Traceback") == 1
    assert "in fail" in said


def test_a_killed_rank_is_named(functions: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RunError, match="rank 1 was killed by SIGKILL"):
        run_ranks("rank_functions:die", "megatron", 2)
    assert "Traceback" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_ranks_do_not_outlive_who_started_them(functions: Path, number: int) -> None:
    starter = subprocess.Popen(
        [sys.executable, "starter.py", "wait", "."], cwd=functions, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        pids = _eventually(lambda: [int((functions / rank).read_text()) for rank in ("0", "1")])
        starter.send_signal(number)
        _eventually(lambda: [_gone(pid) for pid in pids])
    finally:
        starter.kill()
        starter.communicate()


def _gone(pid: int) -> None:
    """Raises while a process lives (a zombie does not)."""
    stat = Path(f"/proc/{pid}/stat")
    if stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        raise FileNotFoundError(f"{pid} lives")


def _eventually[T](look: object, seconds: float = 100) -> T:  # type: ignore[type-var,misc]
    end = time.monotonic() + seconds
    while True:
        try:
            return look()  # type: ignore[operator,no-any-return]
        except (FileNotFoundError, ValueError, ProcessLookupError):
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


def test_under_a_launcher_the_function_just_runs(functions: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    assert not cluster.place(2).index
    assert run_ranks("rank_functions:answer", "megatron", 2, 5) == (5, 2)
    with pytest.raises(SettingsError, match="started 2 ranks, the settings ask for 4"):
        run_ranks("rank_functions:answer", "megatron", 4, 5)
    monkeypatch.setenv("RANK", "1")
    assert cluster.place(2).index == 1
    with pytest.raises(SystemExit) as left:
        run_ranks("rank_functions:answer", "megatron", 2, 5)
    assert left.value.code == 0


def test_an_engine_that_is_not_installed_says_the_pip_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "needs_more.py").write_text("import a_package_nobody_has\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(launch.ENGINES, "megatron", "needs_more:Engine")
    with pytest.raises(MissingPackage) as caught:
        launch.make_engine("megatron", None, Path(os.devnull))  # type: ignore[arg-type]
    assert "a_package_nobody_has" in caught.value.what
    assert caught.value.hint == "pip install 'mst-tools-core[megatron]'"
