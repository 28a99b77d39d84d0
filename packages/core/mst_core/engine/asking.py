"""Ranks that another launcher started (torchrun, srun) ask one another about a hung collective, for nobody else can
look at them: through the store of their process group, in a thread of each that answers while its main thread hangs.

    mst/hung      a rank waited longer than --timeout: each of the others says where it stands
    mst/waited/N  the collective in which rank N waited
    mst/stands/N  where the main thread of rank N stands, in its listener's words
    mst/told      the rank that speaks has heard the others
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, Self

import torch.distributed as dist

from mst_core import cluster
from mst_core.engine import failures
from mst_core.errors import RunError

EVERY = 2.0
"""Seconds between two looks of a listener."""
LOST = "does not answer: it is stopped, or its process is gone"


class Listener(threading.Thread):
    """Answers for the thread that made it, from when there is a process group. A context."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._main, self._ended = threading.get_ident(), threading.Event()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.join(EVERY)

    def run(self) -> None:
        """Until somebody asks, or the run or its store ends."""
        store: Any = None
        try:
            while not self._ended.wait(EVERY):
                store = store or _store()
                if store is not None and store.check(["mst/hung"]):
                    frames = traceback.extract_stack(sys._current_frames()[self._main])
                    store.set(f"mst/stands/{cluster.rank()}", failures.standing(frames))
                    return
        except (RuntimeError, ValueError):
            return  # the store, or the group, is gone, and the run with it


def explanation(where: str, timeout: float) -> RunError | None:
    """The error of the run whose rank, this one, waited in ``where``; None if another rank says it."""
    found: list[RunError | None] = []
    asks = threading.Thread(target=_ask, args=(found.append, where, timeout), daemon=True)
    asks.start()
    asks.join(2 * failures.PATIENCE)  # a store whose rank is stopped never answers
    return found[0] if found else failures.explain({cluster.rank(): where}, {}, timeout)


def _ask(answer: Callable[[RunError | None], None], where: str, timeout: float) -> None:
    if (store := _store()) is None:
        return
    mine, world = cluster.rank(), range(dist.get_world_size())
    try:
        store.set(f"mst/waited/{mine}", where)
        store.set("mst/hung", "1")
        if store.add("mst/spoke", 1) > 1:  # as ranks.first_to_speak counts
            _until(lambda: store.check(["mst/told"]))
            time.sleep(1.0)  # a launcher ends the others when one ends: let it speak first
            answer(None)
            return
        time.sleep(1.0)  # ranks that began to wait together do not stop to at the same moment
        said: dict[str, dict[int, str]] = {"waited": {}, "stands": {}}

        def heard() -> bool:
            for kind, found in said.items():
                missing = (n for n in world if n not in found and store.check([f"mst/{kind}/{n}"]))
                found |= {n: store.get(f"mst/{kind}/{n}").decode() for n in missing}
            return all(n in said["waited"] or n in said["stands"] for n in world)

        _until(heard)
        others = {n: said["stands"].get(n, LOST) for n in world if n not in said["waited"]}
        store.set("mst/told", "1")
        answer(failures.explain(said["waited"], others, timeout))
    except RuntimeError:
        return


def _store() -> Any:
    """A connection of one's own to the store of the process group; None before there is one."""
    if not dist.is_initialized():
        return None
    store: Any = dist.distributed_c10d._get_default_store()
    return store.clone()


def _until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + failures.PATIENCE
    while not done() and time.monotonic() < end:
        time.sleep(0.2)
