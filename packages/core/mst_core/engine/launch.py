"""Which engine, and how its ranks are started.

A run that needs several processes (or Megatron's process groups) is started by torch's elastic launcher on this
machine, or, when torchrun or a cluster's launcher already started us, simply runs: RANK and WORLD_SIZE say so. This
is the only file that reads those variables.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import traceback
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from mst_core import console
from mst_core.cli import load, stop_on_sigterm
from mst_core.engine.seam import Engine
from mst_core.errors import MissingPackage, MstError, RunError, SettingsError, Stopped
from mst_core.runspec import RunSpec

ENGINES = {
    "plain": "mst_core.engine.plain:PlainEngine",
    "fsdp": "mst_core.engine.fsdp:FsdpEngine",
    "deepspeed": "mst_core.engine.deepspeed:DeepspeedEngine",
    "megatron": "mst_core.engine.megatron.engine:MegatronEngine",
}
EXTRAS = {
    "plain": "pip install 'mst-tools-core[engine]'",
    "fsdp": "pip install 'mst-tools-core[engine]'",
    "deepspeed": "pip install 'mst-tools-core[deepspeed]'",
    "megatron": "pip install 'mst-tools-core[megatron]'",
}
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


def rank() -> int:
    """This process among the ranks of its run; 0 in a run of one process."""
    return int(os.environ.get("RANK", "0"))


def under_launcher() -> bool:
    """Whether torchrun or another launcher started this process as one of its ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def leads() -> bool:
    """Whether this process is the one that speaks: any but a launcher's rank above 0."""
    return not under_launcher() or os.environ["RANK"] == "0"


def run_ranks(function: str, engine: str, ranks: int, *arguments: Any) -> Any:
    """``function`` ("module:name") on every rank; what it returns on rank 0.

    Raises the MstError that a rank raised, RunError if a rank died, Stopped on SIGTERM or Ctrl-C. Under a launcher
    the ranks other than 0 end here with exit code 0: only one process prints a result.
    """
    if under_launcher():
        world = int(os.environ["WORLD_SIZE"])
        if world != ranks:
            hint = (
                f"--nproc {world} lets data parallel fill them"
                if engine != "plain"
                else "the plain engine is one process"
            )
            raise SettingsError(f"the launcher started {world} ranks, the settings ask for {ranks}", hint=hint)
        result = load(function)(*arguments)
        if rank():
            raise SystemExit(0)
        return result
    if engine == "plain":
        return load(function)(*arguments)
    return _elastic(function, ranks, arguments)


def run_on_cpu(function: str, ranks: int, *arguments: Any) -> Any:
    """``function`` on new processes of this machine, which see no accelerator, whatever launched this one."""
    threads = os.environ.get("OMP_NUM_THREADS")
    try:
        return _elastic(f"{__name__}:_without_accelerators", ranks, (function, *arguments))
    finally:
        if threads is None:
            os.environ.pop("OMP_NUM_THREADS", None)  # that of these ranks, which the next launch may not want


def _without_accelerators(function: str, *arguments: Any) -> Any:
    # Before torch asks for devices, which it has not yet done in a process that was spawned.
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["ASCEND_RT_VISIBLE_DEVICES"] = ""
    return load(function)(*arguments)


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
            # SIGTERM is handed on to the ranks, which may take long to save; torch would kill them after 30 s.
            signals_to_handle="SIGINT,SIGHUP,SIGQUIT",
        )
        try:
            with _handing_on_sigterm():
                return elastic_launch(config, _rank)(folder, os.getpid(), function, arguments)[0]
        except SignalException as ended:
            raise Stopped(f"stopped by {signal.Signals(ended.sigval).name}; nothing was written") from None
        except ChildFailedError as failed:
            raise _reason(Path(folder), failed) from None


@contextlib.contextmanager
def _handing_on_sigterm() -> Iterator[None]:
    """SIGTERM goes to the ranks, which save and end; before there are any, it ends the run."""

    def hand_on(number: int, frame: Any) -> None:
        ranks = [child.pid for child in multiprocessing.active_children() if child.pid is not None]
        if not ranks:
            raise Stopped("stopped by SIGTERM; nothing was written")
        for rank in ranks:
            os.kill(rank, number)

    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may ask for signals
        return
    before = signal.signal(signal.SIGTERM, hand_on)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _rank(folder: str, parent: int, function: str, arguments: tuple[Any, ...]) -> Any:
    """What each started process runs. Its stdout is stderr: stdout belongs to the result."""
    _die_with(parent)
    stop_on_sigterm()
    os.dup2(2, 1)
    # What libraries say about themselves (missing optional packages, deprecations) is no news to a user of mst.
    warnings.filterwarnings("ignore")
    for name in ("torch.distributed", "torch.utils.cpp_extension"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        return load(function)(*arguments)
    except MstError as error:
        _leave(Path(folder), "error", pickle.dumps(error), error.exit_code)
    except KeyboardInterrupt:
        os._exit(Stopped.exit_code)
    except BaseException:
        # A bug, or the echo of another rank's end: which of them, the launching process can tell.
        _leave(Path(folder), "bug", traceback.format_exc().encode(), MstError.exit_code)
        raise


def _leave(folder: Path, kind: str, content: bytes, code: int) -> NoReturn:
    """Say why this rank ends, and end it."""
    temporary = folder / f".{rank()}"
    temporary.write_bytes(content)
    temporary.rename(folder / f"{kind}-{rank()}")
    sys.stderr.flush()
    # Not sys.exit: leaving process groups in good order would wait for ranks that are not coming.
    os._exit(code)


def _die_with(parent: int) -> None:
    """End this process when the one that started it ends, however it ends: an orphan must not commit anything."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(RunError.exit_code)


def _reason(folder: Path, failed: Any) -> MstError:
    """What ended the run: a rank's MstError, else the rank that was killed, else the first rank with a bug.

    A rank that ends takes the others with it: their complaints (a closed connection) come as bugs, and being ended by
    the launcher as Stopped.
    """
    found: list[MstError] = [pickle.loads(path.read_bytes()) for path in sorted(folder.glob("error-*"))]
    reasons = [error for error in found if not isinstance(error, Stopped)]
    if reasons:
        return min(reasons, key=lambda error: isinstance(error, RunError))
    codes = {number: failure.exitcode for number, failure in sorted(failed.failures.items())}
    if not found and set(codes.values()) == {-signal.SIGTERM}:  # asked to stop before the ranks could say so
        return Stopped("stopped by SIGTERM before the first step")
    for number, code in codes.items():
        if code < 0 and code != -signal.SIGTERM:
            name = signal.Signals(-code).name
            hint = "the machine may have run out of memory: fewer rows in --micro-batch, or more ranks"
            return RunError(f"rank {number} was killed by {name}; the others were stopped", hint=hint)
    for path in sorted(folder.glob("bug-*"), key=lambda path: path.stat().st_mtime_ns):
        text = path.read_text(encoding="utf-8")
        console.say(text)
        number, last = path.name.partition("-")[2], text.strip().splitlines()[-1]
        return RunError(f"rank {number} failed: {last}", hint="its traceback stands above; this may be a bug in mst")
    if found:
        return found[0]
    number, code = next(iter(codes.items()))
    return RunError(f"rank {number} ended with code {code}; the others were stopped")
