"""Dense families against transformers (names, shapes) and megatron-core (logits), on tiny random models."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mst_core import families, tensors
from mst_core.errors import InputError
from mst_core.families import family_for, pack, tasks, unpack
from tests.launch import alone

DIMS: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "vocab_size": 130, "initializer_range": 0.1,
    "tie_word_embeddings": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
HALF = {"rope_type": "default", "partial_rotary_factor": 0.5, "rope_theta": 10000.0}
THREE_QUARTERS = {**HALF, "partial_rotary_factor": 0.75}

# What megatron-core can build: logits are compared.
BUILT: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"head_dim": 24}),
    "llama, tied": ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "llama, bias everywhere": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, dynamic rope": ("llama", {"rope_parameters": DYNAMIC}),
    "qwen2": ("qwen2", {}),
    "qwen2, windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "mistral-nemo": ("mistral", {"head_dim": 32, "sliding_window": None}),
    "phi3": ("phi3", {"sliding_window": 7}),
    "phi3, tied, partial rope": (
        "phi3",
        {"tie_word_embeddings": True, "rope_parameters": THREE_QUARTERS, "rms_norm_eps": 1e-5},
    ),
    "glm": ("glm", {"head_dim": 32, "rope_parameters": HALF}),
    "glm, no bias": ("glm", {"head_dim": 32, "attention_bias": False, "num_key_value_heads": 4}),
}
# What it cannot: names and shapes only, and the word of the refusal.
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama, attention bias": ("llama", {"attention_bias": True}, "proj_bias, qkv_bias"),
    "llama, mlp bias": ("llama", {"mlp_bias": True}, "mlp_bias"),
    "qwen3, bias": ("qwen3", {"head_dim": 32, "attention_bias": True}, "proj_bias, qkv_bias"),
    "glm4": ("glm4", {"head_dim": 32}, "post_self_attn_layernorm"),
    "gemma2": ("gemma2", {"head_dim": 32, "tie_word_embeddings": True}, "norm after attention"),
    "gemma2, bias": ("gemma2", {"head_dim": 32, "attention_bias": True}, "norm after attention"),
    "gemma3": ("gemma3_text", {"head_dim": 32, "tie_word_embeddings": True}, "norm after attention"),
}  # fmt: skip
CASES = {**BUILT, **{name: case[:2] for name, case in REFUSED.items()}}


def make(directory: Path, model_type: str, dims: dict[str, Any]) -> None:
    """A tiny model with no two norms or biases alike, and its logits for two rows of tokens."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    config = AutoConfig.for_model(model_type, **{**DIMS, **dims})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith(".bias"):
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
        tokens = torch.randint(0, config.vocab_size, (2, 24))
        logits = model(tokens).logits.contiguous()
    model.save_pretrained(directory)
    save_file({"tokens": tokens, "logits": logits}, directory / "logits.safetensors")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    where = tmp_path_factory.mktemp("families")
    for number, (model_type, dims) in enumerate(CASES.values()):
        make(where / str(number), model_type, dims)
    return {name: where / str(number) for number, name in enumerate(CASES)}


@pytest.fixture(scope="module")
def ran(saved: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    where = tmp_path_factory.mktemp("found")
    plan = {"cases": {name: str(saved[name]) for name in BUILT}}
    return alone("tests.oracle.families_process", plan, where)


def known(directory: Path) -> families.Model:
    config = tensors.config(directory)
    return family_for(config).model(config)


@pytest.mark.parametrize("name", CASES)
def test_names_and_shapes_are_those_that_transformers_saves(saved: dict[str, Path], name: str) -> None:
    model = known(saved[name])
    there = {ref.name: ref.shape for ref in tensors.headers(saved[name]).values()}
    there = {key: shape for key, shape in there.items() if key not in model.duplicates()}
    assert there == {spec.name: spec.shape for spec in model.hf_tensors()}
    assert model.parameters == sum(prod(shape) for shape in there.values())


@pytest.mark.parametrize("name", CASES)
def test_packing_and_unpacking_gives_the_same_bits(saved: dict[str, Path], name: str) -> None:
    hf = load_file(saved[name] / "model.safetensors")
    found = tasks(known(saved[name]), 64)
    for task in found:
        sources = [hf[spec.name] for spec in task.hf]
        native = pack(task, sources)
        assert native.shape == task.shape
        assert all(torch.equal(a, b) for a, b in zip(sources, unpack(task, native), strict=True))
    assert len({task.native for task in found}) == len(found)


@pytest.mark.parametrize("name", BUILT)
def test_logits_of_megatron_core_equal_those_of_transformers(ran: dict[str, Any], name: str) -> None:
    found = ran[name]
    assert found["missing"] == found["unexpected"] == []
    assert found["difference"] <= 1e-5
    assert found["spread"] > 0.3


@pytest.mark.parametrize("name", REFUSED)
def test_what_megatron_core_cannot_build_is_refused_with_the_reason(saved: dict[str, Path], name: str) -> None:
    config = tensors.config(saved[name])
    with pytest.raises(InputError, match=REFUSED[name][2]) as raised:
        family_for(config).megatron(config)
    assert "--engine plain" in str(raised.value.hint)
