"""mst-train called from Python, as several test files do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mst_train.plan import plan
from mst_train.spec import TrainSpec
from mst_train.work import work


def train(model: Path, data: Path, out: Path, **settings: Any) -> dict[str, Any]:
    """The result of a run in fp32, four rows a step."""
    fields = {"global_batch": 4, "lr": 3e-3, "precision": "fp32", **settings}
    spec = TrainSpec(model=str(model), data=(data,), out=out, **fields)
    return work(spec, plan(spec)).data
