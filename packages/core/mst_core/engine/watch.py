"""The process that started ranks watches them: it repeats what they say, explains a hung collective, and ends them when
another node's have failed."""

from __future__ import annotations

import datetime
import json
import pickle
import threading
import time
from pathlib import Path
from typing import Any, Self

from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistError

from mst_core import errors
from mst_core.cluster import Place
from mst_core.engine import failures
from mst_core.errors import MstError, RunError


class Peers:
    """The launching processes of a run's nodes, which read and write a store that the first one's rendezvous holds."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._held: TCPStore | None = None

    @property
    def _store(self) -> TCPStore:
        if self._held is None:
            host, _, port = str(self.place.rendezvous).rpartition(":")
            wait = datetime.timedelta(seconds=failures.PATIENCE)
            self._held = TCPStore(host, int(port), None, False, wait, wait_for_workers=False)
        return self._held

    def put(self, key: str, value: Any) -> Any:
        """Say ``value`` (JSON) under ``key``, if nobody has yet: what is there now."""
        return json.loads(self._store.compare_set(f"mst/{key}", "", json.dumps(value)))

    def get(self, key: str, seconds: float = 0.0) -> Any:
        """What was said under ``key``, waiting for it; None if nothing was."""
        end = time.monotonic() + seconds
        while not self._store.check([f"mst/{key}"]):
            if time.monotonic() >= end:
                return None
            time.sleep(0.1)
        return json.loads(self._store.get(f"mst/{key}"))

    def settle(self, mine: MstError, echo: bool) -> MstError:
        """The error of the whole run, the first that a node told. ``echo``: ``mine`` is only that somebody is gone."""
        if self.place.nodes == 1:
            return mine
        try:
            told = self.get("failed", failures.PATIENCE) if echo else self.put("failed", _parts(mine))
            if told is None:
                return RunError(f"another node ended without a word: {mine.what}", hint=mine.hint)
            heard = self._store.add("mst/heard", 1)
            end = time.monotonic() + failures.PATIENCE
            # The store ends with the first node's process.
            while self.place.index == 0 and heard < self.place.nodes and time.monotonic() < end:
                time.sleep(0.1)
                heard = self._store.add("mst/heard", 0)
        except DistError:
            return RunError(f"the first node, at {self.place.rendezvous}, is gone") if echo else mine
        return _error(told)


def _parts(error: MstError) -> list[str | None]:
    return [type(error).__name__, error.what, error.where, error.hint]


def _error(parts: list[Any]) -> MstError:
    kind, what, where, hint = parts
    made: MstError = getattr(errors, kind)(what, where=where, hint=hint)
    return made


class Watch(threading.Thread):
    """While ranks run, in a thread of the process that started them. A context."""

    def __init__(self, folder: Path, peers: Peers, timeout: float) -> None:
        super().__init__(daemon=True)
        self.folder, self.peers, self.timeout = folder, peers, timeout
        self._ended = threading.Event()
        self._heard = time.monotonic()
        self._done = False

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.join()

    def run(self) -> None:
        """Until the ranks have ended."""
        seen: dict[Path, int] = {}
        while not self._ended.wait(0.2):
            failures.echo(self.folder, seen)
            if not self._done and list(self.folder.glob("pid-*")):
                self._look()
        failures.echo(self.folder, seen)

    def _look(self) -> None:
        failed = hung = None
        if self.peers.place.nodes > 1:
            try:
                failed, hung = self.peers.get("failed"), self.peers.get("hung")
                self._heard = time.monotonic()
            except DistError:
                if time.monotonic() - self._heard > failures.PATIENCE:
                    self._end(RunError(f"the first node, at {self.peers.place.rendezvous}, is gone"))
                return
        if failed:
            self._end(_error(failed))
        elif hung or failures.waiting(self.folder):
            self._end(self._explanation())

    def _explanation(self) -> RunError:
        """Each node looks at its own ranks, all put together what they found."""
        time.sleep(1.0)  # ranks that began to wait together do not stop to at the same moment
        place = self.peers.place
        found = [failures.waiting(self.folder), failures.stand(self.folder)]
        all_found = [found]
        if place.nodes > 1:
            self.peers.put("hung", True)
            self.peers.put(f"found/{place.index}", [list(part.items()) for part in found])
            end = time.monotonic() + failures.PATIENCE / 2  # this node's ranks wait for the result
            others = [n for n in range(place.nodes) if n != place.index]
            heard = [self.peers.get(f"found/{n}", max(0.0, end - time.monotonic())) for n in others]
            all_found += [[dict(part) for part in parts] for parts in heard if parts]
        waiting, standing = ({n: where for part in all_found for n, where in part[i].items()} for i in (0, 1))
        return failures.explain(waiting, standing, self.timeout)

    def _end(self, error: MstError) -> None:
        self._done = True
        temporary = self.folder / ".known"
        temporary.write_bytes(pickle.dumps(error))
        temporary.rename(self.folder / "known")
        failures.end(self.folder)
