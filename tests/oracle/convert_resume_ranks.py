"""Two ranks of test_convert_resume.py, under torchrun: megatron.training's own save_checkpoint and load_checkpoint.

    python -m torch.distributed.run --nproc-per-node 2 -m tests.oracle.convert_resume_ranks save|load RUNS.json

``save`` trains two steps with dropout, saves, and trains the third. ``load`` starts anew with other random numbers,
loads what ``--load`` says and trains the third. Each run's weights and optimizer state end up in ``NAME-rank.pt``.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from mst_core.engine.megatron import cpu
from tests.oracle.convert_optimizer_ranks import STEPS, seen, train
from tests.oracle.convert_training_ranks import ALWAYS, stop


def run(what: str, words: list[str]) -> dict[str, Any]:
    from megatron.core import mpu
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import get_megatron_optimizer
    from megatron.training.argument_utils import core_transformer_config_from_args
    from megatron.training.arguments import parse_and_validate_args
    from megatron.training.checkpointing import load_checkpoint, save_checkpoint
    from megatron.training.initialize import initialize_megatron
    from megatron.training.training import get_megatron_optimizer_config, get_optimizer_param_scheduler

    sys.argv = ["pretrain_gpt.py", *ALWAYS, *words]
    args = parse_and_validate_args()
    initialize_megatron(allow_no_cuda=True)
    model = GPTModel(
        config=core_transformer_config_from_args(args),
        transformer_layer_spec=get_gpt_layer_local_spec(normalization=args.normalization),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_base=args.rotary_base,
    )
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    wrapped = DistributedDataParallel(model.config, ddp, model)
    optimizer = get_megatron_optimizer(get_megatron_optimizer_config(args)[0], [wrapped], use_gloo_process_groups=False)
    scheduler = get_optimizer_param_scheduler(optimizer)
    assert mpu.get_tensor_model_parallel_world_size() == 2
    iteration = 0
    if what == "save":
        for number in range(STEPS):
            train(wrapped, optimizer, number)
            scheduler.step(increment=args.global_batch_size)
        save_checkpoint(STEPS, [wrapped], optimizer, scheduler, 0)
    else:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float("nan"))
        iteration, _ = load_checkpoint([wrapped], optimizer, scheduler)
    found = {"before": seen(model, optimizer), "iteration": iteration, "scheduler": scheduler.state_dict()}
    train(wrapped, optimizer, STEPS)
    return {**found, "after": seen(model, optimizer), "random": random.random(), "rows": args.padded_vocab_size}


def main() -> None:
    what, plan = sys.argv[1], json.loads(Path(sys.argv[2]).read_text())
    cpu.apply()
    cuda: Any = torch.cuda
    cuda.get_device_properties = lambda *_: type("Device", (), {"major": 9})()
    from megatron.core.datasets import utils

    utils.compile_helpers = lambda: None
    for name, words in plan.items():
        found = run(what, words)
        torch.save(found, f"{name}-rank{dist.get_rank()}.pt")
        stop()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
