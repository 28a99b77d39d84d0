"""Weights and tokenizer into memory."""

from __future__ import annotations

from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from mst_core import devices
from mst_core.errors import InputError
from mst_serve.plan import ServePlan


def load_model(plan: ServePlan, precision: Literal["fp32", "bf16"] | None) -> Any:
    """The model on this machine's device, for inference. fp32 on a CPU (bf16 is slower there), bf16 elsewhere."""
    device = devices.best()
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision or ("fp32" if device == "cpu" else "bf16")]
    logging.disable_progress_bar()
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            plan.directory, dtype=dtype, local_files_only=True, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
        raise InputError(f"transformers cannot load the model: {error}", where=plan.directory) from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise InputError(f"transformers found no weights for {', '.join(missing[:5])}", where=plan.directory)
    return model.to(device).eval()
