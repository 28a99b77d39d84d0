"""FLOP per token against what torch counts in a real step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from mst_core import families, tensors
from mst_core.parallel import flops

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}


@pytest.mark.parametrize(
    ("family", "options", "chosen"), [("llama", {}, 0), ("qwen2", {}, 0), ("qwen3", {}, 0), ("qwen3_moe", EXPERTS, 2)]
)
def test_flop_per_token(tiny_hf: Callable[..., Path], family: str, options: dict[str, int], chosen: int) -> None:
    directory, rows, length = tiny_hf(family, **options), 2, 64
    config = tensors.config(directory)
    model = families.family_for(config, str(directory)).model(config, str(directory))
    theirs = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    with FlopCounterMode(display=False) as counter:
        theirs(input_ids=torch.randint(0, 330, (rows, length)), use_cache=False).logits.sum().backward()
    counted = counter.get_total_flops() / (rows * length)
    # Eager attention computes the upper half too, which causal attention need not.
    only_weights = flops.per_token(model, 0, chosen)
    attention = flops.per_token(model, length, chosen) - only_weights
    assert counted == pytest.approx(only_weights + 2 * attention, rel=0.005)
    assert 2 * attention > 0.01 * counted


def test_peaks_are_found_by_a_word_of_the_name() -> None:
    assert flops.peak("NVIDIA H200") == flops.peak("NVIDIA H100 80GB HBM3") == 989.4e12
    assert flops.peak("NVIDIA A100-SXM4-80GB") == 312e12
    assert flops.peak("NVIDIA H20") == 148e12
    assert flops.peak("Some CPU") is None
