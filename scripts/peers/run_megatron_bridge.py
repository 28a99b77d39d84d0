"""Megatron-Bridge converts on the CPU: ``run_megatron_bridge.py import HF OUT``, ``... export HF MEGATRON OUT``.

Its own ``AutoBridge.import_ckpt`` and ``export_ckpt``, inside its own ``temporary_distributed_context("gloo")`` (it
would start nccl). What stands in for CUDA: ``te_stub`` and ``on_cpu``; and Megatron's output layer is told that
gradient accumulation fusion is there, which Megatron-Bridge asks for when it finds TransformerEngine.
"""

from __future__ import annotations

import sys

import on_cpu
import te_stub


def main(way: str, hf: str, *paths: str) -> None:
    """Convert."""
    te_stub.install()
    on_cpu.bridge()
    import torch
    from megatron.bridge import AutoBridge
    from megatron.bridge.training.model_load_save import temporary_distributed_context
    from megatron.core.tensor_parallel import layers

    layers._grad_accum_fusion_available = True
    if way == "import":
        with temporary_distributed_context("gloo"):
            AutoBridge.import_ckpt(hf, *paths, torch_dtype=torch.bfloat16)
    else:
        AutoBridge.from_hf_pretrained(hf, torch_dtype=torch.bfloat16).export_ckpt(*paths)


if __name__ == "__main__":
    main(*sys.argv[1:])
