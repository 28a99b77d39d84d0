"""The checkpoints inside a run, as it makes them. mst_core.resume has what is in them, and finds them again.

With ``behind`` (--async-save) a save returns when all of it is in host memory. A thread of each rank then writes its
files; when the loop hears that every rank has, a thread of rank 0 makes the checkpoint appear. The threads call no
collective. One save is in flight at a time: the next one, the end of the run and a stop wait for it.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from mst_core import checkpoint, console, files
from mst_core.checkpoint import Staging, partial
from mst_core.engine.background import Held, Memory
from mst_core.engine.seam import Engine, create
from mst_core.errors import RunError, Stopped
from mst_core.resume import FOLDER, RUN, STATE, Fit, Found, name_of, steps_in


@dataclass
class _Flight:
    """A save under way on this rank. ``made`` (rank 0): the directory in the making, open until ``stack`` is closed."""

    step: int
    done: Fit
    made: Staging | None
    stack: ExitStack
    own: Future[None] | None = None
    whole: Future[None] | None = None


@dataclass
class Saves:
    """Saves and restores of one run. Every rank has one and calls the same methods; rank 0 has the ``staging``.

    settings  what a run that goes on must share
    commit    (staging, step, done): makes a filled directory appear
    publish   (step): copies it to where it is wanted too
    every     steps between two saves; None: only when asked to stop
    keep      how many checkpoints stay; the newest whole one always does
    behind    write them while the training goes on

    A context: leaving it waits for the save in flight, or gives it up after an error that not all ranks share.
    """

    engine: Engine
    out: Path
    staging: Staging | None
    settings: Mapping[str, Any]
    commit: Callable[[Staging, int, Fit], object]
    publish: Callable[[int], object]
    every: int | None
    keep: int
    found: Found | None = None
    behind: bool = False
    _flight: _Flight | None = None
    _threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "save"))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            # An engine's RunError (a loss that is not finite) and Stopped come to all ranks at the same step.
            if kind is None or issubclass(kind, RunError | Stopped):
                self.settle()
        finally:
            self._give_up()
            self._threads.shutdown()

    def restore(self, done: Fit) -> int:
        """Go on from ``found``: the engine's state, and ``done``. The step to start with."""
        step = self.engine.agree(self.found.step if self.found else 0)
        if not step:
            return 0
        # Only rank 0 read and compared the directories; the others are told which one it is by its step.
        own = partial(self.out) / FOLDER / name_of(step)
        directory = own if own.is_dir() else self.out
        self.engine.load_state(directory / STATE)
        if self.found is not None:
            done.tokens, done.first, done.last = self.found.done.tokens, self.found.done.first, self.found.done.last
            done.before, done.evaluation = self.found.done.before, self.found.done.evaluation
            console.say(f"goes on after step {step} of {done.steps}")
        return step

    def due(self, step: int, last: bool) -> bool:
        """Whether to save after ``step``. The last one is the output itself."""
        return self.every is not None and step % self.every == 0 and not last

    def save(self, step: int, done: Fit) -> None:
        """Write the checkpoint of ``step``, then remove older ones beyond ``keep``."""
        self.settle()
        directory = partial(self.out) / FOLDER / name_of(step)
        with ExitStack() as stack:
            made = None
            if self.staging is not None:
                shutil.rmtree(directory, ignore_errors=True)  # one of a run that went further, passed over as broken
                made = stack.enter_context(checkpoint.stage(directory))
                (made.path / STATE).mkdir()
            self.engine.agree(0)  # rank 0 made the directory
            memory, state = Memory(), partial(directory) / STATE
            self.engine.save(Held(made, memory) if made and self.behind else made)
            self.engine.save_state(state, memory.create if self.behind else create)
            self._flight = flight = _Flight(step, copy.deepcopy(done), made, stack.pop_all())
        if not self.behind:
            self.settle()
            return

        def write() -> None:
            with flight.stack as stack:
                memory.pour()
                flight.stack = stack.pop_all()

        flight.own = self._threads.submit(write)

    def writing(self) -> bool:
        """Whether this rank's files are still being written. Raises what a writer raised."""
        if self._flight is None:
            return False
        for future in (self._flight.own, self._flight.whole):
            if future is not None and future.done():
                future.result()
        return self._flight.own is not None and not self._flight.own.done()

    def written(self) -> None:
        """Every rank has written: rank 0 lets the checkpoint appear."""
        flight = self._flight
        if flight is not None and flight.made is not None and flight.whole is None:
            flight.whole = self._threads.submit(self._appear, flight, flight.made)

    def settle(self) -> None:
        """Wait for the save in flight, on all ranks."""
        if (flight := self._flight) is None:
            return
        if flight.own is not None:
            flight.own.result()
        self.engine.agree(0)
        self.written()
        if flight.whole is not None:
            flight.whole.result()
        self._flight = None

    def _give_up(self) -> None:
        """Wait for the threads, and remove a directory that is not whole."""
        if (flight := self._flight) is not None:
            wait([future for future in (flight.own, flight.whole) if future is not None])
            flight.stack.close()
            self._flight = None

    def _appear(self, flight: _Flight, made: Staging) -> None:
        with flight.stack:
            enter_state(made, flight.step, flight.done, self.settings)
            self.commit(made, flight.step, flight.done)
        if self.staging is not None:
            self.staging.kept = True
        # Later ones are broken, or this run would have gone on from them: they do not count.
        whole = [path for number, path in steps_in(partial(self.out) / FOLDER) if number <= flight.step]
        for old in whole[: -self.keep]:
            shutil.rmtree(old)
        self.publish(flight.step)


def enter_state(made: Staging, step: int, done: Fit, settings: Mapping[str, Any]) -> None:
    """run.json, and it and all files of the state as attachments."""
    told = {"format": 1, "step": step, "done": asdict(done), "settings": dict(settings)}
    (made.path / RUN).write_text(json.dumps(told, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    made.attach(RUN)
    for name in files.listing(made.path / STATE):
        made.attach(f"{STATE}/{name}")
