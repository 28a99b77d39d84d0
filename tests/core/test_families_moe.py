"""Families with experts, MLA or vision: rows, dialects and Megatron's settings, from config.json alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mst_core import families
from mst_core.errors import InputError
from mst_core.families import family_for, pack, tasks, unpack

BASE: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 130, "max_position_embeddings": 64, "num_experts_per_tok": 2,
}  # fmt: skip
DEEPSEEK: dict[str, Any] = {
    "n_routed_experts": 4, "n_shared_experts": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1,
    "kv_lora_rank": 12, "q_lora_rank": 20, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
    "n_group": 1, "topk_group": 1,
}  # fmt: skip
MORE: dict[str, dict[str, Any]] = {
    "MixtralForCausalLM": {"num_local_experts": 4},
    "Qwen2MoeForCausalLM": {
        "num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24, "mlp_only_layers": [1],
    },
    "Qwen3MoeForCausalLM": {"num_experts": 4, "moe_intermediate_size": 16, "head_dim": 16},
    "DeepseekV2ForCausalLM": {**DEEPSEEK, "q_lora_rank": None},
    "DeepseekV3ForCausalLM": {**DEEPSEEK, "num_nextn_predict_layers": 1},
    "Glm4MoeForCausalLM": {**DEEPSEEK, "num_nextn_predict_layers": 1, "use_qk_norm": True, "attention_bias": True},
    "GptOssForCausalLM": {"num_local_experts": 4, "head_dim": 16},
    "Qwen2VLForConditionalGeneration": {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}},
    "Qwen2_5_VLForConditionalGeneration": {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}},
}  # fmt: skip
YARN = {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 4096}


def config(architecture: str, **more: Any) -> dict[str, Any]:
    return {**BASE, "architectures": [architecture], **MORE[architecture], **more}


def model(architecture: str, *, dialect: str | None = None, names: tuple[str, ...] = (), **more: Any) -> families.Model:
    made = config(architecture, **more)
    return family_for(made).model(made, names=names, dialect=dialect)


def groups(architecture: str, **more: Any) -> dict[str, dict[str, Any]]:
    made = config(architecture, **more)
    return family_for(made).megatron(made)


DIALECTS = [(name, dialect) for name in MORE for dialect in family_for({"architectures": [name]}).dialects or [None]]


@pytest.mark.parametrize(("architecture", "dialect"), DIALECTS)
@pytest.mark.parametrize("tied", [True, False])
def test_every_element_is_packed_once_and_comes_back(architecture: str, dialect: str | None, tied: bool) -> None:
    made = model(architecture, dialect=dialect, tie_word_embeddings=tied)
    seen: list[str] = []
    for task in tasks(made, 64):
        count, sources = 0, []
        for spec in task.hf:
            size = torch.Size(spec.shape).numel()
            sources.append(torch.arange(count + 1, count + size + 1).reshape(spec.shape))
            count += size
            seen.append(spec.name)
        native = pack(task, sources)
        assert native.shape == task.shape
        assert native.count_nonzero() == count
        assert len(set(native.flatten().tolist())) == count + (1 if task.padding else 0)
        assert all(torch.equal(a, b) for a, b in zip(sources, unpack(task, native), strict=True))
    assert len(seen) == len(set(seen))
    assert ("lm_head.weight" in seen) is not tied
    # A tied directory may hold the copy: of the embedding, whatever its prefix is.
    embedding = next(name for name in seen if name.endswith("embed_tokens.weight"))
    assert made.duplicates().get("lm_head.weight") == (embedding if tied else None)


@pytest.mark.parametrize("architecture", MORE)
def test_all_dialects_have_the_same_native_tensors(architecture: str) -> None:
    family = family_for({"architectures": [architecture]})
    shapes = [
        {task.native: task.shape for task in tasks(model(architecture, dialect=dialect)) if "mtp." not in task.native}
        for dialect in family.dialects or [None]
    ]
    assert all(shape == shapes[0] for shape in shapes)


@pytest.mark.parametrize(
    ("architecture", "name", "fact"),
    [
        ("MixtralForCausalLM", "model.layers.2.block_sparse_moe.gate.weight", "per_expert"),
        ("MixtralForCausalLM", "model.layers.0.mlp.experts.gate_up_proj", "stacked"),
        ("Qwen2MoeForCausalLM", "model.layers.2.mlp.experts.gate_up_proj", "stacked"),
        ("Qwen2MoeForCausalLM", "something.else", "per_expert"),
        ("DeepseekV3ForCausalLM", "model.layers.3.eh_proj.weight", "mtp"),
        ("DeepseekV3ForCausalLM", "model.layers.1.mlp.experts.0.gate_proj.weight", "per_expert"),
        ("Qwen2VLForConditionalGeneration", "model.language_model.embed_tokens.weight", "nested"),
        ("Qwen2VLForConditionalGeneration", "model.embed_tokens.weight", "flat"),
    ],
)
def test_names_decide_the_dialect(architecture: str, name: str, fact: str) -> None:
    assert fact in model(architecture, names=(name,)).facts


def test_experts_are_one_tensor() -> None:
    task = next(t for t in tasks(model("DeepseekV3ForCausalLM")) if "experts.experts.linear_fc1" in t.native)
    assert task.native == "decoder.layers.1.mlp.experts.experts.linear_fc1.weight"
    assert (task.shape, task.experts, len(task.hf)) == ((4, 32, 32), 4, 8)
    sources = [torch.full(spec.shape, number) for number, spec in enumerate(task.hf)]
    assert pack(task, sources)[3, :, 0].tolist() == [6] * 16 + [7] * 16  # gate of the last expert, then its up


def test_gpt_oss_experts_are_swapped_and_sorted() -> None:
    """[experts, in, out] with gate and up in turn becomes [experts, gate then up, in]; its bias likewise."""
    found = {t.native: t for t in tasks(model("GptOssForCausalLM")) if ".layers.0.mlp.experts." in t.native}
    gate_up = torch.arange(96).expand(4, 32, 96)
    fc1 = found["decoder.layers.0.mlp.experts.experts.linear_fc1.weight"]
    wanted = [*range(0, 96, 2), *range(1, 96, 2)]
    assert fc1.shape == (4, 96, 32)
    assert pack(fc1, [gate_up])[2, :, 5].tolist() == wanted
    bias = found["decoder.layers.0.mlp.experts.experts.linear_fc1.bias"]
    assert pack(bias, [gate_up[:, 0]])[3].tolist() == wanted
    down = torch.arange(48 * 32).reshape(1, 48, 32).expand(4, 48, 32)
    fc2 = found["decoder.layers.0.mlp.experts.experts.linear_fc2.weight"]
    assert torch.equal(pack(fc2, [down])[1], down[1].T)


def test_mtp_layers_follow_the_decoder() -> None:
    made = model("DeepseekV3ForCausalLM", dialect="per_expert and mtp")
    found = {task.native: task for task in tasks(made) if task.native.startswith("mtp.")}
    own = {name for name in found if ".transformer_layer." not in name}
    parts = ("enorm", "hnorm", "eh_proj", "final_layernorm")
    assert own == {f"mtp.layers.0.{part}.weight" for part in parts}
    decoder = {task.native.replace("decoder.layers.2", "mtp.layers.0.transformer_layer") for task in tasks(made)}
    assert found.keys() - own == {name for name in decoder if name.startswith("mtp.") and name not in own}
    eh = found["mtp.layers.0.eh_proj.weight"]
    assert (eh.hf[0].name, eh.shape, eh.layer) == ("model.layers.3.eh_proj.weight", (32, 64), None)
    experts = found["mtp.layers.0.transformer_layer.mlp.experts.experts.linear_fc2.weight"]
    assert experts.hf[0].name == "model.layers.3.mlp.experts.0.down_proj.weight"
    assert made.duplicates()["model.layers.3.shared_head.head.weight"] == "lm_head.weight"
    assert not any(t.native.startswith("mtp.") for t in tasks(model("DeepseekV3ForCausalLM", dialect="per_expert")))
    assert not any(
        t.native.startswith("mtp.") for t in tasks(model("DeepseekV3ForCausalLM", num_nextn_predict_layers=0))
    )


def test_layers_that_differ() -> None:
    made = model("Qwen2MoeForCausalLM")
    assert not made.uniform
    names = {task.native for task in tasks(made)}
    assert "decoder.layers.1.mlp.linear_fc1.weight" in names
    assert "decoder.layers.1.mlp.router.weight" not in names
    assert "decoder.layers.2.pre_mlp_layernorm.weight" in names
    assert "decoder.layers.2.mlp.linear_fc1.layer_norm_weight" not in names
    assert model("MixtralForCausalLM").uniform
    assert model("Qwen3MoeForCausalLM").uniform
    facts = model("DeepseekV3ForCausalLM", first_k_dense_replace=None, num_hidden_layers=5).layer_facts
    assert [next(iter(each)) for each in facts] == ["dense"] * 3 + ["moe"] * 2


def test_vision_tensors_are_carried() -> None:
    family = family_for(config("Qwen2_5_VLForConditionalGeneration"))
    assert family.name == "qwen2.5-vl"
    assert family.carried_native("visual.blocks.0.attn.qkv.weight") == "visual.blocks.0.attn.qkv.weight"
    assert family.carried_native("model.visual.merger.ln_q.weight") == "visual.merger.ln_q.weight"
    assert family.carried_native("model.language_model.norm.weight") is None
    assert family_for({"model_type": "qwen3"}).carried_native("visual.merger.ln_q.weight") is None


def test_the_language_model_inside() -> None:
    flat = config("Qwen2VLForConditionalGeneration")
    text = {key: value for key, value in flat.items() if key != "architectures"}
    nested = {"architectures": flat["architectures"], "text_config": text, "hidden_size": 7, "vocab_size": 9}
    family = family_for(flat)
    assert family.model(flat).dims == family.model(nested).dims
    assert not family.model(nested).tied
    assert family.model({**nested, "tie_word_embeddings": True}).tied
    assert family.model({**nested, "text_config": {**text, "tie_word_embeddings": True}}).tied
    for made in (flat, nested):
        settings = family.megatron(made)
        assert settings["transformer"]["mrope_section"] == [1, 1, 2]
        assert settings["transformer"]["add_qkv_bias"] is True
        assert (settings["gpt"]["position_embedding_type"], settings["gpt"]["rotary_base"]) == ("mrope", 1e6)
    with pytest.raises(InputError, match="mrope_section"):
        groups("Qwen2VLForConditionalGeneration", rope_scaling=None)


def test_routers() -> None:
    mixtral = groups("MixtralForCausalLM", sliding_window=8)["transformer"]
    assert (mixtral["num_moe_experts"], mixtral["moe_ffn_hidden_size"], mixtral["moe_router_topk"]) == (4, 48, 2)
    assert (mixtral["moe_router_pre_softmax"], mixtral["moe_layer_freq"], mixtral["window_size"]) == (False, 1, (7, 0))
    assert groups("Qwen3MoeForCausalLM", norm_topk_prob=True)["transformer"]["moe_router_pre_softmax"] is False
    assert groups("Qwen3MoeForCausalLM")["transformer"]["moe_router_pre_softmax"] is True
    qwen2 = groups("Qwen2MoeForCausalLM")["transformer"]
    assert qwen2["moe_layer_freq"] == [1, 0, 1]
    assert (qwen2["moe_shared_expert_intermediate_size"], qwen2["moe_shared_expert_gate"]) == (24, True)
    v3 = groups("DeepseekV3ForCausalLM")["transformer"]
    assert (v3["moe_router_score_function"], v3["moe_router_enable_expert_bias"]) == ("sigmoid", True)
    assert (v3["moe_router_topk_scaling_factor"], v3["moe_shared_expert_intermediate_size"]) == (2.5, 32)
    assert v3["moe_layer_freq"] == [0, 1, 1]
    assert "moe_router_num_groups" not in v3
    grouped = {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 4, "n_routed_experts": 8}
    v3 = groups("DeepseekV3ForCausalLM", **grouped)["transformer"]
    assert (v3["moe_router_num_groups"], v3["moe_router_group_topk"]) == (4, 2)
    v2 = groups("DeepseekV2ForCausalLM", q_lora_rank=20)["transformer"]
    assert (v2["moe_router_score_function"], v2["moe_router_pre_softmax"]) == ("softmax", True)
    # Megatron ranks a group by its best topk // topk_group experts, DeepSeek-V2 by its best one.
    one = {**grouped, "topk_group": 3, "num_experts_per_tok": 3, "topk_method": "group_limited_greedy"}
    v2 = groups("DeepseekV2ForCausalLM", q_lora_rank=20, **one)["transformer"]
    assert (v2["moe_router_num_groups"], v2["moe_router_group_topk"]) == (4, 3)


def test_latent_attention() -> None:
    made = groups("DeepseekV3ForCausalLM", rope_theta=5e4, rope_scaling={**YARN, "mscale": 1.0, "mscale_all_dim": 1.0})
    assert made["transformer"]["multi_latent_attention"] is True
    assert (made["transformer"]["kv_channels"], made["transformer"]["num_query_groups"]) == (6, 4)
    assert made["mla"] == {
        "q_lora_rank": 20, "kv_lora_rank": 12, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4, "v_head_dim": 6,
        "rotary_base": 5e4, "rope_type": "yarn", "rotary_scaling_factor": 40.0,
        "original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0,
        "mscale": 1.0, "mscale_all_dim": 1.0,
    }  # fmt: skip
    assert groups("DeepseekV3ForCausalLM")["mla"]["rope_type"] == "rope"
    assert "mla" not in groups("Glm4MoeForCausalLM")


def test_gpt_oss_settings() -> None:
    made = groups("GptOssForCausalLM")
    fields = made["transformer"]
    assert (fields["window_size"], fields["window_attn_skip_freq"]) == ((127, 0), [1, 0, 1])
    assert (fields["activation_func"], fields["glu_linear_offset"], fields["softmax_type"]) == (
        "quick_gelu", 1.0, "learnable",
    )  # fmt: skip
    assert made["gpt"]["position_embedding_type"] == "yarn"
    assert made["gpt"]["rotary_base"] == 150000.0
    assert made["attributes"]["yarn_rotary_scaling_factor"] == 32.0
    assert made["attributes"]["yarn_correction_range_round_to_int"] is False
    assert "attributes" not in groups("GptOssForCausalLM", rope_scaling={"rope_type": "default"})


@pytest.mark.parametrize(
    ("architecture", "broken", "word"),
    [
        ("MixtralForCausalLM", {"num_local_experts": 0}, "num_local_experts"),
        ("Qwen2MoeForCausalLM", {"shared_expert_intermediate_size": None}, "shared_expert_intermediate_size"),
        ("Qwen3MoeForCausalLM", {"num_experts": None}, "num_experts"),
        ("DeepseekV3ForCausalLM", {"kv_lora_rank": None}, "kv_lora_rank"),
        ("DeepseekV3ForCausalLM", {"attention_bias": True}, "attention_bias"),
        ("GptOssForCausalLM", {"attention_bias": False}, "attention_bias"),
    ],
)
def test_a_config_that_cannot_be_read_is_refused(architecture: str, broken: dict[str, Any], word: str) -> None:
    with pytest.raises(InputError, match=word):
        model(architecture, **broken)


@pytest.mark.parametrize(
    ("architecture", "broken", "word"),
    [
        ("DeepseekV2ForCausalLM", {}, "q_lora_rank"),
        ("DeepseekV2ForCausalLM", {"norm_topk_prob": True}, "norm_topk_prob"),
        ("DeepseekV2ForCausalLM", {"topk_method": "other"}, "topk_method"),
        ("DeepseekV3ForCausalLM", {"scoring_func": "softmax"}, "scoring_func"),
        ("DeepseekV3ForCausalLM", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
        ("DeepseekV3ForCausalLM", {"rope_scaling": {**YARN, "mscale_all_dim": 1.0}}, "mscale_all_dim"),
        ("DeepseekV3ForCausalLM", {"num_experts_per_tok": 1}, "1 experts per token"),
        ("GptOssForCausalLM", {"rope_scaling": {**YARN, "mscale": 1.0}}, "attention factor"),
        ("GptOssForCausalLM", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
    ],
)
def test_what_megatron_cannot_express_is_refused(architecture: str, broken: dict[str, Any], word: str) -> None:
    model(architecture, **broken)
    with pytest.raises(InputError, match=word):
        groups(architecture, **broken)


LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
SIZES: dict[str, tuple[int, str, tuple[int, ...], dict[str, Any]]] = {
    "Mixtral-8x7B": (46702792704, "MixtralForCausalLM", (4096, 14336, 32, 32, 8, 32000), {"num_local_experts": 8}),
    "Qwen1.5-MoE-A2.7B": (
        14315784192, "Qwen2MoeForCausalLM", (2048, 5632, 24, 16, 16, 151936),
        {"num_experts": 60, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
         "mlp_only_layers": []},
    ),
    "Qwen3-30B-A3B": (
        30532122624, "Qwen3MoeForCausalLM", (2048, 6144, 48, 32, 4, 151936),
        {"num_experts": 128, "moe_intermediate_size": 768, "head_dim": 128},
    ),
    "DeepSeek-V2-Lite": (
        15706484224, "DeepseekV2ForCausalLM", (2048, 10944, 27, 16, 16, 102400),
        {**LATENT, "n_routed_experts": 64, "moe_intermediate_size": 1408},
    ),
    "DeepSeek-V3": (
        684489845504, "DeepseekV3ForCausalLM", (7168, 18432, 61, 128, 128, 129280),
        {**LATENT, "n_routed_experts": 256, "n_shared_experts": 1, "moe_intermediate_size": 2048, "q_lora_rank": 1536,
         "first_k_dense_replace": 3},
    ),
    "GLM-4.5-Air": (
        110468824832, "Glm4MoeForCausalLM", (4096, 10944, 46, 96, 8, 151552),
        {"n_routed_experts": 128, "n_shared_experts": 1, "moe_intermediate_size": 1408, "head_dim": 128,
         "use_qk_norm": False},
    ),
    "gpt-oss-20b": (
        20914757184, "GptOssForCausalLM", (2880, 2880, 24, 64, 8, 201088), {"num_local_experts": 32, "head_dim": 64},
    ),
}  # fmt: skip
KEYS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


@pytest.mark.parametrize("name", SIZES)
def test_public_models_have_as_many_parameters_as_their_cards_say(name: str) -> None:
    """With the copies of embedding and head that the MTP layers of public files hold."""
    count, architecture, sizes, more = SIZES[name]
    settings: dict[str, Any] = {**dict(zip((*KEYS, "vocab_size"), sizes, strict=True)), **more}
    made = model(architecture, **settings)
    copies = len(made.duplicates()) * made.dims.vocab * made.dims.hidden
    assert made.parameters + copies == count
