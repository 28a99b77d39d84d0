"""A run of many steps in a process of its own: how much memory the loop takes, early and late.

python -m tests.train.memory_process PLAN.json PORT
"""

from __future__ import annotations

import gc
import json
import random
import sys
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

from mst_core import checkpoint
from mst_core.data.render import Sample
from mst_core.engine import loop
from mst_core.engine.batches import Singles
from mst_core.engine.plain import PlainEngine
from mst_core.engine.seam import Batch, Objective
from mst_core.runspec import RunSpec
from mst_train.objective import SFT

WINDOW = 50
"""Steps over which a peak is taken: the first ones after warming up, and the last ones."""


class Watched(PlainEngine):
    """Reads memory before some of the steps: Python's objects, and the peak of all resident pages since the last."""

    def __init__(self, spec: RunSpec, model_dir: Path) -> None:
        super().__init__(spec, model_dir)
        last = spec.steps or 0
        self.marks = {WINDOW: "", 2 * WINDOW: "early", last - WINDOW: "", last - 1: "late"}
        self.found: dict[str, dict[str, int]] = {}

    def step(self, micro_batches: Sequence[Batch], objective: Objective, lr: float) -> dict[str, float]:
        if self.steps in self.marks:
            gc.collect()  # what only waits to be collected is not held
            if name := self.marks[self.steps]:
                self.found[name] = {"objects": tracemalloc.get_traced_memory()[0], "peak": peak()}
            Path("/proc/self/clear_refs").write_text("5")
        return super().step(micro_batches, objective, lr)


def peak() -> int:
    """Bytes: VmHWM, since it was last reset."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["VmHWM"].split()[0]) * 1024


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text())
    out = Path(plan["out"])
    fields = {"global_batch": 4, "micro_batch": 2, "precision": "fp32", "steps": plan["steps"], "log_every": 1}
    spec = RunSpec(model="m", data=("d",), out=out / "trained", **fields)
    draw = random.Random(0)
    samples = [Sample([draw.randrange(3, 330) for _ in range(n)], [0, 0] + [1] * (n - 2)) for n in range(8, 72)]
    engine = Watched(spec, Path(plan["model"]))
    with checkpoint.stage(spec.out) as staging:
        tracemalloc.start()
        loop.fit(engine, SFT, Singles(samples), spec, staging)
    (out / "found.json").write_text(json.dumps(engine.found))


if __name__ == "__main__":
    main()
