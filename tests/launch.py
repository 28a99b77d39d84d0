"""Programs beside a test: many ranks under torchrun, or one process alone. Each is started once and writes findings."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def torchrun(module: str, plan: dict[str, Any], where: Path, *, timeout: float = 600, **env: str) -> list[Any]:
    """What four ranks of ``module`` find: it gets the file of ``plan``, each rank writes ``where``/rank-N.json."""
    _run(["-m", "torch.distributed.run", "--nproc-per-node", "4", "--master-port", free_port()], module, plan, where,
         timeout=timeout, env=env)  # fmt: skip
    return [json.loads((where / f"rank-{rank}.json").read_text()) for rank in range(4)]


def alone(module: str, plan: dict[str, Any], where: Path, *, timeout: float = 300) -> dict[str, Any]:
    """What ``module`` finds: it gets the file of ``plan`` and a free port, and writes ``where``/found.json."""
    _run([], module, plan, where, free_port(), timeout=timeout, env={})
    found: dict[str, Any] = json.loads((where / "found.json").read_text())
    return found


def free_port() -> str:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def _run(
    launcher: list[str], module: str, plan: dict[str, Any], where: Path, *more: str, timeout: float, env: dict[str, str]
) -> None:
    (where / "plan.json").write_text(json.dumps({**plan, "out": str(where)}))
    done = subprocess.run(
        [sys.executable, *launcher, "-m", module, str(where / "plan.json"), *more],
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, last(done.stderr)


def last(text: str) -> str:
    """The end of the first rank's traceback."""
    lines = [line for line in text.splitlines() if line.startswith("[rank0]")]
    return "\n".join(lines[-30:]) or text[-3000:]
