"""What a launcher says of this process: one of how many, which, and where the first one listens.

The only file that reads these variables:

    torchrun           RANK, WORLD_SIZE, LOCAL_RANK; TORCHELASTIC_RUN_ID tells it apart. Each process is a rank
    SLURM's srun       SLURM_PROCID, SLURM_STEP_NUM_TASKS (or SLURM_NTASKS), SLURM_LOCALID, SLURM_STEP_NODELIST
    PyTorchJob         RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT; PET_NODE_RANK, PET_NNODES, PET_MASTER_* (v2)
    indexed jobs       JOB_COMPLETION_INDEX; --nodes and --rendezvous (or WORLD_SIZE and MASTER_*) tell the rest

A process that was started as one of N is a rank where the run has N ranks, else a node that starts its share of them.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from mst_core import console
from mst_core.errors import SettingsError


@dataclass(frozen=True)
class Started:
    """What the environment says. ``count`` None: only the index is known. ``rank``: it is a rank and never a node."""

    by: str
    count: int | None
    index: int
    local: int
    address: str | None
    rank: bool = False


@dataclass(frozen=True)
class Place:
    """Which part of a run this process is.

    ranks       of the whole run
    index       among the processes that were started; the one with 0 speaks
    as_rank     it is a rank itself, number ``index``; else it starts ``ranks / nodes`` of them
    nodes       how many processes start ranks; with one, nothing has to be met
    local       as a rank: its number on this machine
    rendezvous  host:port where the first process listens
    """

    ranks: int
    index: int = 0
    as_rank: bool = False
    nodes: int = 1
    local: int = 0
    rendezvous: str | None = None


def place(ranks: int, nodes: int = 1, node_rank: int | None = None, rendezvous: str | None = None) -> Place:
    """Where this process stands in a run of ``ranks``, by its launcher or by --nodes, --node-rank and --rendezvous.

    Raises SettingsError where they contradict each other, or the number of ranks.
    """
    found = started()
    if found is not None and found.count is not None and (found.count > 1 or found.rank):
        if node_rank is not None:
            what = f"--node-rank is for starting by hand, and {found.by} started this process as {found.index}"
            raise SettingsError(f"{what} of {found.count}", hint="leave it out")
        address = rendezvous or found.address
        if found.count == ranks:
            return Place(ranks, found.index, as_rank=True, local=found.local, rendezvous=address)
        if not found.rank and address and ranks % found.count == 0 and nodes in (1, found.count):
            return Place(ranks, found.index, nodes=found.count, rendezvous=address)
        raise _contradiction(found.by, found.count, ranks, nodes)
    if nodes == 1:
        if node_rank or rendezvous:
            raise SettingsError("--node-rank and --rendezvous need --nodes of 2 or more")
        return Place(ranks)
    index = found.index if node_rank is None and found is not None and found.count is None else node_rank
    if index is None or rendezvous is None:
        hint = "--print-launch prints a command for each; torchrun, SLURM and Kubernetes' PyTorchJob tell them"
        raise SettingsError(f"--nodes {nodes} needs --node-rank and --rendezvous HOST:PORT on each of them", hint=hint)
    if index >= nodes:
        raise SettingsError(f"--node-rank {index} of --nodes {nodes}: they count from 0")
    return Place(ranks, index, nodes=nodes, rendezvous=rendezvous)


def _contradiction(by: str, count: int, ranks: int, nodes: int) -> SettingsError:
    flag = "--nproc-per-node" if by == "torchrun" else "--nproc"  # see commands
    hint = f"{flag} {max(1, count // nodes)} lets data parallel fill them"
    if ranks == 1:
        hint = "the plain engine is one process; --engine fsdp, deepspeed or megatron with --nproc uses more"
    return SettingsError(f"{by} started {count} ranks, the settings ask for {ranks}", hint=hint)


def started() -> Started | None:
    """What launched this process; None if nothing did."""
    env = os.environ
    host, port = env.get("MASTER_ADDR"), env.get("MASTER_PORT")
    address = f"{host}:{port}" if host and port else None
    if "RANK" in env and "TORCHELASTIC_RUN_ID" in env:
        return Started("torchrun", _number(env, "WORLD_SIZE"), _number(env, "RANK"), local_rank(), address, rank=True)
    if "PET_NODE_RANK" in env and env.get("PET_NNODES", "").isdigit():
        master = (env.get("PET_MASTER_ADDR") or host, env.get("PET_MASTER_PORT") or port)
        address = ":".join(map(str, master)) if all(master) else None
        return Started("the PyTorchJob", _number(env, "PET_NNODES"), _number(env, "PET_NODE_RANK"), 0, address)
    if "RANK" in env and "WORLD_SIZE" in env:
        return Started("the launcher", _number(env, "WORLD_SIZE"), _number(env, "RANK"), local_rank(), address)
    if "SLURM_PROCID" in env:
        return _slurm(env, address)
    if "JOB_COMPLETION_INDEX" in env:
        index = _number(env, "JOB_COMPLETION_INDEX")
        return Started("the job", _number(env, "WORLD_SIZE") if "WORLD_SIZE" in env else None, index, 0, address)
    return None


def _slurm(env: Mapping[str, str], address: str | None) -> Started | None:
    # A batch script knows SLURM_NTASKS only where sbatch was given --ntasks.
    count = _number(env, "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS", 1)
    # Steps above are not srun's: SLURM numbers the batch script and an interactive shell from 0xfffffff0.
    if _number(env, "SLURM_STEP_ID", 1 << 31) >= 1 << 31:
        if count > 1:
            console.warn(f"SLURM gave {count} tasks, but srun did not start this one: it trains on this machine alone")
        return None
    hosts = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST")
    if address is None and hosts:
        # A port of its own for each step of each job, the same on all tasks.
        job, step = _number(env, "SLURM_JOB_ID", 0), _number(env, "SLURM_STEP_ID")
        address = f"{first_host(hosts)}:{15000 + (job * 7 + step) % 10000}"
    return Started("srun", count, _number(env, "SLURM_PROCID"), _number(env, "SLURM_LOCALID", 0), address)


def first_host(hosts: str) -> str:
    """The first of SLURM's list of hosts: ``gpu[03-10,12]-ib,cpu1`` is gpu03-ib and others."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", hosts)
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0]) if first else hosts


def silent() -> bool:
    """Whether another process of the run says what is wrong with settings that all of them have."""
    try:
        found = started()
    except SettingsError:
        return False
    return found is not None and found.index > 0 and (found.count or 0) > 1


def adopt(where: Place) -> None:
    """Say in torchrun's variables, which torch and the engines read, what another launcher said of this rank."""
    told = {"RANK": str(where.index), "WORLD_SIZE": str(where.ranks), "LOCAL_RANK": str(where.local)}
    if where.rendezvous:
        told["MASTER_ADDR"], _, told["MASTER_PORT"] = where.rendezvous.rpartition(":")
    os.environ.update(told)


def rank() -> int:
    """This process among the ranks of its run; 0 in a run of one process."""
    return _number(os.environ, "RANK", 0)


def local_rank() -> int:
    """Its number on this machine, by which it takes a device; its rank where no launcher says it."""
    return _number(os.environ, "LOCAL_RANK", rank())


def _number(env: Mapping[str, str], name: str, otherwise: int | None = None) -> int:
    value = env.get(name, "" if otherwise is None else str(otherwise))
    if not value.isdigit():
        raise SettingsError(f"the launcher's {name} is {value!r}, not a number")
    return int(value)


def commands(prog: str, words: list[str], nodes: int, nproc: int, rendezvous: str | None) -> str:
    """What to type for ``nodes`` nodes of ``nproc`` ranks: ``prog`` with its ``words`` on each, or other launchers."""
    command = shlex.join([prog, *words])
    if nodes == 1:
        return command
    if rendezvous is None:
        raise SettingsError("--print-launch needs --rendezvous HOST:PORT: the first node, and a free port there")
    host, _, port = rendezvous.rpartition(":")
    lines = [f"# node {node}\n{command} --node-rank {node} --rendezvous {rendezvous}" for node in range(nodes)]
    torchrun = f"torchrun --nnodes {nodes} --nproc-per-node {nproc} --node-rank $I --master-addr {host}"
    # torchrun's parser takes --nproc, wherever it stands, for a short form of two of its own flags.
    command_there = shlex.join([prog, *(re.sub(r"^--nproc(?=$|=)", "--nproc-per-node", word) for word in words)])
    lines.append(f"# or by torchrun, on each node I\n{torchrun} --master-port {port} --no-python {command_there}")
    lines.append(f"# or in a SLURM job\nsrun --nodes {nodes} --ntasks-per-node 1 {command}")
    return "\n".join(lines)
