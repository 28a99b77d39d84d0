"""SIGKILL at any write, fsync or rename of a merge: the output is whole or not there, and the same command ends with
the same id.

A merge starts from the beginning: what a killed one left is never accepted, and the next one clears it.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.convert.test_layouts import convert, make
from tests.convert.test_merge import make_adapter

from mst_convert.merge import plan as planning
from mst_convert.merge.spec import MergeSpec
from mst_core import checkpoint, manifest
from mst_core.errors import InputError

KILLS, SAMPLED = 100, 4
FORKS = """
import json, os, signal, sys
import torch
torch.set_num_threads(1)
import mst_convert.merge.work
from mst_convert.merge.cli import main
from mst_core import checkpoint

def counting(left):
    def step():
        step.done += 1
        if step.done > left:
            os.kill(os.getpid(), signal.SIGKILL)
    step.done = 0
    def around(call):
        def counted(*words):
            step()
            result = call(*words)
            step()
            return result
        return counted
    os.write, os.fsync, checkpoint._rename = around(os.write), around(os.fsync), around(checkpoint._rename)
    return step

for line in sys.stdin:
    after, words = json.loads(line)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        sys.stdin, sys.stdout = open(os.devnull), open(os.devnull, "w")
        sys.argv = ["mst-merge", *words]
        write, step, code = os.write, counting(after), 0
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
        write(writing, str(step.done).encode())
        os._exit(code)
    os.close(writing)
    said = os.read(reading, 20)
    os.close(reading)
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), int(said or 0)]), flush=True)
"""
"""mst-merge in a fork for each line of stdin, killed after so many steps; prints exit code and steps."""
Run = Callable[[int, list[object]], tuple[int, int]]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Merges in forks of one process that has torch already: a hundred kills in the time of ten starts."""
    process = subprocess.Popen([sys.executable, "-c", FORKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    stdin, stdout = process.stdin, process.stdout
    assert stdin is not None
    assert stdout is not None

    def ask(after: int, words: list[object]) -> tuple[int, int]:
        stdin.write(json.dumps([after, [str(word) for word in words]]) + "\n")
        stdin.flush()
        code, steps = json.loads(stdout.readline())
        return code, steps

    yield ask
    stdin.close()
    assert process.wait(60) == 0


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bases in both layouts, and an adapter for each."""
    folder = tmp_path_factory.mktemp("kills")
    for name in ("llama", "qwen3-moe"):
        make(folder / name, name)
        convert(model=folder / name, to="megatron", out=folder / f"{name}-megatron")
        make_adapter(folder / f"{name}-adapter", folder / name)
    return folder


def kill_and_repeat(inputs: Path, tmp_path: Path, run: Run, seed: int) -> int:
    """One merge, killed up to three times, at times over an older output. The number of kills that hit it."""
    chosen = random.Random(seed)
    name, source = chosen.choice(["llama", "qwen3-moe"]), chosen.choice(["", "-megatron"])
    to, out = chosen.choice(["hf", "megatron"]), tmp_path / "out"
    shards = ["--max-shard-size", 20_000] if to == "hf" else []
    words = ["--model", inputs / f"{name}{source}", "--adapter", inputs / f"{name}-adapter", "--to", to, *shards]
    code, steps = run(1 << 40, [*words, "--out", tmp_path / "whole"])
    assert code == 0
    whole, older = manifest.read(tmp_path / "whole").id, None
    if chosen.random() < 0.3:
        assert run(1 << 40, [*words, "--weights", 0.5, "--out", out])[0] == 0
        words, older = [*words, "--overwrite"], manifest.read(out).id
    killed = 0
    for _ in range(chosen.choice([1, 1, 2, 3])):
        # Half of the kills near the end, where the directory appears.
        after = chosen.choice([chosen.randrange(steps), steps - 1 - chosen.randrange(16)])
        code, _ = run(after, [*words, "--out", out])
        assert code == -9
        killed += 1
        if out.exists():
            assert checkpoint.verify(out) == []
            assert manifest.read(out).id in (whole, older)
        else:
            assert older is None
        if (tmp_path / "out.partial").exists():
            half = MergeSpec(model=str(tmp_path / "out.partial"), adapter=(str(inputs / f"{name}-adapter"),), out=out)
            with pytest.raises(InputError):
                planning.plan(half)
        if out.exists() and older is None:  # killed after it had appeared
            shutil.rmtree(out)
    assert run(1 << 40, [*words, "--out", out])[0] == 0
    assert manifest.read(out).id == whole
    assert checkpoint.verify(out) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "whole"]
    return killed


@pytest.mark.parametrize("seed", range(SAMPLED))
def test_a_killed_merge_leaves_nothing_half(inputs: Path, tmp_path: Path, run: Run, seed: int) -> None:
    kill_and_repeat(inputs, tmp_path, run, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(SAMPLED, KILLS))
def test_a_killed_merge_leaves_nothing_half_whole_count(inputs: Path, tmp_path: Path, run: Run, seed: int) -> None:
    kill_and_repeat(inputs, tmp_path, run, seed)
