"""mcore-bridge converts on the CPU: ``run_mcore_bridge.py import HF OUT``, ``... export HF MEGATRON OUT``.

Its own ``load_weights`` and ``save_weights`` as its README shows them, over gloo; the Megatron side is megatron-core's
``dist_checkpointing`` with the state that ms-swift, its main user, saves and loads there. (ms-swift also loads the
Hugging Face model on the way in, and spares a copy of fc1 on the way back; neither is done here.) What stands in for
CUDA: ``te_stub`` and ``on_cpu``.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import on_cpu
import te_stub


def main(way: str, hf: str, *paths: str) -> None:
    """Convert."""
    te_stub.install()
    on_cpu.bridge()
    import torch
    from mcore_bridge import ModelConfig, get_mcore_model, hf_to_mcore_config
    from megatron.core import mpu
    from transformers import AutoConfig, AutoTokenizer

    with tempfile.TemporaryDirectory() as meeting, on_cpu.Cpu():
        torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}/store", rank=0, world_size=1)
        mpu.initialize_model_parallel()
        hf_config = AutoConfig.from_pretrained(hf)
        config = ModelConfig(
            params_dtype=torch.bfloat16,
            bf16=True,
            use_cpu_initialization=True,
            perform_initialization=False,
            **hf_to_mcore_config(hf_config),
        )
        models = get_mcore_model(config)
        if way == "import":
            config.bridge.load_weights(models, hf)
            save(models[0], Path(paths[0]))
        else:
            load(models[0], Path(paths[0]))
            config.bridge.save_weights(models, paths[1])
            hf_config.save_pretrained(paths[1])
            AutoTokenizer.from_pretrained(hf).save_pretrained(paths[1])
        torch.distributed.destroy_process_group()


def save(model: Any, out: Path) -> None:
    """A torch_dist checkpoint of the model, as ms-swift's ``save_mcore_checkpoint`` makes it."""
    from megatron.core import dist_checkpointing, mpu
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    where = out / "iter_0000001"
    where.mkdir(parents=True)
    group = mpu.get_data_parallel_group(with_context_parallel=True)
    state = {
        "args": argparse.Namespace(tensor_model_parallel_size=1, pipeline_model_parallel_size=1),
        "checkpoint_version": 3.0,
        "iteration": 1,
        "model": model.sharded_state_dict(metadata={"dp_cp_group": group}),
    }
    dist_checkpointing.save(
        state,
        str(where),
        FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy(), group),
        validate_access_integrity=True,
        content_metadata={},
    )
    (out / "latest_checkpointed_iteration.txt").write_text("1")


def load(model: Any, source: Path) -> None:
    """The model's weights from such a checkpoint, as ms-swift's ``load_mcore_checkpoint`` reads them."""
    from megatron.core import dist_checkpointing, mpu
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy

    group = mpu.get_data_parallel_group(with_context_parallel=True)
    state = dist_checkpointing.load(
        {"model": model.sharded_state_dict(metadata={"dp_cp_group": group})},
        str(source / "iter_0000001"),
        FullyParallelLoadStrategyWrapper(TorchDistLoadShardedStrategy(), group),
    )
    model.load_state_dict(state["model"], strict=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
