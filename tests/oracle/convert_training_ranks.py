"""One rank of test_convert_training.py, under torchrun: megatron.training's own arguments and load_checkpoint.

    python -m torch.distributed.run --nproc-per-node 4 -m tests.oracle.convert_training_ranks PLAN.json

For every run: its command line is parsed and validated as ``pretrain_gpt.py`` does it, GPTModel built from those
arguments with NaN everywhere, ``load_checkpoint`` called, and every parameter compared with the slice of the Hugging
Face tensors (slices.py). CUDA is answered for by mst's bridge (engine/megatron/cpu.py).
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from mst_core.engine.megatron import cpu
from tests.oracle.convert_layouts_ranks import fill, wanted, wrong
from tests.oracle.slices import Slices

ALWAYS = (
    "--transformer-impl", "local", "--distributed-backend", "gloo", "--no-gradient-accumulation-fusion",
    "--no-rope-fusion", "--no-persist-layer-norm", "--no-masked-softmax-fusion", "--no-bias-swiglu-fusion",
    "--no-bias-dropout-fusion", "--disable-jit-fuser", "--use-cpu-initialization", "--tokenizer-type", "NullTokenizer",
    "--vocab-size", "50", "--micro-batch-size", "1", "--train-iters", "1", "--lr", "1e-4", "--seq-length", "64",
    "--exit-on-missing-checkpoint",
)  # fmt: skip


def run(case: dict[str, Any]) -> dict[str, Any]:
    from megatron.core import mpu
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.training.argument_utils import core_transformer_config_from_args
    from megatron.training.arguments import parse_and_validate_args
    from megatron.training.checkpointing import load_checkpoint
    from megatron.training.initialize import initialize_megatron
    from safetensors.torch import load_file

    sys.argv = ["pretrain_gpt.py", *ALWAYS, *case["words"]]
    args = parse_and_validate_args()
    initialize_megatron(allow_no_cuda=True)
    model = GPTModel(
        config=core_transformer_config_from_args(args),
        transformer_layer_spec=get_gpt_layer_local_spec(normalization=args.normalization),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=mpu.is_pipeline_first_stage(),
        post_process=mpu.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_base=args.rotary_base,
    )
    fill(model)
    strict: list[str] = []
    load = model.load_state_dict

    def recorded(state: dict[str, Any], strict_load: bool = True, **kwargs: Any) -> Any:
        strict.append(str(kwargs.get("strict", strict_load)))
        return load(state, **kwargs)

    model.load_state_dict = recorded
    iteration, _ = load_checkpoint([model], None, None)
    want = wanted(model, Slices(load_file(case["hf"] + "/model.safetensors"), model.config, args.padded_vocab_size))
    return {
        "wrong": wrong(model, want),
        "tensors": len(want),
        "strict": strict,
        "iteration": iteration,
        "rows": args.padded_vocab_size,
        "args": {name: getattr(args, name) for name in case["asked"]},
    }


def stop() -> None:
    """What a second run in one process needs forgotten."""
    from megatron.core import mpu
    from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
    from megatron.core.rerun_state_machine import destroy_rerun_state_machine
    from megatron.training.global_vars import destroy_global_vars

    dist.barrier()
    mpu.destroy_model_parallel()
    destroy_global_vars()
    destroy_num_microbatches_calculator()
    destroy_rerun_state_machine()


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text())
    cpu.apply()
    cuda: Any = torch.cuda
    cuda.get_device_properties = lambda *_: type("Device", (), {"major": 9})()
    from megatron.core.datasets import utils

    utils.compile_helpers = lambda: None
    found = {}
    for name, case in plan["runs"].items():
        found[name] = run(case)
        stop()
    Path(plan["out"], f"rank-{os.environ['RANK']}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
