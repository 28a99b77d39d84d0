"""Runs on several nodes: each a process of mst-train on 127.0.0.1, started by hand or as SLURM and Kubernetes do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.launch import free_port

from mst_core import checkpoint, manifest

BIN = Path(sys.executable).parent
FSDP = ["--engine", "fsdp", "--global-batch", "4", "--steps", "3", "--save-every", "2", "--precision", "fp32"]


@pytest.fixture(scope="module")
def words(tiny_hf: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    rows = [{"prompt": f"Is number {i} odd?", "completion": "yes" if i % 2 else "no"} for i in range(10)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ["--model", str(tiny_hf("llama", num_hidden_layers=2)), "--data", str(path), *FSDP]


@pytest.fixture(scope="module")
def one_node(words: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks that one process starts."""
    out = tmp_path_factory.mktemp("one") / "out"
    (run,) = start([[*words, "--nproc", "2", "--out", str(out)]])
    assert finish([run])[0][0] == 0
    return out


def start(commands: list[list[str]], envs: tuple[dict[str, str], ...] = ({}, {})) -> list[subprocess.Popen[str]]:
    return [
        subprocess.Popen(
            [BIN / "mst-train", *command],
            env={**os.environ, "OMP_NUM_THREADS": "1", **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for command, env in zip(commands, envs, strict=False)
    ]


def finish(runs: list[subprocess.Popen[str]], patience: float = 200) -> list[tuple[int, str, str]]:
    """(exit code, stdout, stderr) of each."""
    try:
        said = [run.communicate(timeout=patience) for run in runs]
        return [(run.returncode, out, err) for run, (out, err) in zip(runs, said, strict=True)]
    finally:
        for run in runs:
            run.kill()


def same(out: Path, one: Path) -> None:
    """The same weights, numbers and id, and nothing left beside it."""
    assert (out / "model.safetensors").read_bytes() == (one / "model.safetensors").read_bytes()
    rows = [[json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()] for path in (out, one)]
    for mine, other in zip(*rows, strict=True):
        assert [mine[name] for name in ("step", "loss", "grad_norm")] == [
            other[n] for n in ("step", "loss", "grad_norm")
        ]
    assert manifest.read(out).id == manifest.read(one).id
    assert checkpoint.verify(out) == []
    assert [path.name for path in out.parent.glob(f"{out.name}*")] == [out.name]


def slurm(index: int, job: str) -> dict[str, str]:
    return {"SLURM_PROCID": str(index), "SLURM_NTASKS": "2", "SLURM_LOCALID": "0", "SLURM_STEP_ID": "3",
            "SLURM_JOB_ID": job, "SLURM_JOB_NODELIST": "localhost"}  # fmt: skip


def pod(index: int, port: str) -> dict[str, str]:
    return {"RANK": str(index), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}


def test_the_printed_commands_are_the_run(words: list[str], one_node: Path, tmp_path: Path) -> None:
    """--print-launch needs no torch, and its lines, run as they are, make what one node makes."""
    asked = [*words, "--nodes=2", "--nproc=1", "--out", str(tmp_path / "out")]
    script = (
        "import sys\nfrom mst_train.cli import main\n"
        "try:\n    main()\nexcept SystemExit as stop:\n    sys.exit(9 if 'torch' in sys.modules else stop.code)"
    )
    rendezvous = f"127.0.0.1:{free_port()}"
    printed = subprocess.run(
        [sys.executable, "-c", script, *asked, "--print-launch", "--rendezvous", rendezvous],
        capture_output=True, text=True,
    )  # fmt: skip
    assert printed.returncode == 0, printed.stderr
    lines = printed.stdout.splitlines()
    assert lines[::2] == ["# node 0", "# node 1", "# or by torchrun, on each node I", "# or in a SLURM job"]
    path = f"{BIN}:{os.environ['PATH']}"
    runs = [
        subprocess.Popen(
            ["bash", "-c", line], env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
        )
        for line in lines[1:4:2]
    ]  # fmt: skip
    (code, out, err), (other, nothing, _) = finish(runs)
    assert (code, out, other, nothing) == (0, f"{tmp_path / 'out'}\n", 0, ""), err
    same(tmp_path / "out", one_node)
    # What is for another launcher asks for the same run.
    assert "--nnodes 2 --nproc-per-node 1 --node-rank $I --master-addr 127.0.0.1" in lines[5]
    assert "--no-python mst-train" in lines[5]
    assert "--nproc-per-node=1" in lines[5]  # torchrun takes --nproc for its own
    assert lines[7].startswith("srun --nodes 2 --ntasks-per-node 1 mst-train")
    assert "rendezvous" not in lines[5] + lines[7]


@pytest.mark.parametrize("launcher", ["slurm", pytest.param("slurm-nodes", marks=pytest.mark.slow), "pods", "job"])
def test_a_cluster_starts_it(launcher: str, words: list[str], one_node: Path, tmp_path: Path) -> None:
    port, hand = free_port(), ["--nodes", "2", "--rendezvous", f"127.0.0.1:{free_port()}"]
    envs, more = {
        "slurm": ([slurm(i, port) for i in range(2)], []),
        "slurm-nodes": ([slurm(i, port) for i in range(2)], ["--nodes", "2"]),
        "pods": ([pod(i, port) for i in range(2)], []),
        "job": ([{"JOB_COMPLETION_INDEX": str(i)} for i in range(2)], hand),
    }[launcher]
    ranks = "4" if launcher == "slurm-nodes" else "2"
    asked = [*words, "--out", str(tmp_path / "out"), "--nproc", str(int(ranks) // (2 if more else 1)), *more]
    (code, out, err), (other, nothing, said) = finish(start([asked, asked], tuple(envs)))
    assert (code, out, other, nothing) == (0, f"{tmp_path / 'out'}\n", 0, ""), err + said
    assert "training rows" not in said  # one process speaks
    if ranks == "2":
        same(tmp_path / "out", one_node)
    else:
        assert manifest.read(tmp_path / "out").made_by.settings["dp"] == 4


def test_a_contradiction_is_one_error(words: list[str], tmp_path: Path) -> None:
    asked = [*words, "--out", str(tmp_path / "out"), "--nproc", "3", "--global-batch", "6"]
    (code, _, err), (other, _, said) = finish(start([asked, asked], (pod(0, "1"), pod(1, "1"))))
    assert (code, other, said) == (2, 2, "")
    assert err.startswith("mst-train: error: the launcher started 2 ranks, the settings ask for 3")
    assert "--nproc 2 lets data parallel fill them" in err
    assert not list(tmp_path.iterdir())


def test_a_node_that_does_not_come(words: list[str], tmp_path: Path) -> None:
    hand = ["--nodes", "2", "--nproc", "1", "--node-rank", "1", "--rendezvous", f"127.0.0.1:{free_port()}"]
    ((code, _, err),) = finish(start([[*words, "--out", str(tmp_path / "out"), *hand, "--timeout", "5"]]))
    assert code == 5, err
    assert "node 1 of 2 did not meet the others at 127.0.0.1" in err


def test_a_node_that_dies_ends_the_other_and_what_was_saved_stands(words: list[str], tmp_path: Path) -> None:
    """Killed, it says nothing; the other one must not wait for it."""
    hand = ["--nodes", "2", "--nproc", "1", "--rendezvous", f"127.0.0.1:{free_port()}", "--steps", "100000"]
    asked = [*words, "--out", str(tmp_path / "out"), *hand, "--schedule", "constant"]
    runs = start([[*asked, "--node-rank", "0"], [*asked, "--node-rank", "1"]])
    saved = tmp_path / "out.partial" / "checkpoints" / "step-00000002"
    end = time.monotonic() + 150
    while not saved.exists() and time.monotonic() < end and runs[0].poll() is None:
        time.sleep(0.05)
    runs[1].send_signal(signal.SIGKILL)
    (code, _, err), _ = finish(runs)
    assert code == 5, err
    assert "another node ended without a word" in err
    assert "is saved, --resume goes on from it" in err
    kept = sorted((tmp_path / "out.partial" / "checkpoints").glob("step-*"))
    assert checkpoint.verify(next(path for path in reversed(kept) if (path / "mst.json").exists())) == []


def hanging(folder: Path, rank: int = 1, does: str = "time.sleep(600)") -> dict[str, str]:
    """The environment of a run whose ``rank`` does something instead of a step."""
    (folder / "sitecustomize.py").write_text(
        "import os, signal, time\nfrom mst_core.engine import schedule\nlr = schedule.lr\n\n\n"
        f"def hang(step, **known):\n    if os.environ.get('RANK') == '{rank}':\n        {does}\n"
        "    return lr(step, **known)\n\n\nschedule.lr = hang\n"
    )
    return {"PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}"}


@pytest.mark.parametrize(
    ("rank", "does", "says"),
    [
        (1, "time.sleep(600)", ", for rank 1, which stands in hang ("),
        pytest.param(0, "time.sleep(600)", ", for rank 0, which stands in hang (", marks=pytest.mark.slow),
        # The store is in the stopped process: nobody can ask.
        pytest.param(0, "os.kill(os.getpid(), signal.SIGSTOP)", ", in summed)\n", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_hangs_in_a_cluster_is_named(
    rank: int, does: str, says: str, words: list[str], tmp_path: Path
) -> None:
    env, port = hanging(tmp_path, rank, does), free_port()
    asked = [*words, "--out", str(tmp_path / "out"), "--nproc", "2", "--timeout", "8"]
    runs = start([asked, asked], tuple({**env, **slurm(i, port)} for i in range(2)))
    try:
        _, err = runs[1 - rank].communicate(timeout=200)
        assert (runs[1 - rank].returncode, runs[rank].poll()) == (5, None), err  # srun would end it
        assert f"mst-train: error: rank {1 - rank} waited 8 s in " in err
        assert says in err
    finally:
        for run in runs:
            run.kill()


def test_a_rank_that_hangs_on_another_node_is_named(words: list[str], tmp_path: Path) -> None:
    env = hanging(tmp_path)
    hand = ["--nodes", "2", "--nproc", "1", "--rendezvous", f"127.0.0.1:{free_port()}", "--timeout", "8"]
    asked = [*words, "--out", str(tmp_path / "out"), *hand]
    found = finish(start([[*asked, "--node-rank", "0"], [*asked, "--node-rank", "1"]], (env, env)))
    for code, _, err in found:
        assert code == 5, err
        assert "error: rank 0 waited 8 s in " in err
        assert ", for rank 1, which stands in hang (" in err
    assert not list(tmp_path.glob("out*"))
