"""One rank of test_resume_layouts.py: runs that start under one layout of ranks, and go on under another.

    python -m torch.distributed.run --nproc-per-node 2 -m tests.oracle.resume_ranks PLAN.json

A run that starts makes FIRST steps, saves its state, and makes the rest: that is the straight run. One that goes on
loads that state, saves it again as its own ranks hold it, and makes the rest. Both save what they have learnt.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from mst_core.engine import launch, ranks
from mst_core.errors import MstError
from tests.oracle.megatron_ranks import OBJECTIVES, batches, save, spec_of

FIRST, ALL = 4, 10


def steps(engine: Any, case: dict[str, Any], chosen: range) -> list[dict[str, float]]:
    """What a trainer sees of these steps, each with rows and a rate of its own."""
    found = []
    for number in chosen:
        micro = batches(number, 8, case["settings"].get("micro_batch", 1), case["vocab"])
        mine = micro[engine.dp_rank :: engine.dp_size]
        found.append(engine.step(mine, OBJECTIVES["sft"], 1e-3 * (1 - number / ALL)))
    return found


def keep(engine: Any, folder: Path) -> None:
    """save_state, as saves.py calls it."""
    if not engine.rank:
        folder.mkdir()
    engine.agree(0)
    engine.save_state(folder)
    engine.agree(0)


def state_of(directory: Path) -> dict[str, torch.Tensor]:
    """All matrices of a state, put together; NaN where no rank has anything, and how often AdamW stepped."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(directory.glob("*.json")):
        told, stored = json.loads(path.read_text()), load_file(path.with_suffix(".safetensors"))
        stored.pop("random")
        for key, block in stored.items():
            name, row, column, kind = key.rsplit(" ", 3)
            rows, columns, updates = told["matrices"][name]
            whole = found.setdefault(f"{kind} of {name}", torch.full((rows, columns), float("nan")))
            into = whole[int(row) : int(row) + len(block), int(column) : int(column) + block.shape[1]]
            assert into.isnan().all(), f"{key} is stored twice"
            into.copy_(block)
            found[f"updates of {name}"] = torch.tensor([updates])
    return found


def run(case: dict[str, Any]) -> dict[str, Any]:
    engine: Any = launch.make_engine(case["engine"], spec_of(case), Path(case["model"]))
    found: dict[str, Any] = {}
    if case["from"]:
        try:
            engine.load_state(Path(case["from"]))
        except MstError as error:
            return {"error": str(error)}
        found["done"] = engine.steps
    else:
        found["first"] = steps(engine, case, range(FIRST))
    keep(engine, Path(case["state"]))
    found["rest"] = steps(engine, case, range(FIRST, ALL))
    save(engine, Path(case["saved"]))
    return found


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text())
    ranks.join()
    findings = {}
    for name, case in plan["cases"].items():
        findings[name] = run(case)
        gc.collect()
        dist.barrier()
        if case["engine"] == "megatron":
            from mst_core.engine.megatron import groups

            groups.leave()
    if not dist.get_rank():
        torch.save(findings, plan["out"])
    dist.barrier()
    ranks.leave()


if __name__ == "__main__":
    main()
