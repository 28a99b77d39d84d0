"""Families with experts, MLA or vision against transformers (names, shapes) and megatron-core (logits), tiny models."""

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
QWEN: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
QWEN2: dict[str, Any] = {**QWEN, "shared_expert_intermediate_size": 48}
QWEN3: dict[str, Any] = {**QWEN, "head_dim": 32}
ROUTED: dict[str, Any] = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
MLA: dict[str, Any] = {
    **ROUTED, "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 20,
}  # fmt: skip
YARN: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32,
    "beta_fast": 32.0, "beta_slow": 1.0,
}  # fmt: skip
GROUPED = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
VISION = {"depth": 1, "num_heads": 2, "hidden_size": 64, "embed_dim": 32}
VISION25 = {**VISION, "out_hidden_size": 64, "intermediate_size": 32, "fullatt_block_indexes": [0]}

# What megatron-core's local spec runs on a CPU: logits are compared.
BUILT: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "mixtral, tied, window": ("mixtral", {"num_local_experts": 4, "tie_word_embeddings": True, "sliding_window": 7}),
    "qwen2-moe": ("qwen2_moe", {**QWEN2, "norm_topk_prob": False}),
    "qwen2-moe, mixed": ("qwen2_moe", {**QWEN2, "norm_topk_prob": True, "decoder_sparse_step": 2, "qkv_bias": False}),
    "qwen3-moe": ("qwen3_moe", {**QWEN3, "norm_topk_prob": True}),
    "qwen3-moe, mixed": ("qwen3_moe", {**QWEN3, "norm_topk_prob": False, "mlp_only_layers": [2]}),
    "deepseek-v2-lite": ("deepseek_v2", {**MLA, "q_lora_rank": None, "routed_scaling_factor": 1.5}),
    "moonlight": ("deepseek_v3", {**MLA, "q_lora_rank": None}),
    "deepseek-v2, yarn": (
        "deepseek_v2",
        {**MLA, "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}},
    ),
    "deepseek-v3": ("deepseek_v3", MLA),
    "deepseek-v3, yarn": (
        "deepseek_v3",
        {**MLA, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "deepseek-v3, plain yarn": ("deepseek_v3", {**MLA, "rope_parameters": YARN}),
    "deepseek-v3, groups": ("deepseek_v3", {**MLA, **GROUPED}),
    "glm4-moe": ("glm4_moe", {**ROUTED, "attention_bias": True, "use_qk_norm": True, "routed_scaling_factor": 2.5}),
    "glm4-moe, plain": ("glm4_moe", {**ROUTED, "head_dim": 32}),
    "gpt-oss": ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 8}),
    # Square matrices: a transposition too many would go unnoticed but for the logits (Megatron-Bridge PR #3743).
    "gpt-oss, square": (
        "gpt_oss",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "intermediate_size": 64},
    ),
    "gpt-oss, plain rope": (
        "gpt_oss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 32,
            "swiglu_limit": 0.5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
        },
    ),
    "qwen2-vl": ("qwen2_vl", {"rope_parameters": MROPE}),
    "qwen2.5-vl, tied": ("qwen2_5_vl", {"rope_parameters": MROPE, "tie_word_embeddings": True}),
}
# What megatron-core cannot express: names and shapes only, and the word of the refusal.
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "qwen3-moe, bias": ("qwen3_moe", {**QWEN3, "attention_bias": True}, "proj_bias, qkv_bias"),
    "deepseek-v2, groups": ("deepseek_v2", {**MLA, **GROUPED, "topk_method": "group_limited_greedy"}, "best 1"),
    "deepseek-v3, other groups": ("deepseek_v3", {**MLA, **GROUPED, "num_experts_per_tok": 3}, "best 2"),
    "deepseek-v3, not renormalised": ("deepseek_v3", {**MLA, "norm_topk_prob": False}, "norm_topk_prob"),
    "deepseek-v3, rope in halves": ("deepseek_v3", {**MLA, "rope_interleave": False}, "rope_interleave"),
    "gpt-oss, alpha": (
        "gpt_oss",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "swiglu_alpha": 1.5},
        "swiglu_alpha",
    ),
}
# Rows proved by logits, with a repaired module; megatron-core as it is cannot, so the settings are refused.
NOT_STOCK = {"deepseek-v2-lite": "q_lora_rank", "moonlight": "q_lora_rank"}
MTP = ("deepseek-v3", "glm4-moe")
CASES = {**BUILT, **{name: case[:2] for name, case in REFUSED.items()}}


def make(directory: Path, model_type: str, dims: dict[str, Any]) -> None:
    """A tiny model with no two norms, biases or sinks alike, and its logits for two rows of tokens."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    torch.manual_seed(3)
    dims = {**DIMS, **dims}
    if model_type.endswith("_vl"):
        vision = VISION if model_type == "qwen2_vl" else VISION25
        tied = dims.pop("tie_word_embeddings")
        config = AutoConfig.for_model(model_type, text_config=dims, vision_config=vision, tie_word_embeddings=tied)
        auto = AutoModelForImageTextToText
    else:
        config, auto = AutoConfig.for_model(model_type, **dims), AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if "norm" in name or name.endswith(("bias", "sinks")):
                tensor.add_(torch.randn_like(tensor), alpha=0.3)
        tokens = torch.randint(0, dims["vocab_size"], (2, 24))
        logits = model(input_ids=tokens).logits.contiguous()
    model.save_pretrained(directory)
    memory = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_file(memory, directory / "memory.safetensors")
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
    plan = {
        "cases": {name: str(saved[name]) for name in BUILT},
        "mtp": {name: str(saved[name]) for name in MTP},
    }
    return alone("tests.oracle.families_moe_process", plan, where)


def known(directory: Path) -> families.Model:
    config = tensors.config(directory)
    return family_for(config).model(config, names=tensors.headers(directory))


@pytest.mark.parametrize("name", CASES)
def test_names_and_shapes_are_those_that_transformers_saves(saved: dict[str, Path], name: str) -> None:
    model = known(saved[name])
    there = {ref.name: ref.shape for ref in tensors.headers(saved[name]).values()}
    there = {key: shape for key, shape in there.items() if not model.family.carried_native(key)}
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


@pytest.mark.parametrize("name", CASES)
def test_names_that_transformers_has_in_memory_give_the_same_native_tensors(saved: dict[str, Path], name: str) -> None:
    """The other dialect: experts stacked, language models nested."""
    file, memory = load_file(saved[name] / "model.safetensors"), load_file(saved[name] / "memory.safetensors")
    config = tensors.config(saved[name])
    model = family_for(config).model(config, names=memory)
    there = {key for key in memory.keys() - model.duplicates().keys() if not model.family.carried_native(key)}
    assert there == {spec.name for spec in model.hf_tensors()}
    for one, other in zip(tasks(known(saved[name])), tasks(model), strict=True):
        assert one.native == other.native
        packed = [
            pack(task, [source[spec.name] for spec in task.hf]) for task, source in ((one, file), (other, memory))
        ]
        assert torch.equal(packed[0], packed[1])


@pytest.mark.parametrize("name", BUILT)
def test_logits_of_megatron_core_equal_those_of_transformers(ran: dict[str, Any], name: str) -> None:
    found = ran[name]
    assert found["missing"] == found["unexpected"] == found["shapes"] == []
    assert found["difference"] <= 1e-5
    assert found["spread"] > 0.3


@pytest.mark.parametrize("name", MTP)
def test_multi_token_prediction_layers_are_named_as_megatron_core_names_them(ran: dict[str, Any], name: str) -> None:
    found = ran[f"{name}, mtp"]
    assert found["rows"] == found["built"]
    assert sum(key.startswith("mtp.layers.1.") for key in found["rows"]) > 15


WORDS = {**NOT_STOCK, **{name: case[2] for name, case in REFUSED.items()}}


@pytest.mark.parametrize("name", WORDS)
def test_what_megatron_core_cannot_express_is_refused_with_the_reason(saved: dict[str, Path], name: str) -> None:
    config = tensors.config(saved[name])
    with pytest.raises(InputError, match=WORDS[name]) as raised:
        family_for(config).megatron(config)
    assert "--engine plain" in str(raised.value.hint)
