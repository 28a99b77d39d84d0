"""The plan of mst-train: all that headers and files can tell."""

from __future__ import annotations

from mst_core.runplan import RunPlan, plan_run
from mst_train.spec import TrainSpec


def plan(spec: TrainSpec) -> RunPlan:
    """See mst_core.runplan."""
    return plan_run(spec, f"mst-train, {spec.stage}", template=spec.stage == "sft")
