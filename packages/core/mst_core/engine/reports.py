"""wandb, SwanLab and trackio, where --report-to names them: each gets what metrics.jsonl gets, step by step.

Where they write, as whom, to which project and whether online are their own settings (WANDB_MODE, SWANLAB_MODE,
TRACKIO_DIR ...), not ours. A run that goes on is the same run there too: its name is kept in reports.json.
"""

from __future__ import annotations

import importlib
import json
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from mst_core.runspec import RunSpec


class Report(Protocol):
    """One of them."""

    def log(self, values: Mapping[str, float], step: int) -> None: ...

    def close(self) -> None: ...


class Wandb:
    """https://docs.wandb.ai"""

    def __init__(self, library: Any, name: str, ident: str, settings: dict[str, Any], resumed: bool) -> None:
        self.run = library.init(name=name, id=ident, resume="allow", config=settings)

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.run.log(dict(values), step=step)

    def close(self) -> None:
        self.run.finish()


class Swanlab:
    """https://docs.swanlab.cn"""

    def __init__(self, library: Any, name: str, ident: str, settings: dict[str, Any], resumed: bool) -> None:
        again = {"id": ident, "resume": "allow"} if resumed else {"id": ident}
        self.library, self.run = library, library.init(experiment_name=name, config=settings, **again)

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.library.log(dict(values), step=step)

    def close(self) -> None:
        self.library.finish()


class Trackio:
    """https://huggingface.co/docs/trackio: the run's name is its identity."""

    def __init__(self, library: Any, name: str, ident: str, settings: dict[str, Any], resumed: bool) -> None:
        self.library = library
        library.init(project="mst", name=f"{name}-{ident}", config=settings, resume="allow", embed=False)

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.library.log(dict(values), step=step)

    def close(self) -> None:
        self.library.finish()


KINDS: dict[str, Any] = {"wandb": Wandb, "swanlab": Swanlab, "trackio": Trackio}


def start(spec: RunSpec, kept: Path, resumed: bool) -> list[Report]:
    """Those of ``spec.report_to``, which the plan has found. ``kept``: the file that remembers the run's name."""
    if not (resumed and kept.is_file()):
        kept.write_text(json.dumps({"id": uuid.uuid4().hex[:12]}) + "\n", encoding="utf-8")
    ident = json.loads(kept.read_text(encoding="utf-8"))["id"]
    libraries = [(KINDS[name], importlib.import_module(name)) for name in spec.report_to]
    return [kind(library, spec.out.name, ident, spec.effective(), resumed) for kind, library in libraries]
