"""Which engine, and how its ranks are started.

A run that needs several processes (or Megatron's process groups) is started by torch's elastic launcher, on this
machine or on each node of several, or, when torchrun or a cluster's launcher already started its ranks, simply runs:
see cluster.py. How ranks end is in failures.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mst_core import cluster
from mst_core.cli import load, stop_on_sigterm
from mst_core.cluster import Place
from mst_core.engine import failures, ranks
from mst_core.engine.seam import Engine
from mst_core.errors import MissingPackage, MstError, RunError, Stopped
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
    ranks.limit(spec.timeout)
    return engine


def run(function: str, engine: str, spec: RunSpec, *arguments: Any) -> Any:
    """``run_ranks`` of ``function(spec, ...)`` as the spec asks for it."""
    return run_ranks(
        function, engine, spec.ranks, spec, *arguments, place=spec.place, timeout=spec.timeout, out=spec.out
    )


def run_ranks(
    function: str,
    engine: str,
    size: int,
    *arguments: Any,
    place: Place | None = None,
    timeout: float = 1800.0,
    out: Path | None = None,
) -> Any:
    """``function`` ("module:name") on ``size`` ranks; what it returns on rank 0.

    place    which of the run's processes this is (None: as its launcher says)
    timeout  seconds that ranks wait for one another
    out      the run works in ``OUT.partial``: the ranks' logs go there, and its last checkpoint is named

    Raises the MstError that a rank raised, RunError if a rank died or hung, Stopped on SIGTERM or Ctrl-C. The ranks
    other than 0 that a launcher started, and the nodes other than the first, end here with exit code 0: only one
    process prints a result.
    """
    place = place or cluster.place(size)
    if place.as_rank:
        cluster.adopt(place)
        result = _called(function, arguments, timeout, out)
    elif engine == "plain":
        return load(function)(*arguments)
    else:
        result = _elastic(function, place, arguments, timeout, out)
    if place.index:
        raise SystemExit(0)
    return result


def _called(function: str, arguments: tuple[Any, ...], timeout: float, out: Path | None) -> Any:
    """On a rank that somebody else started: of an error that several ranks have, one of them speaks."""
    from mst_core.engine import asking

    try:
        with asking.Listener():
            return load(function)(*arguments)
    except MstError as error:
        found = error
    except RuntimeError as error:
        if where := failures.waited_in(error):
            hung = asking.explanation(where, timeout)
            if hung is None:
                raise SystemExit(RunError.exit_code) from None
            raise failures.with_checkpoint(hung, out) from None
        if failures.ECHO.search(str(error)):
            time.sleep(2.0)  # who is gone may have something to say
            found = RunError(f"rank {cluster.rank()}: another rank is gone: {str(error).splitlines()[0]}")
        else:
            raise
    if not ranks.first_to_speak():
        raise SystemExit(found.exit_code)
    raise failures.with_checkpoint(found, out)


def run_on_cpu(function: str, size: int, *arguments: Any) -> Any:
    """``function`` on new processes of this machine, which see no accelerator, whatever launched this one."""
    threads = os.environ.get("OMP_NUM_THREADS")
    try:
        return _elastic(f"{__name__}:_without_accelerators", Place(size), (function, *arguments))
    finally:
        if threads is None:
            os.environ.pop("OMP_NUM_THREADS", None)  # that of these ranks, which the next launch may not want


def _without_accelerators(function: str, *arguments: Any) -> Any:
    # Before torch asks for devices, which it has not yet done in a process that was spawned.
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["ASCEND_RT_VISIBLE_DEVICES"] = ""
    return load(function)(*arguments)


def _elastic(
    function: str, place: Place, arguments: tuple[Any, ...], timeout: float = 1800.0, out: Path | None = None
) -> Any:
    """This node's ranks; what the run's rank 0 returned, if it is here."""
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    from mst_core.engine.watch import Peers, Watch

    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    local = place.ranks // place.nodes
    if "OMP_NUM_THREADS" not in os.environ:
        # Ranks on one machine share its cores; more threads than cores is several times slower.
        os.environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // local))
    peers = Peers(place)
    with tempfile.TemporaryDirectory(prefix="mst-ranks-") as name:
        folder = Path(name)
        try:
            with _handing_on_sigterm(), Watch(folder, peers, timeout):
                launch = elastic_launch(_config(place, local, timeout), _rank)
                return launch(name, os.getpid(), function, arguments).get(0)
        except SignalException as ended:
            what = f"stopped by {signal.Signals(ended.sigval).name}; nothing was written"
            raise peers.settle(Stopped(what), echo=False) from None
        except ChildFailedError as failed:
            codes = {number: failure.exitcode for number, failure in failed.failures.items()}
            error = peers.settle(failures.reason(folder, codes), failures.is_echo(folder))
            if isinstance(error, RunError):
                failures.show(folder, out)
            raise failures.with_checkpoint(error, out) from None
        except DistError as error:
            what = f"node {place.index} of {place.nodes} did not meet the others at {place.rendezvous}"
            raise RunError(f"{what} within {timeout:g} s", hint="start the same command on every node") from error


def _config(place: Place, local: int, timeout: float) -> Any:
    from torch.distributed.launcher.api import LaunchConfig

    where: dict[str, Any] = {"run_id": uuid.uuid4().hex, "rdzv_backend": "c10d", "rdzv_endpoint": "127.0.0.1:0"}
    if place.nodes > 1:
        where = {"run_id": "mst", "rdzv_backend": "static", "rdzv_endpoint": place.rendezvous}
        where["rdzv_configs"] = {"rank": place.index, "timeout": max(1, round(timeout))}
    return LaunchConfig(
        min_nodes=place.nodes,
        max_nodes=place.nodes,
        nproc_per_node=local,
        max_restarts=0,
        monitor_interval=0.2,
        start_method="spawn",
        # SIGTERM is handed on to the ranks, which may take long to save; torch would kill them after 30 s.
        signals_to_handle="SIGINT,SIGHUP,SIGQUIT",
        **where,
    )


@contextlib.contextmanager
def _handing_on_sigterm() -> Iterator[None]:
    """SIGTERM goes to the ranks, which save and end; before there are any, it ends the run."""

    def hand_on(number: int, frame: Any) -> None:
        started = [child.pid for child in multiprocessing.active_children() if child.pid is not None]
        if not started:
            raise Stopped("stopped by SIGTERM; nothing was written")
        for rank in started:
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
    """What each started process runs. Its stdout goes where its stderr goes: stdout belongs to the result."""
    _die_with(parent)
    stop_on_sigterm()
    failures.enter(Path(folder))
    # What libraries say about themselves (missing optional packages, deprecations) is no news to a user of mst.
    warnings.filterwarnings("ignore")
    for name in ("torch.distributed", "torch.utils.cpp_extension"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    with failures.leaving(Path(folder)):
        result = load(function)(*arguments)
        sys.stdout.flush()
        return result


def _die_with(parent: int) -> None:
    """End this process when the one that started it ends, however it ends: an orphan must not commit anything."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(RunError.exit_code)
