"""QLoRA (arXiv 2305.14314): the frozen weights under an adapter in 4 bits, by bitsandbytes.

Every linear layer of the decoder becomes NF4, 16 levels times the largest magnitude of each 64 weights; nf4-double
keeps those magnitudes in 8 bits. It is made from the directory's own weights when a run starts and is never written. A
layer computes with the weights that its 4 bits mean, in bf16 or fp32 as --precision says. Embedding, norms and head
stay fp32. A layer's 4 bits are a column of bytes, which fully_shard cuts and gathers as any other weight; its scales
stay whole on each rank.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch

from mst_core.errors import InputError, MissingPackage
from mst_core.runspec import RunSpec

BLOCK = 64
"""Weights that share a scale."""


def options(spec: RunSpec, device: torch.device) -> dict[str, Any]:
    """What from_pretrained is told; nothing without --qlora. Raises MissingPackage."""
    if spec.qlora is None:
        return {}
    for package in ("bitsandbytes", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise MissingPackage(f"--qlora needs {package}", hint="pip install 'mst-tools-core[qlora]'")
    from transformers import BitsAndBytesConfig

    half = spec.precision == "bf16"
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=spec.qlora == "nf4-double",
        bnb_4bit_compute_dtype=torch.bfloat16 if half else torch.float32,
    )
    # Several ranks do not know their own device yet, and move the model there themselves.
    return {"quantization_config": config, "device_map": {"": device if spec.ranks == 1 else "cpu"}}


def settle(model: torch.nn.Module, model_dir: Path) -> None:
    """See to bitsandbytes on a CPU. Raises InputError for layers that it would read wrongly there.

    At the first pass without a gradient it repacks layers for bf16 units and rounds their scales to bf16: a reference
    would be scored with other weights than the policy's. That is turned off. Rows that are no whole number of blocks
    are read with other scales than they were written with (seen with 0.50.2).
    """
    for name, module in model.named_modules():
        if type(module).__name__ != "Linear4bit":
            continue
        module.support_avx512bf16_for_cpu = False
        weight: Any = module.weight
        width = module.in_features
        if weight.device.type == "cpu" and width % BLOCK:
            what = f"bitsandbytes on a CPU misreads 4-bit rows of {width}, no multiple of {BLOCK}: {name}"
            raise InputError(f"--qlora: {what}", where=model_dir, hint="without --qlora, or on a CUDA machine")
