"""The plan of mst-align: all that headers and files can tell."""

from __future__ import annotations

from mst_align.spec import AlignSpec
from mst_core.runplan import RunPlan, plan_run


def plan(spec: AlignSpec) -> RunPlan:
    """See mst_core.runplan."""
    return plan_run(spec, f"mst-align, {spec.method}")
