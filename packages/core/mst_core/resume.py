"""What a run cut short has left: its checkpoints, and the one to go on from.

``OUT.partial/checkpoints/step-00000400/`` is a whole directory of its own: what the engine saved (a model or an
adapter, good as ``--model``), its manifest, and as attachments what training goes on from: ``state/`` (the engine's)
and ``run.json`` (the step, what was measured so far, and the settings that a run which goes on must share).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mst_core import checkpoint, console, manifest
from mst_core.checkpoint import Staging, partial
from mst_core.errors import InputError, MstError

FOLDER, STATE, RUN = "checkpoints", "state", "run.json"
HISTORY = ("metrics.jsonl", "reports.json", "loss.png", "rewards.png", "tensorboard/")
"""What a run tells of itself, which stays with it when it goes on."""
AWAY = ".checkpoints.partial"
"""What OUT.partial/checkpoints is called beside OUT while OUT is committed."""


@dataclass
class Fit:
    """What a run did: steps, tokens learnt, first and last values, the evaluation before it and the last one."""

    steps: int
    tokens: int = 0
    first: dict[str, float] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)
    before: dict[str, float] = field(default_factory=dict)
    evaluation: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Found:
    """A directory to go on from."""

    directory: Path
    step: int
    done: Fit
    settings: Mapping[str, Any]


def name_of(step: int) -> str:
    """The directory of a step."""
    return f"step-{step:08d}"


def steps_in(folder: Path) -> list[tuple[int, Path]]:
    """The committed checkpoints of a run, oldest first."""
    found = folder.glob("step-*") if folder.is_dir() else ()
    return sorted((int(path.name[5:]), path) for path in found if path.name[5:].isdigit() and path.is_dir())


def stopped_at(out: Path) -> int | None:
    """The last step that a run cut short has saved; None if it saved none. Reads names only."""
    there = [*steps_in(partial(out) / FOLDER), *steps_in(out.with_name(out.name + AWAY))]
    return max((step for step, _ in there), default=None)


def newest(out: Path, settings: Mapping[str, Any]) -> Found | None:
    """The newest whole checkpoint of a run cut short, or of a finished one whose state was kept (one in a store is
    fetched to where the others are).

    Broken ones are named and passed over. InputError if its settings differ from ``settings``.
    """
    _bring_back(out)
    found = None
    for _, directory in reversed(steps_in(partial(out) / FOLDER)):
        try:
            problems = checkpoint.verify(directory)
        except MstError as error:
            problems = [error.what]
        if not problems:
            found = _read(directory)
            break
        console.warn(f"{directory} is broken and passed over: {problems[0]}")
    if found is None and (out / RUN).is_file():
        if problems := checkpoint.verify(out):
            raise InputError(f"cannot be extended, it is broken: {problems[0]}", where=out)
        found = _read(out)
    if found is not None:
        _compare(found, settings, extends=found.step == found.settings["steps"])
    return found


@contextmanager
def put_away(staging: Staging) -> Iterator[None]:
    """Around a commit: the checkpoints stand beside the output until it has appeared, then they are removed."""
    folder, away = staging.path / FOLDER, staging.out.with_name(staging.out.name + AWAY)
    if folder.is_dir():
        shutil.rmtree(away, ignore_errors=True)  # of a run that --overwrite started again
        folder.rename(away)
    yield
    shutil.rmtree(away, ignore_errors=True)


def _bring_back(out: Path) -> None:
    """Undo ``put_away`` of a run that was killed before its output appeared."""
    away = out.with_name(out.name + AWAY)
    if not away.is_dir():
        return
    # Without metrics OUT.partial is new, and the checkpoints are what a finished run did not come to remove.
    if (partial(out) / "metrics.jsonl").is_file() and not (partial(out) / FOLDER).exists():
        away.rename(partial(out) / FOLDER)
    else:
        shutil.rmtree(away)


def _read(directory: Path) -> Found:
    told = json.loads((directory / RUN).read_text())
    if told.get("format") != 1:
        raise InputError("was written by a newer mst", where=directory / RUN)
    return Found(directory, told["step"], Fit(**told["done"]), told["settings"])


def _compare(found: Found, settings: Mapping[str, Any], extends: bool) -> None:
    def names(value: Any) -> str:
        return manifest.short(value) if isinstance(value, str) and value.startswith("blake3:") else json.dumps(value)

    before = dict(found.settings)
    if extends and settings["steps"] > before["steps"]:
        before["steps"] = settings["steps"]
    differ = [
        f"{key} was {names(before.get(key))}, is {names(settings.get(key))}"
        for key in sorted(before.keys() | settings.keys())
        if before.get(key) != settings.get(key)
    ]
    if not differ and extends and settings["steps"] <= found.step:
        differ = [f"it has done its {found.step} steps; --steps with a larger number extends it"]
    if differ:
        what = f"cannot be resumed with other settings: {'; '.join(differ)}"
        raise InputError(what, where=found.directory, hint="give the old ones, or start again with --overwrite")
