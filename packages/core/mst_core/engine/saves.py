"""The checkpoints inside a run, as it makes them. mst_core.resume has what is in them, and finds them again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mst_core import checkpoint, console, files
from mst_core.checkpoint import Staging, partial
from mst_core.engine.seam import Engine
from mst_core.resume import FOLDER, RUN, STATE, Fit, Found, name_of, steps_in


@dataclass
class Saves:
    """Saves and restores of one run. Every rank has one and calls the same methods; rank 0 has the ``staging``.

    settings  what a run that goes on must share
    commit    (staging, step, done): makes a filled directory appear
    publish   (step): copies it to where it is wanted too
    every     steps between two saves; None: only when asked to stop
    keep      how many checkpoints stay; the newest whole one always does
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
            done.evaluation = self.found.done.evaluation
            console.say(f"goes on after step {step} of {done.steps}")
        return step

    def due(self, step: int, last: bool) -> bool:
        """Whether to save after ``step``. The last one is the output itself."""
        return self.every is not None and step % self.every == 0 and not last

    def save(self, step: int, done: Fit) -> None:
        """Write the checkpoint of ``step``, then remove older ones beyond ``keep``."""
        directory = partial(self.out) / FOLDER / name_of(step)
        if self.staging is None:
            self.engine.agree(0)  # rank 0 made the directory
            self.write(None, directory)
            return
        shutil.rmtree(directory, ignore_errors=True)  # one of a run that went further, and was passed over as broken
        with checkpoint.stage(directory) as made:
            (made.path / STATE).mkdir()
            self.engine.agree(0)
            self.write(made, directory)
            enter_state(made, step, done, self.settings)
            self.commit(made, step, done)
        self.staging.kept = True
        # Later ones are broken, or this run would have gone on from them: they do not count.
        whole = [path for number, path in steps_in(partial(self.out) / FOLDER) if number <= step]
        for old in whole[: -self.keep]:
            shutil.rmtree(old)
        self.publish(step)

    def write(self, made: Staging | None, directory: Path) -> None:
        """Weights and state, by all ranks; returns when all are done."""
        self.engine.save(made)
        self.engine.save_state(partial(directory) / STATE)
        self.engine.agree(0)


def enter_state(made: Staging, step: int, done: Fit, settings: Mapping[str, Any]) -> None:
    """run.json, and it and all files of the state as attachments."""
    told = {"format": 1, "step": step, "done": asdict(done), "settings": dict(settings)}
    (made.path / RUN).write_text(json.dumps(told, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    made.attach(RUN)
    for name in files.listing(made.path / STATE):
        made.attach(f"{STATE}/{name}")
