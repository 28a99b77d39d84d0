"""--async-save: the training goes on, and what is written is what a save that stops it would have written."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.train import running

from mst_core import checkpoint, manifest, resume
from mst_core.engine import background, plain, saves
from mst_core.errors import RunError

BIN = Path(sys.executable).parent
CHECKPOINTS = "out.partial/checkpoints"


train = partial(running.train, steps=6, save_every=2)


class Gate:
    """Holds the writer's thread until a step is done, and remembers what stood where meanwhile."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, until: int) -> None:
        self.steps = 0
        self.opened = threading.Event()
        self.held = 0
        pour, step = background.Memory.pour, plain.PlainEngine.step

        def later(memory: background.Memory) -> None:
            self.held += self.opened.wait(60)
            pour(memory)

        def counted(engine: plain.PlainEngine, *given: Any) -> dict[str, float]:
            done = step(engine, *given)
            self.steps += 1
            if self.steps == until:
                self.opened.set()
            return done

        monkeypatch.setattr(background.Memory, "pour", later)
        monkeypatch.setattr(plain.PlainEngine, "step", counted)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> dict[int, dict[str, bytes]]:
    """The files of each step's checkpoint, as they stood when it appeared."""
    found: dict[int, dict[str, bytes]] = {}
    appear = saves.Saves._appear

    def watched(self: saves.Saves, flight: Any, made: Any) -> None:
        appear(self, flight, made)
        assert checkpoint.verify(made.out) == []
        found[flight.step] = {
            str(path.relative_to(made.out)): path.read_bytes() for path in made.out.rglob("*") if path.is_file()
        }

    monkeypatch.setattr(saves.Saves, "_appear", watched)
    return found


def test_what_is_written_two_steps_later_is_what_would_have_been_written_at_once(
    tiny_hf: Callable[..., Path], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: Any
) -> None:
    at_once = train(tiny_hf("llama"), data, tmp_path / "at-once")
    sure = dict(kept)
    kept.clear()
    gate = Gate(monkeypatch, until=4)
    later = train(tiny_hf("llama"), data, tmp_path / "later", async_save=True)
    assert gate.held == 2  # steps 3 and 4 were made while step 2 waited to be written
    assert kept.keys() == sure.keys() == {2, 4}
    for step, files in sure.items():
        assert files.keys() == kept[step].keys()
        for name, content in files.items():
            if name not in ("mst.json", "run.json"):  # when it was, and how fast
                assert kept[step][name] == content, f"step {step}: {name}"
    assert later["id"] == at_once["id"]


def test_one_save_is_in_flight_at_a_time(
    tiny_hf: Callable[..., Path], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: Any
) -> None:
    """The writer of step 1 waits for step 2, whose save waits for that writer: none is left out."""
    gate = Gate(monkeypatch, until=2)
    train(tiny_hf("llama"), data, tmp_path / "out", async_save=True, save_every=1)
    assert list(kept) == [1, 2, 3, 4, 5]
    assert gate.held == 5


def test_a_loss_that_is_not_finite_leaves_the_save_in_flight_whole(
    tiny_hf: Callable[..., Path], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = plain.PlainEngine.step

    def breaks(engine: plain.PlainEngine, *given: Any) -> dict[str, float]:
        if engine.steps == 2:
            with __import__("torch").no_grad():
                engine.trained[0][1].fill_(float("nan"))
        return step(engine, *given)

    monkeypatch.setattr(plain.PlainEngine, "step", breaks)
    with pytest.raises(RunError, match="step 3: loss nan"):
        train(tiny_hf("llama"), data, tmp_path / "out", async_save=True)
    assert checkpoint.verify(tmp_path / CHECKPOINTS / resume.name_of(2)) == []


def test_a_writer_that_fails_ends_the_run(tiny_hf: Callable[..., Path], data: Path, tmp_path: Path) -> None:
    """No file may grow beyond 100 kB, as if the disk were full."""
    words = ["--model", tiny_hf("llama"), "--data", data, "--out", tmp_path / "out", "--steps", 100000]
    words += ["--global-batch", 4, "--save-every", 2, "--async-save", "--cache", tmp_path / "cache"]
    done = subprocess.run(
        [BIN / "mst-train", *map(str, words)], capture_output=True, text=True, timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)),
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    assert "the disk is full" in done.stderr
    assert "step-00000002" in done.stderr
    assert not list(tmp_path.glob("out*/**/mst.json"))


def test_a_run_that_is_refused_saves_nothing_behind(tiny_hf: Callable[..., Path], data: Path, tmp_path: Path) -> None:
    """An error that ranks do not share gives the save in flight up, and waits for its thread."""

    def interrupted(engine: plain.PlainEngine, *given: Any) -> dict[str, float]:
        if engine.steps == 2:
            raise KeyboardInterrupt
        return step(engine, *given)

    step = plain.PlainEngine.step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plain.PlainEngine, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(tiny_hf("llama"), data, tmp_path / "out", async_save=True)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("save")]
    found = list((tmp_path / "out.partial").rglob("*.partial")) if (tmp_path / "out.partial").exists() else []
    assert found == []
    train(tiny_hf("llama"), data, tmp_path / "out", resume=True)
    assert manifest.read(tmp_path / "out").id
