"""Five steps of training on any engine, and what is compared between engines. Run under torchrun for megatron:

torchrun --nproc-per-node 2 engine_cases.py CASES.json RESULTS.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from mst_align.losses import dpo_objective
from mst_core.data.render import Sample
from mst_core.engine import loop
from mst_core.engine.seam import Engine
from mst_core.runspec import RunSpec
from mst_train.objective import SFT

STEPS = 5
UNITS = 8


def spec_of(options: dict[str, Any]) -> RunSpec:
    """A run of eight units a step, fp32 unless the case says otherwise, with weight decay and clipping at work."""
    base = {"model": "m", "data": ("d",), "out": "o", "precision": "fp32", "lr": 1e-3, "weight_decay": 0.1}
    return RunSpec(**{**base, "global_batch": UNITS, "seed": 3, **options})  # type: ignore[arg-type]


def units_of(pairs: bool, count: int = UNITS) -> list[loop.Unit]:
    """Random rows of different lengths, the first third a prompt; pairs share theirs."""
    generator = torch.Generator().manual_seed(11)

    def tokens(number: int) -> list[int]:
        return torch.randint(3, 330, (number,), generator=generator).tolist()

    def answer(prompt: list[int]) -> Sample:
        body = tokens(int(torch.randint(2, 14, (1,), generator=generator)))
        return Sample(prompt + body, [0] * len(prompt) + [1] * len(body))

    units: list[loop.Unit] = []
    for index in range(count):
        prompt = tokens(4 + index % 3)
        units.append((answer(prompt), answer(prompt)) if pairs else (answer(prompt),))
    return units


def run_case(engine: Engine, case: dict[str, Any]) -> dict[str, Any]:
    """Losses, gradient norms, and the log-probabilities before and after."""
    pairs = case["objective"] == "dpo"
    spec, objective = spec_of(case["options"]), dpo_objective(0.1) if pairs else SFT
    units = units_of(pairs, case.get("units", UNITS))
    batch = loop._collate(units, None)
    before = engine.score(batch)
    references = loop._references(engine, objective, units, spec, "reference")
    losses, norms = [], []
    for _ in range(STEPS):
        values = engine.step(loop.micro_batches(units, engine, spec, references), objective, spec.lr)
        losses.append(values["loss"])
        norms.append(values["grad_norm"])
    result = {"losses": losses, "norms": norms, "before": before.tolist(), "after": engine.score(batch).tolist()}
    if case.get("reference"):
        result["reference"] = engine.score(batch, reference=True).tolist()
    return result


def main() -> None:
    """Every case on the megatron engine, one after another in the same processes."""
    from mst_core.checkpoint import stage
    from mst_core.engine.megatron.engine import MegatronEngine

    cases = json.loads(Path(sys.argv[1]).read_text())
    results = []
    for case in cases:
        engine = MegatronEngine(spec_of(case["options"]), Path(case["model"]))
        result = run_case(engine, case)
        if "save" in case:
            if engine.rank == 0:
                with stage(Path(case["save"])) as staging:
                    engine.save(staging)
                    staging.commit(kind="model", layout="megatron", tool="test", settings={})
            else:
                engine.save(None)
        results.append(result)
        rank = engine.rank
        engine.close()
    if rank == 0:
        Path(sys.argv[2]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
