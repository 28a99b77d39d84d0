"""One rank of test_engines.py: the fsdp or deepspeed engine as a trainer uses it, many cases in one process.

    python -m torch.distributed.run --nproc-per-node 2 -m tests.oracle.engine_ranks PLAN.json

What a case found is written to ``rank-R.pt``. The cases' arithmetic is megatron_ranks': one contract for all engines.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mst_core.engine import launch, ranks
from mst_core.errors import MstError
from tests.oracle.megatron_ranks import play, refuse, save, spec_of


def state(engine: Any) -> dict[str, torch.Tensor]:
    """Every trained parameter, whole."""
    return {name: engine._whole(p).detach().clone() for name, p in engine.trained}


def resumed(case: dict[str, Any], engine: Any, folder: Path) -> dict[str, Any]:
    """What a second engine that goes on from the first one's state has and does."""
    if not engine.rank:
        folder.mkdir()
        folder.with_name(f"{folder.name}-own").mkdir()
    engine.agree(0)
    engine.save_state(folder)
    engine.agree(0)
    other: Any = launch.make_engine(case["engine"], spec_of(case), Path(case["model"]))
    other.load_state(folder)
    before, after = state(engine), state(other)
    same = all(torch.equal(before[name], after[name]) for name in before)
    if case["engine"] == "deepspeed":
        engine._save_own(folder.with_name(f"{folder.name}-own"))
    more = {**case, "steps": 1}
    found = {"same": same, "steps": [play(one, more)["steps"] for one in (engine, other)], "state": before}
    return found | ({"own": own(other, folder, before)} if case["engine"] == "deepspeed" else {})


def own(engine: Any, folder: Path, before: dict[str, torch.Tensor]) -> dict[str, Any]:
    """DeepSpeed's own checkpoint, which it keeps of NVMe: what comes back of it, and what it says of three ranks."""
    directory = folder.with_name(f"{folder.name}-own")
    engine._load_own(directory)
    same = all(torch.equal(before[name], value) for name, value in state(engine).items())
    if not engine.rank:
        layout = json.loads((directory / "layout.json").read_text())
        (directory / "layout.json").write_text(json.dumps({**layout, "ranks": 3}))
    said = []
    for load in (engine._load_own, engine.load_state):
        engine.agree(0)
        try:
            load(directory)
        except MstError as error:
            said.append(str(error))
    return {"same": same, "said": said}


def run(case: dict[str, Any]) -> dict[str, Any]:
    engine: Any = launch.make_engine(case["engine"], spec_of(case), Path(case["model"]))
    found = refuse(engine, case) if case.get("refuse") else play(engine, case)
    if case.get("save"):
        save(engine, Path(case["save"]))
    if case.get("resume"):
        found["resumed"] = resumed(case, engine, Path(case["resume"]))
    return found


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text())
    ranks.join()
    world, findings = dist.get_world_size(), {}
    for name, case in plan["cases"].items():
        case["settings"]["nproc"] = world
        try:
            findings[name] = run(case)
        except MstError as error:
            findings[name] = {"error": str(error)}
        gc.collect()
        dist.barrier()
    torch.save(findings, Path(plan["out"], f"rank-{dist.get_rank()}.pt"))
    dist.barrier()
    ranks.leave()


if __name__ == "__main__":
    main()
