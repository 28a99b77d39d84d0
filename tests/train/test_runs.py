"""Runs that survive: what goes on after a kill ends with the same bytes, the same id and the same numbers."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.train import running

from mst_core import checkpoint, manifest, resume
from mst_core.engine import saves
from mst_core.errors import InputError, Stopped

BIN = Path(sys.executable).parent
KILLS, SAMPLED = 50, 1
STEPS = 6
ENGINES = {
    "plain": [],
    "plain-lora": ["--lora-rank", "2"],
    "plain-async": ["--async-save"],
    "megatron": ["--pp", "2"],
    "megatron-async": ["--nproc", "2", "--distributed-optimizer", "--precision", "bf16", "--async-save"],
    "megatron-bf16": ["--nproc", "2", "--distributed-optimizer", "--precision", "bf16"],
    "megatron-lora": ["--tp", "2", "--lora-rank", "2"],
    "fsdp": ["--engine", "fsdp", "--nproc", "2"],
    "fsdp-async": ["--engine", "fsdp", "--nproc", "2", "--async-save"],
    "deepspeed-async": ["--engine", "deepspeed", "--nproc", "2", "--zero", "2", "--async-save"],
    "deepspeed": ["--engine", "deepspeed", "--nproc", "2", "--zero", "2", "--precision", "bf16"],
}


@pytest.fixture(scope="module")
def models(tiny_hf: Callable[..., Path], mst: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    hf = tiny_hf("llama")
    megatron = tmp_path_factory.mktemp("models") / "megatron"
    mst("mst-convert", "--model", hf, "--to", "megatron", "--out", megatron)
    return {"plain": hf, "fsdp": hf, "deepspeed": hf, "megatron": megatron}


train = partial(running.train, steps=STEPS)


def command(engine: str, models: dict[str, Path], data: Path, out: Path) -> list[str]:
    words = ["--model", models[engine.partition("-")[0]], "--data", data, "--out", out, "--steps", STEPS]
    fixed = ["--global-batch", 4, "--lr", 3e-3, "--save-every", 2, *ENGINES[engine]]
    return [str(BIN / "mst-train"), *map(str, words), *map(str, fixed)]


def start(words: list[str]) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def wait_for(path: Path, running: subprocess.Popen[str], patience: float = 200) -> None:
    end = time.monotonic() + patience
    while not path.exists() and running.poll() is None and time.monotonic() < end:
        time.sleep(0.02)


def losses(out: Path) -> list[tuple[float, float, float, float]]:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["loss"], row["grad_norm"], row["lr"]) for row in rows]


def same_run(out: Path, whole: Path) -> None:
    """The same id (of weights and settings), and the same numbers of every step."""
    assert manifest.read(out).id == manifest.read(whole).id
    assert losses(out) == losses(whole)
    assert checkpoint.verify(out) == []
    assert [path.name for path in out.parent.glob(f"{out.name}*")] == [out.name]


@pytest.mark.parametrize("engine", ENGINES)
def test_killed_and_resumed_is_as_if_it_had_not_been(
    engine: str, models: dict[str, Path], data: Path, tmp_path: Path
) -> None:
    whole = command(engine, models, data, tmp_path / "whole")
    subprocess.run(whole, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    words = command(engine, models, data, tmp_path / "out")
    running = start(words)
    # One that is written behind the training may appear when nothing is left to do.
    step = 2 if "--async-save" in words else 4
    wait_for(tmp_path / "out.partial" / "checkpoints" / resume.name_of(step), running)
    running.kill()
    running.communicate()
    assert not (tmp_path / "out").exists()
    assert (resume.stopped_at(tmp_path / "out") or 0) >= step
    again = start([*words, "--resume"])
    _, err = again.communicate(timeout=300)
    assert again.returncode == 0, err
    assert "goes on after step" in err
    same_run(tmp_path / "out", tmp_path / "whole")


def test_a_run_goes_on_under_another_layout(models: dict[str, Path], data: Path, mst: Any, tmp_path: Path) -> None:
    """Four steps on two tensor parallel ranks and two on two pipeline stages are six of the plain engine."""
    fixed = ["--model", models["plain"], "--data", data, "--engine", "megatron", "--out", tmp_path / "out"]
    fixed += ["--global-batch", 4, "--lr", 3e-3, "--schedule", "constant", "--keep-state"]
    mst("mst-train", *fixed, "--steps", 4, "--tp", 2)
    refused = mst("mst-train", *fixed, "--steps", STEPS, "--pp", 2, "--resume", "--lora-rank", 2, code=3)
    assert "lora_rank was null, is 2" in refused.stderr
    mst("mst-train", *fixed, "--steps", STEPS, "--pp", 2, "--resume")
    train(models["plain"], data, tmp_path / "whole", schedule="constant")
    found, wanted = losses(tmp_path / "out")[-2:], losses(tmp_path / "whole")[-2:]
    assert [row[0] for row in found] == [5, 6]
    assert max(abs(a[1] - b[1]) for a, b in zip(found, wanted, strict=True)) <= 1e-5
    made = manifest.read(tmp_path / "out").made_by.settings
    assert (made["tp"], made["pp"]) == (1, 2)


def kill_anywhere(engine: str, models: dict[str, Path], data: Path, tmp_path: Path, seed: int) -> None:
    """A run that is killed at up to three random moments after its first save, at whatever it does then."""
    chosen = random.Random(seed)
    words = [*command(engine, models, data, tmp_path / "out"), "--save-every", "1", "--steps", "8"]
    for _ in range(chosen.choice([1, 2, 3])):
        before = resume.stopped_at(tmp_path / "out") or 0
        running = start([*words, "--resume"])
        wait_for(tmp_path / "out.partial" / "checkpoints" / resume.name_of(before + 1), running)
        time.sleep(chosen.random())
        running.kill()
        running.communicate()
        if (tmp_path / "out").exists():
            break
        now = resume.stopped_at(tmp_path / "out")
        assert now is not None
        assert now > before  # no step lost beyond the last save
    else:
        last = start([*words, "--resume"])
        assert last.wait(300) == 0, last.communicate()[1]
    assert checkpoint.verify(tmp_path / "out") == []
    reference = tmp_path.parent / f"reference-{engine}"
    if not reference.exists():
        subprocess.run([*words, "--out", str(reference)], check=True, capture_output=True)
    same_run(tmp_path / "out", reference)


@pytest.mark.parametrize("engine", ["plain", "megatron"])
@pytest.mark.parametrize("seed", range(SAMPLED))
def test_random_kills(engine: str, seed: int, models: dict[str, Path], data: Path, tmp_path: Path) -> None:
    kill_anywhere(engine, models, data, tmp_path, seed)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["plain", "plain-async", "megatron", "megatron-async"])
@pytest.mark.parametrize("seed", range(SAMPLED, KILLS))
def test_random_kills_whole_count(engine: str, seed: int, models: dict[str, Path], data: Path, tmp_path: Path) -> None:
    kill_anywhere(engine, models, data, tmp_path, seed)


@pytest.mark.parametrize("engine", ["plain", "plain-async", "megatron", "megatron-async"])
def test_sigterm_saves_and_ends_with_code_6(engine: str, models: dict[str, Path], data: Path, tmp_path: Path) -> None:
    words = command(engine, models, data, tmp_path / "out")
    words = [*words, "--steps", "100000", "--save-every", "99999", "--schedule", "constant", "--warmup", "0"]
    running = start(words)
    wait_for(tmp_path / "out.partial" / "metrics.jsonl", running)
    time.sleep(1)
    running.send_signal(signal.SIGTERM)
    out, err = running.communicate(timeout=100)
    assert running.returncode == 6, err
    assert out == ""
    assert "stopped by SIGTERM after step" in err
    assert "--resume goes on" in err
    step = resume.stopped_at(tmp_path / "out")
    assert step is not None
    assert f"after step {step} of 100000" in err
    found = tmp_path / "out.partial" / "checkpoints" / resume.name_of(step)
    assert checkpoint.verify(found) == []
    if engine.startswith("plain"):  # a step's checkpoint is a model for the next tool
        train(found, data, tmp_path / "next", steps=1)


@pytest.fixture
def stopped(models: dict[str, Path], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The --out of a run that was stopped after step 4; 2 and 4 are saved."""
    save = saves.Saves.save

    def cut(self: saves.Saves, step: int, done: Any) -> None:
        save(self, step, done)
        if step == 4:
            raise Stopped("stopped")

    monkeypatch.setattr(saves.Saves, "save", cut)
    with pytest.raises(Stopped):
        train(models["plain"], data, tmp_path / "out", save_every=2)
    monkeypatch.undo()
    return tmp_path / "out"


def test_a_stopped_run_is_not_started_again_by_mistake(stopped: Path, models: dict[str, Path], data: Path) -> None:
    with pytest.raises(InputError, match="was stopped, and step 4 is saved") as caught:
        train(models["plain"], data, stopped)
    assert "--resume goes on, --overwrite starts again" in str(caught.value.hint)
    train(models["plain"], data, stopped, overwrite=True)
    assert losses(stopped)[0][0] == 1


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"lr": 1e-3}, "lr was 0.003, is 0.001"),
        ({"steps": 9}, "steps was 6, is 9"),
        ({"schedule": "constant"}, 'schedule was "cosine", is "constant"'),
        ({"lora_rank": 2}, "lora_rank was null, is 2"),
        ({"seed": 5}, "seed was 0, is 5"),
    ],
)
def test_other_settings_are_refused_by_name(
    stopped: Path, models: dict[str, Path], data: Path, settings: dict[str, Any], told: str
) -> None:
    with pytest.raises(InputError, match="cannot be resumed with other settings") as caught:
        train(models["plain"], data, stopped, resume=True, **settings)
    assert told in caught.value.what


def test_other_rows_or_another_model_are_refused_by_name(
    stopped: Path, models: dict[str, Path], data: Path, tiny_hf: Callable[..., Path], tmp_path: Path
) -> None:
    other = tmp_path / "rows.jsonl"
    other.write_text(data.read_text().replace("yes", "Yes"))
    with pytest.raises(InputError, match=r"data 1 was blake3:\w+…, is blake3:"):
        train(models["plain"], other, stopped, resume=True)
    with pytest.raises(InputError, match=r"base 0 was blake3:\w+…, is blake3:"):
        train(tiny_hf("llama", seed=7), data, stopped, resume=True)


def test_a_broken_checkpoint_is_named_and_passed_over(
    stopped: Path, models: dict[str, Path], data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = stopped.with_name("out.partial") / "checkpoints" / "step-00000004" / "state" / "state.pt"
    state.write_bytes(state.read_bytes()[:-100])
    train(models["plain"], data, stopped, resume=True)
    err = capsys.readouterr().err
    assert "step-00000004 is broken and passed over: state/state.pt" in err
    assert "goes on after step 2 of 6" in err
    whole = train(models["plain"], data, stopped.with_name("whole"))
    assert manifest.read(stopped).id == whole["id"]


def test_broken_ones_that_are_newer_do_not_count_as_kept(stopped: Path, models: dict[str, Path], data: Path) -> None:
    """They would push out the whole ones."""
    folder = stopped.with_name("out.partial") / "checkpoints"
    shutil.copytree(folder / "step-00000004", folder / "step-00000005")
    for name in ("step-00000004", "step-00000005"):
        (folder / name / "mst.json").unlink()
    seen: list[list[int]] = []
    save = saves.Saves.save

    def watched(self: saves.Saves, step: int, done: Any) -> None:
        save(self, step, done)
        seen.append([number for number, _ in resume.steps_in(folder)])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saves.Saves, "save", watched)
        train(models["plain"], data, stopped, resume=True, save_every=1, keep=1)
    assert [step[0] for step in seen] == [3, 4, 5]


def test_checkpoints_that_a_kill_left_beside_the_output(models: dict[str, Path], data: Path, tmp_path: Path) -> None:
    out, away = tmp_path / "out", tmp_path / f"out{resume.AWAY}"
    constant = {"schedule": "constant", "warmup": 0.0}
    train(models["plain"], data, out, steps=2, keep_state=True, **constant)
    (away / "step-00000001").mkdir(parents=True)
    train(models["plain"], data, out, resume=True, steps=3, **constant)
    assert not away.exists()
    (away / "step-00000001").mkdir(parents=True)
    train(models["plain"], data, out, overwrite=True, steps=3, save_every=1, **constant)
    assert not away.exists()


def test_it_keeps_the_newest(models: dict[str, Path], data: Path, tmp_path: Path) -> None:
    seen: list[list[int]] = []
    save = saves.Saves.save

    def watched(self: saves.Saves, step: int, done: Any) -> None:
        save(self, step, done)
        seen.append([number for number, _ in resume.steps_in(tmp_path / "out.partial" / "checkpoints")])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saves.Saves, "save", watched)
        train(models["plain"], data, tmp_path / "out", save_every=1, keep=2)
    assert seen == [[1], [1, 2], [2, 3], [3, 4], [4, 5]]
    assert not (tmp_path / "out" / "checkpoints").exists()


def test_a_finished_run_whose_state_was_kept_is_extended(models: dict[str, Path], data: Path, tmp_path: Path) -> None:
    constant = {"schedule": "constant", "warmup": 0.0}
    train(models["plain"], data, tmp_path / "whole", **constant)
    train(models["plain"], data, tmp_path / "out", steps=4, keep_state=True, **constant)
    assert checkpoint.verify(tmp_path / "out") == []
    with pytest.raises(InputError, match="has done its 4 steps"):
        train(models["plain"], data, tmp_path / "out", resume=True, steps=4, **constant)
    train(models["plain"], data, tmp_path / "out", resume=True, **constant)
    assert manifest.read(tmp_path / "out").id == manifest.read(tmp_path / "whole").id


def test_a_kill_while_the_output_appears_loses_nothing(
    stopped: Path, models: dict[str, Path], data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between putting the checkpoints aside and the rename: they are found there."""
    away = stopped.with_name(stopped.name + resume.AWAY)
    (stopped.with_name("out.partial") / "checkpoints").rename(away)
    assert resume.stopped_at(stopped) == 4
    train(models["plain"], data, stopped, resume=True)
    assert not away.exists()
    assert [row[0] for row in losses(stopped)] == [1, 2, 3, 4, 5, 6]


def test_nothing_to_go_on_from_is_a_start(
    models: dict[str, Path], data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(models["plain"], data, tmp_path / "out", resume=True, steps=1)
    assert "nothing to go on from" in capsys.readouterr().err
