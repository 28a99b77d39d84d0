"""What ranks can do to a run. A program of its own (``launch_ranks.py CASE RANKS``), so that spawned ranks find it.

Prints the result as JSON, or ends as a tool ends: one error on stderr and its exit code.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from mst_core import cluster
from mst_core.cli import stop_on_sigterm
from mst_core.engine import launch
from mst_core.errors import InputError, MstError


def behave(case: str, folder: str) -> dict[str, object]:
    """One rank of a run."""
    rank = cluster.rank()
    Path(folder, f"pid-{rank}").write_text(str(os.getpid()))
    sys.stdout.write(f"rank {rank} prints\n")
    while len(list(Path(folder).glob("pid-*"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)
    if case == "error" and rank == 1:
        raise InputError("cannot be used", where="rows.jsonl:7", hint="mend it")
    if case == "bug" and rank == 1:
        return {"never": 1 // (rank - 1)}
    if case == "killed" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if case != "well":
        time.sleep(120)
    return {"rank": rank, "world": os.environ.get("WORLD_SIZE"), "threads": os.environ.get("OMP_NUM_THREADS")}


def main() -> None:
    case, ranks, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    try:
        stop_on_sigterm()
        found = launch.run_ranks("launch_ranks:behave", "megatron", ranks, case, folder)
    except MstError as error:
        sys.stderr.write(f"error: {type(error).__name__}: {error} (hint: {error.hint})\n")
        sys.exit(error.exit_code)
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
