"""Which engine, and how its ranks are started.

A run that needs several processes (or Megatron's process groups) is started by torch's elastic launcher on this
machine, or, when torchrun or a cluster's launcher already started us, simply runs: RANK and WORLD_SIZE say so. This
is the only file that reads those variables.
"""

from __future__ import annotations

import ctypes
import logging
import os
import pickle
import signal
import sys
import tempfile
import uuid
import warnings
from pathlib import Path
from typing import Any

from mst_core.cli import load
from mst_core.engine.seam import Engine
from mst_core.errors import InputError, MissingPackage, MstError, RunError, Stopped
from mst_core.runspec import RunSpec

ENGINES = {
    "plain": "mst_core.engine.plain:PlainEngine",
    "megatron": "mst_core.engine.megatron.engine:MegatronEngine",
}
EXTRAS = {"megatron": "pip install 'mst-tools-core[megatron]'", "plain": "pip install 'mst-tools-core[engine]'"}
_PR_SET_PDEATHSIG = 1


def make_engine(name: str, spec: RunSpec, model_dir: Path) -> Engine:
    """The engine by name. Raises MissingPackage with the line that installs what it needs."""
    try:
        engine: Engine = load(ENGINES[name])(spec, model_dir)
    except MissingPackage as error:
        raise MissingPackage(error.what, hint=EXTRAS[name]) from error
    except ModuleNotFoundError as error:
        raise MissingPackage(f"the package {error.name} is needed here", hint=EXTRAS[name]) from error
    return engine


def under_launcher() -> bool:
    """Whether torchrun or another launcher started this process as one of its ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def run_ranks(function: str, engine: str, ranks: int, *arguments: Any) -> Any:
    """``function`` ("module:name") on every rank; what it returns on rank 0.

    Raises the MstError that a rank raised, RunError if a rank died, Stopped on SIGTERM or Ctrl-C. Under a launcher
    the ranks other than 0 end here with exit code 0: only one process prints a result.
    """
    if under_launcher():
        world = int(os.environ["WORLD_SIZE"])
        if world != ranks:
            raise InputError(f"the launcher started {world} ranks, the settings ask for {ranks}", hint="set --nproc")
        result = load(function)(*arguments)
        if os.environ["RANK"] != "0":
            raise SystemExit(0)
        return result
    if engine == "plain":
        return load(function)(*arguments)
    return _elastic(function, ranks, arguments)


def _elastic(function: str, ranks: int, arguments: tuple[Any, ...]) -> Any:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    if "OMP_NUM_THREADS" not in os.environ:
        # Ranks on one machine share its cores; more threads than cores is several times slower.
        os.environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // ranks))
    with tempfile.TemporaryDirectory(prefix="mst-ranks-") as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            max_restarts=0,
            monitor_interval=0.2,
            start_method="spawn",
        )
        try:
            return elastic_launch(config, _rank)(folder, os.getpid(), function, arguments)[0]
        except SignalException as stop:
            raise Stopped(f"stopped by signal {stop.sigval}; nothing was kept") from None
        except ChildFailedError as failed:
            raise _reason(Path(folder), failed) from None


def _rank(folder: str, parent: int, function: str, arguments: tuple[Any, ...]) -> Any:
    """What each started process runs. Its stdout is stderr: stdout belongs to the result."""
    _die_with(parent)
    os.dup2(2, 1)
    # What libraries say about themselves (missing optional packages, deprecations) is no news to a user of mst.
    warnings.filterwarnings("ignore")
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    try:
        return load(function)(*arguments)
    except MstError as error:
        rank = os.environ.get("RANK", "0")
        temporary = Path(folder) / f".{rank}"
        temporary.write_bytes(pickle.dumps(error))
        temporary.rename(Path(folder) / f"error-{rank}")
        sys.stderr.flush()
        # Not sys.exit: leaving process groups in good order would wait for ranks that are not coming.
        os._exit(error.exit_code)


def _die_with(parent: int) -> None:
    """End this process when the one that started it ends, however it ends: an orphan must not commit anything."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(RunError.exit_code)


def _reason(folder: Path, failed: Any) -> MstError:
    """The first MstError that a rank left behind, else which rank died and how."""
    found = [pickle.loads(path.read_bytes()) for path in sorted(folder.glob("error-*"))]
    for error in sorted(found, key=lambda error: isinstance(error, RunError | Stopped)):
        if isinstance(error, MstError):
            return error
    rank, failure = failed.get_first_failure()
    how = f"was killed by signal {-failure.exitcode}" if failure.exitcode < 0 else f"ended with code {failure.exitcode}"
    return RunError(f"rank {rank} {how}; the others were stopped", hint="its last lines stand above")
