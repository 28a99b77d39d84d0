"""What --lora-targets means in each architecture, and what PEFT is told."""

from __future__ import annotations

from typing import Any

import pytest

from mst_core import lora_sites
from mst_core.errors import SettingsError
from mst_core.families import family_for
from mst_core.families.rules import Model

SIZES: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 50, "max_position_embeddings": 64,
}  # fmt: skip
MOE = {"num_experts": 4, "moe_intermediate_size": 12, "num_experts_per_tok": 2}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
STACKED = ["experts.gate_up_proj", "experts.down_proj"]


def model(architecture: str, **config: Any) -> Model:
    full = {"architectures": [architecture], **SIZES, **config}
    return family_for(full).model(full)


@pytest.mark.parametrize(
    ("architecture", "config", "modules", "parameters"),
    [
        ("LlamaForCausalLM", {}, [*ATTENTION, "gate_proj", "up_proj", "down_proj"], []),
        ("Gemma2ForCausalLM", {}, [*ATTENTION, "gate_proj", "up_proj", "down_proj"], []),
        ("Phi3ForCausalLM", {}, ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"], []),
        ("GlmForCausalLM", {}, [*ATTENTION, "gate_up_proj", "down_proj"], []),
        ("InternLM2ForCausalLM", {}, ["wqkv", "wo", "w1", "w3", "w2"], []),
        ("Qwen3MoeForCausalLM", MOE, ATTENTION, STACKED),
        ("MixtralForCausalLM", {"num_local_experts": 4}, ATTENTION, STACKED),
        (
            "Qwen3MoeForCausalLM",
            {**MOE, "decoder_sparse_step": 2},
            ATTENTION,
            [f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")] + STACKED,
        ),
        (
            "Qwen2MoeForCausalLM",
            {**MOE, "shared_expert_intermediate_size": 20},
            ATTENTION,
            [*STACKED, *(f"shared_expert.{name}_proj.weight" for name in ("gate", "up", "down"))],
        ),
    ],
)
def test_all_linear_is_every_layer_experts_included(
    architecture: str, config: dict[str, Any], modules: list[str], parameters: list[str]
) -> None:
    made = model(architecture, **config)
    assert lora_sites.peft_targets(made, lora_sites.chosen(made, ["all-linear"])) == (modules, parameters)


@pytest.mark.parametrize(
    ("asked", "modules", "parameters"),
    [
        (["v_proj", "q_proj"], ["q_proj", "v_proj"], []),
        (["layers.1.self_attn.q_proj"], ["1.self_attn.q_proj"], []),
        (["experts.down_proj"], [], ["experts.down_proj"]),
        (["shared_expert.down_proj"], [], ["shared_expert.down_proj.weight"]),
        (["down_proj"], [], ["experts.down_proj", "shared_expert.down_proj.weight"]),
        (["gate_up_proj", "o_proj"], ["o_proj"], ["experts.gate_up_proj"]),
    ],
)
def test_a_target_is_a_name_or_its_end(asked: list[str], modules: list[str], parameters: list[str]) -> None:
    made = model("Qwen2MoeForCausalLM", **MOE, shared_expert_intermediate_size=20)
    assert lora_sites.peft_targets(made, lora_sites.chosen(made, asked)) == (modules, parameters)


@pytest.mark.parametrize(
    ("architecture", "config", "asked", "says"),
    [
        ("LlamaForCausalLM", {}, "q_porj", r"has no layer q_porj; did you mean q_proj"),
        ("Phi3ForCausalLM", {}, "q_proj", r"Phi3ForCausalLM has no layer q_proj; did you mean qkv_proj"),
        ("Qwen3MoeForCausalLM", MOE, "gate_proj", r"has no layer gate_proj; did you mean gate_up_proj"),
        ("LlamaForCausalLM", {}, "lm_head", r"has no layer lm_head$"),
        ("LlamaForCausalLM", {}, "proj", r"has no layer proj"),
    ],
)
def test_a_wrong_target_lists_what_it_could_have_meant(
    architecture: str, config: dict[str, Any], asked: str, says: str
) -> None:
    with pytest.raises(SettingsError, match=says) as caught:
        lora_sites.chosen(model(architecture, **config), [asked])
    assert "all-linear, or of " in str(caught.value.hint)
    assert "o_proj" in str(caught.value.hint)


def test_names_and_sizes_of_experts() -> None:
    first, second = lora_sites.chosen(model("MixtralForCausalLM", num_local_experts=4), STACKED)[:2]
    assert (first.name, first.experts, first.rows, first.columns) == (
        "model.layers.0.mlp.experts.gate_up_proj", 4, 48, 16,
    )  # fmt: skip
    assert (second.name, second.rows, second.columns) == ("model.layers.0.mlp.experts.down_proj", 16, 24)
