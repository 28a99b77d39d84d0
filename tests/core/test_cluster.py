"""What launchers say, and what a process makes of it."""

from __future__ import annotations

import pytest

from mst_core import cluster
from mst_core.cluster import Place
from mst_core.errors import SettingsError

LAUNCHERS = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "PET_NODE_RANK",
    "PET_NNODES", "PET_MASTER_ADDR", "PET_MASTER_PORT", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS",
    "SLURM_STEP_ID", "SLURM_LOCALID", "SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_STEP_NODELIST",
    "JOB_COMPLETION_INDEX",
)  # fmt: skip
TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "a",
            "MASTER_PORT": "1"}  # fmt: skip
SRUN = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "1234",
        "SLURM_JOB_NODELIST": "gpu[03-04,7]-ib,cpu1"}  # fmt: skip
POD = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
POD2 = {"PET_NODE_RANK": "1", "PET_NNODES": "2", "PET_MASTER_ADDR": "job-0", "PET_MASTER_PORT": "29400", "RANK": "1",
        "WORLD_SIZE": "16"}  # fmt: skip
BY_HAND = (2, 1, "h:9")


@pytest.fixture
def env(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    ("said", "asked", "place"),
    [
        ({}, (8,), Place(8)),
        ({}, (8, *BY_HAND), Place(8, 1, nodes=2, rendezvous="h:9")),
        (TORCHRUN, (8,), Place(8, 5, as_rank=True, local=1, rendezvous="a:1")),
        ({**TORCHRUN, **SRUN}, (8, 2), Place(8, 5, as_rank=True, local=1, rendezvous="a:1")),
        (SRUN, (8,), Place(8, 5, as_rank=True, local=1, rendezvous="gpu03-ib:23638")),
        (SRUN, (32,), Place(32, 5, nodes=8, rendezvous="gpu03-ib:23638")),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "4"}, (32, 4), Place(32, 5, nodes=4, rendezvous="gpu03-ib:23638")),
        ({**SRUN, "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, (4,), Place(4)),
        ({**SRUN, "SLURM_STEP_ID": "4294967291"}, (4,), Place(4)),
        ({"SLURM_PROCID": "0", "SLURM_JOB_ID": "1234"}, (4,), Place(4)),  # a batch script, sbatch without --ntasks
        (POD, (2,), Place(2, 1, as_rank=True, local=1, rendezvous="job-master-0:23456")),
        (POD, (16, 2), Place(16, 1, nodes=2, rendezvous="job-master-0:23456")),
        (POD2, (16,), Place(16, 1, nodes=2, rendezvous="job-0:29400")),
        ({"JOB_COMPLETION_INDEX": "1"}, (16, 2, None, "h:9"), Place(16, 1, nodes=2, rendezvous="h:9")),
        ({"JOB_COMPLETION_INDEX": "3"}, (1,), Place(1)),
        ({**POD, "JOB_COMPLETION_INDEX": "1"}, (4,), Place(4, 1, nodes=2, rendezvous="job-master-0:23456")),
    ],
)
def test_where_a_process_stands(env: pytest.MonkeyPatch, said: dict[str, str], asked: tuple[int], place: Place) -> None:
    for name, value in said.items():
        env.setenv(name, value)
    assert cluster.place(*asked) == place


@pytest.mark.parametrize(
    ("said", "asked", "says"),
    [
        (TORCHRUN, (16,), "torchrun started 8 ranks, the settings ask for 16"),
        (SRUN, (12,), "srun started 8 ranks, the settings ask for 12"),
        (SRUN, (32, 4), "srun started 8 ranks, the settings ask for 32"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, (4,), "the launcher started 2 ranks, the settings ask for 4"),
        (TORCHRUN, (8, *BY_HAND), "--node-rank is for starting by hand, and torchrun started this process as 5 of 8"),
        ({**TORCHRUN, "RANK": "x"}, (8,), "the launcher's RANK is 'x', not a number"),
        ({}, (8, 2), "--nodes 2 needs --node-rank and --rendezvous HOST:PORT on each of them"),
        ({}, (8, 2, 2, "h:9"), "--node-rank 2 of --nodes 2: they count from 0"),
        ({}, (8, 1, 1, "h:9"), "--node-rank and --rendezvous need --nodes of 2 or more"),
    ],
)
def test_contradictions(env: pytest.MonkeyPatch, said: dict[str, str], asked: tuple[int], says: str) -> None:
    for name, value in said.items():
        env.setenv(name, value)
    with pytest.raises(SettingsError) as caught:
        cluster.place(*asked)
    assert caught.value.what == says


def test_a_batch_script_is_not_srun(env: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in {**SRUN, "SLURM_STEP_ID": "4294967291"}.items():
        env.setenv(name, value)
    assert cluster.started() is None
    assert "srun did not start this one" in capsys.readouterr().err


def test_a_rank_takes_over_what_torch_reads(env: pytest.MonkeyPatch) -> None:
    for name, value in SRUN.items():
        env.setenv(name, value)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        env.setenv(name, "")  # so that what adopt sets is undone
        env.delenv(name)
    cluster.adopt(cluster.place(8))
    assert (cluster.rank(), cluster.local_rank()) == (5, 1)
    env.delenv("SLURM_PROCID")
    assert cluster.started() == cluster.Started("the launcher", 8, 5, 1, "gpu03-ib:23638")


@pytest.mark.parametrize(
    ("hosts", "first"),
    [("n1", "n1"), ("n1,n2", "n1"), ("n[08-11,13]", "n08"), ("r[0-1]n[2,4],x", "r0n2"), ("a-1,b[1-2]", "a-1")],
)
def test_the_first_host(hosts: str, first: str) -> None:
    assert cluster.first_host(hosts) == first
