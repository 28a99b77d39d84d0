"""Take the port, then load the model and serve."""

from __future__ import annotations

from mst_core import console
from mst_core.cli import load
from mst_core.spec import Result
from mst_serve.listen import bind
from mst_serve.plan import ServePlan
from mst_serve.spec import ServeSpec


def work(spec: ServeSpec, plan: ServePlan) -> Result:
    """Serve until SIGTERM or Ctrl-C, then let running requests finish. Raises InputError and RunError."""
    for warning in plan.warnings:
        console.warn(warning)
    with bind(spec.host, spec.port) as listener:
        result: Result = load("mst_serve.serving:serve")(spec, plan, listener)  # torch, transformers: seconds
        return result
