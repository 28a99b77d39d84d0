"""The plan of mst-train: all that headers and files can tell."""

from __future__ import annotations

from mst_core.data import clean
from mst_core.runplan import RunPlan, plan_run
from mst_train.spec import TrainSpec


def plan(spec: TrainSpec) -> RunPlan:
    """See mst_core.runplan."""
    sft = spec.stage == "sft"
    counted = not spec.packing and (sft or spec.num_samples is not None)
    made = plan_run(spec, f"mst-train, {spec.stage}", template=sft, counted=counted)
    if spec.clean:
        clean.template(spec.clean)
    return made
