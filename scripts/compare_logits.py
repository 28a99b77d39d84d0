"""max |logit difference| between transformers and megatron-core on the same weights, fp32, over random tokens.

    torchrun --standalone --nproc-per-node 2 scripts/compare_logits.py HF_DIR MEGATRON_DIR

Each rank is a pipeline stage. The last one prints the number.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from mst_core import tensors
from mst_core.engine.megatron.engine import MegatronEngine
from mst_core.engine.seam import Batch
from mst_core.runspec import RunSpec

TOKENS = (2, 48)
"""Sequences and their length."""


def main() -> None:
    """Build, run both, compare."""
    hf, megatron = map(Path, sys.argv[1:3])
    stages = int(os.environ["WORLD_SIZE"])
    last = int(os.environ["RANK"]) == stages - 1
    # transformers first: on a machine without CUDA the engine changes torch's factories for this process.
    tokens_BT = torch.randint(0, tensors.config(hf)["vocab_size"], TOKENS, generator=torch.Generator().manual_seed(0))
    expected_BTV = reference(hf, tokens_BT) if last else None
    spec = RunSpec(model=str(megatron), data=(), out=Path("unused"), pp=stages, precision="fp32")
    engine = MegatronEngine(spec, megatron)
    logits_BTV = engine.logits(Batch(tokens_BT, torch.zeros(TOKENS), torch.full((TOKENS[0],), TOKENS[1])))
    if logits_BTV is not None and expected_BTV is not None:
        print(f"{(logits_BTV.cpu() - expected_BTV).abs().max().item():.3e}", flush=True)
    dist.barrier()
    engine.close()


@torch.no_grad()
def reference(hf: Path, tokens_BT: torch.Tensor) -> torch.Tensor:
    """logits_BTV of transformers."""
    model = AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float32, local_files_only=True)
    logits_BTV: torch.Tensor = model(tokens_BT).logits
    return logits_BTV


if __name__ == "__main__":
    main()
