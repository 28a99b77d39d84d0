"""Dense families: published configs, formats whose code is never run against the equivalent Llama, names, settings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mst_core.errors import InputError
from mst_core.families import Model, family_for, pack, tasks, unpack

TINY: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 2, "vocab_size": 130, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
}  # fmt: skip


def sizes(layers: int, hidden: int, ffn: int, heads: int, groups: int, vocab: int, **more: Any) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": ffn, "num_attention_heads": heads,
        "num_key_value_heads": groups, "vocab_size": vocab, "max_position_embeddings": 4096, **more,
    }  # fmt: skip


# The sizes of published config.json files, and the number of parameters that the hub shows for the model.
PUBLISHED: dict[str, tuple[str, dict[str, Any], int]] = {
    "Llama-3.1-8B": ("LlamaForCausalLM", sizes(32, 4096, 14336, 32, 8, 128256), 8_030_261_248),
    "Yi-6B": ("LlamaForCausalLM", sizes(32, 4096, 11008, 32, 4, 64000), 6_061_035_520),
    "Yi-6B, early": ("YiForCausalLM", sizes(32, 4096, 11008, 32, 4, 64000), 6_061_035_520),
    "SmolLM2-135M": ("LlamaForCausalLM", sizes(30, 576, 1536, 9, 3, 49152, tie_word_embeddings=True), 134_515_008),
    "Mistral-7B": ("MistralForCausalLM", sizes(32, 4096, 14336, 32, 8, 32000), 7_241_732_096),
    "Mistral-Nemo": ("MistralForCausalLM", sizes(40, 5120, 14336, 32, 8, 131072, head_dim=128), 12_247_782_400),
    "Qwen1.5-0.5B": (
        "Qwen2ForCausalLM",
        sizes(24, 1024, 2816, 16, 16, 151936, tie_word_embeddings=True, use_sliding_window=False, sliding_window=32768,
              max_window_layers=21, torch_dtype="bfloat16", rope_theta=1e6, hidden_act="silu"),
        463_987_712,
    ),
    "Qwen3-0.6B": (
        "Qwen3ForCausalLM", sizes(28, 1024, 3072, 16, 8, 151936, head_dim=128, tie_word_embeddings=True), 596_049_920
    ),
    "internlm2-7b": ("InternLM2ForCausalLM", sizes(32, 4096, 14336, 32, 8, 92544, bias=False), 7_737_708_544),
    "internlm3-8b": (
        "InternLM3ForCausalLM",
        sizes(48, 4096, 10240, 32, 2, 128512, head_dim=128, qkv_bias=False, bias=False),
        8_804_241_408,
    ),
    "Baichuan2-7B": ("BaichuanForCausalLM", sizes(32, 4096, 11008, 32, 32, 125696), 7_505_973_248),
    "Baichuan-7B": ("BaiChuanForCausalLM", sizes(32, 4096, 11008, 32, 32, 64000), 7_000_559_616),
    "Phi-3-mini": ("Phi3ForCausalLM", sizes(32, 3072, 8192, 32, 32, 32064), 3_821_079_552),
    "Phi-4-mini": ("Phi3ForCausalLM", sizes(32, 3072, 8192, 24, 8, 200064, tie_word_embeddings=True), 3_836_021_760),
    "phi-4": ("Phi3ForCausalLM", sizes(40, 5120, 17920, 40, 10, 100352), 14_659_507_200),
    "gemma-2-2b": ("Gemma2ForCausalLM", sizes(26, 2304, 9216, 8, 4, 256000, head_dim=256), 2_614_341_888),
    "gemma-2-9b": ("Gemma2ForCausalLM", sizes(42, 3584, 14336, 16, 8, 256000, head_dim=256), 9_241_705_984),
    "gemma-3-1b": ("Gemma3ForCausalLM", sizes(26, 1152, 6912, 4, 1, 262144, head_dim=256), 999_885_952),
    "glm-4-9b-hf": (
        "GlmForCausalLM", sizes(40, 4096, 13696, 32, 2, 151552, head_dim=128, attention_bias=True), 9_399_951_360
    ),
    "GLM-4-9B-0414": (
        "Glm4ForCausalLM", sizes(40, 4096, 13696, 32, 2, 151552, head_dim=128, attention_bias=True), 9_400_279_040
    ),
}  # fmt: skip


def config(architecture: str, **more: Any) -> dict[str, Any]:
    return {**TINY, "architectures": [architecture], **more}


def model(made: dict[str, Any]) -> Model:
    return family_for(made).model(made)


def groups(architecture: str, **more: Any) -> dict[str, dict[str, Any]]:
    made = config(architecture, **more)
    return family_for(made).megatron(made)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_parameters(name: str) -> None:
    architecture, dims, parameters = PUBLISHED[name]
    assert model({"architectures": [architecture], **dims}).parameters == parameters


# Formats whose modelling code is on the hub and never run here: the same weights, written as that format and as Llama.


def random_llama(made: dict[str, Any]) -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {spec.name: torch.randn(spec.shape) for spec in model(made).hf_tensors()}


def natives(made: dict[str, Any], hf: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every native tensor; what is unpacked again must be what went in, and nothing may be left over."""
    packed: dict[str, Tensor] = {}
    left = dict(hf)
    for task in tasks(model(made), 64):
        sources = [left.pop(spec.name) for spec in task.hf]
        assert [tuple(source.shape) for source in sources] == [spec.shape for spec in task.hf]
        packed[task.native] = pack(task, sources)
        assert all(torch.equal(a, b) for a, b in zip(sources, unpack(task, packed[task.native]), strict=True))
    assert left == {}
    return packed


def fused(hf: dict[str, Tensor], layer: str, kind: str) -> list[Tensor]:
    return [hf.pop(f"{layer}.self_attn.{part}_proj.{kind}") for part in "qkv"]


def renamed(hf: dict[str, Tensor], names: dict[str, str]) -> dict[str, Tensor]:
    made = {}
    for name, tensor in hf.items():
        for old, new in names.items():
            name = name.replace(old, new)
        made[name] = tensor
    return made


def as_internlm2(hf: dict[str, Tensor], made: dict[str, Any]) -> dict[str, Tensor]:
    """``wqkv`` as modeling_internlm2.py reads it: rearrange(wqkv, "(h gs d) -> h gs d"), q first, then k and v."""
    heads, kv = made["num_attention_heads"], made["num_key_value_heads"]
    for i in range(made["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        for kind in ("weight", "bias"):
            if f"{layer}.self_attn.q_proj.{kind}" not in hf:
                continue
            q, k, v = (part.reshape(kv, -1, 64 // heads, *part.shape[1:]) for part in fused(hf, layer, kind))
            hf[f"{layer}.attention.wqkv.{kind}"] = torch.cat([q, k, v], 1).flatten(0, 2)
    return renamed(hf, {
        "self_attn.o_proj": "attention.wo", "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3", "mlp.down_proj": "feed_forward.w2",
        "model.embed_tokens": "model.tok_embeddings", "lm_head": "output",
    })  # fmt: skip


def as_baichuan(hf: dict[str, Tensor], made: dict[str, Any]) -> dict[str, Tensor]:
    for i in range(made["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        hf[f"{layer}.self_attn.W_pack.weight"] = torch.cat(fused(hf, layer, "weight"))
    return hf


def as_early_yi(hf: dict[str, Tensor], made: dict[str, Any]) -> dict[str, Tensor]:
    return renamed(hf, {"input_layernorm": "ln1", "post_attention_layernorm": "ln2"})


def as_phi3(hf: dict[str, Tensor], made: dict[str, Any]) -> dict[str, Tensor]:
    for i in range(made["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        hf[f"{layer}.self_attn.qkv_proj.weight"] = torch.cat(fused(hf, layer, "weight"))
        gate_up = [hf.pop(f"{layer}.mlp.{part}_proj.weight") for part in ("gate", "up")]
        hf[f"{layer}.mlp.gate_up_proj.weight"] = torch.cat(gate_up)
    return hf


BIASED = {"attention_bias": True, "mlp_bias": True}
MULTI_HEAD = {"num_key_value_heads": 8}
EQUIVALENT: dict[str, tuple[str, Any, dict[str, Any], dict[str, Any]]] = {
    "internlm2": ("InternLM2ForCausalLM", as_internlm2, {"bias": False}, {}),
    "internlm2, bias": ("InternLM2ForCausalLM", as_internlm2, {"bias": True}, {"attention_bias": True}),
    "internlm3": ("InternLM3ForCausalLM", lambda hf, _: hf, {"head_dim": 16}, {"head_dim": 16}),
    "internlm3, bias": ("InternLM3ForCausalLM", lambda hf, _: hf, {"qkv_bias": True, "bias": True}, BIASED),
    "baichuan2": ("BaichuanForCausalLM", as_baichuan, {"num_key_value_heads": None}, MULTI_HEAD),
    "baichuan1": ("BaiChuanForCausalLM", as_baichuan, {"num_key_value_heads": None}, MULTI_HEAD),
    "early yi": ("YiForCausalLM", as_early_yi, {}, {}),
    "phi3": ("Phi3ForCausalLM", as_phi3, {"head_dim": 16}, {"head_dim": 16}),
}  # fmt: skip


@pytest.mark.parametrize("name", EQUIVALENT)
def test_the_same_weights_as_llama_give_the_same_native_tensors(name: str) -> None:
    architecture, write, keys, llama_keys = EQUIVALENT[name]
    made, llama = config(architecture, **keys), config("LlamaForCausalLM", **llama_keys)
    weights = random_llama(llama)
    found, wanted = natives(made, write(dict(weights), llama)), natives(llama, weights)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)


@pytest.mark.parametrize("name", [name for name in EQUIVALENT if name != "internlm2, bias"])
def test_and_megatron_builds_the_same_model_of_them(name: str) -> None:
    architecture, _, keys, llama_keys = EQUIVALENT[name]
    assert groups(architecture, **keys) == groups("LlamaForCausalLM", **llama_keys)


# Names of what transformers has and megatron-core has not, written out.


def names(architecture: str, **more: Any) -> dict[str, tuple[str, ...]]:
    """Of the second layer: {native: Hugging Face}, both without the layer's prefix."""
    found = [task for task in tasks(model(config(architecture, **more))) if task.layer == 1]
    return {
        task.native.removeprefix("decoder.layers.1."): tuple(
            spec.name.removeprefix("model.layers.1.") for spec in task.hf
        )
        for task in found
    }


QKV = ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight")
GEMMA: dict[str, tuple[str, ...]] = {
    "self_attention.linear_qkv.layer_norm_weight": ("input_layernorm.weight",),
    "self_attention.linear_qkv.weight": QKV,
    "self_attention.linear_proj.weight": ("self_attn.o_proj.weight",),
    "self_attention.linear_proj.post_layernorm.weight": ("post_attention_layernorm.weight",),
    "mlp.linear_fc1.layer_norm_weight": ("pre_feedforward_layernorm.weight",),
    "mlp.linear_fc1.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.linear_fc2.weight": ("mlp.down_proj.weight",),
    "mlp.linear_fc2.post_layernorm.weight": ("post_feedforward_layernorm.weight",),
}
QK_NORM = {
    "self_attention.q_layernorm.weight": ("self_attn.q_norm.weight",),
    "self_attention.k_layernorm.weight": ("self_attn.k_norm.weight",),
}
GLM4: dict[str, tuple[str, ...]] = {
    "self_attention.linear_qkv.layer_norm_weight": ("input_layernorm.weight",),
    "self_attention.linear_qkv.weight": QKV,
    "self_attention.linear_proj.weight": ("self_attn.o_proj.weight",),
    "self_attention.post_self_attn_layernorm.weight": ("post_self_attn_layernorm.weight",),
    "mlp.linear_fc1.layer_norm_weight": ("post_attention_layernorm.weight",),
    "mlp.linear_fc1.weight": ("mlp.gate_up_proj.weight",),
    "mlp.linear_fc2.weight": ("mlp.down_proj.weight",),
    "mlp.post_mlp_layernorm.weight": ("post_mlp_layernorm.weight",),
}


def test_post_norms_have_their_own_names() -> None:
    assert names("Gemma2ForCausalLM") == GEMMA
    assert names("Gemma3ForCausalLM") == {**GEMMA, **QK_NORM}
    assert names("Glm4ForCausalLM", attention_bias=False) == GLM4


def test_biases_have_their_rows() -> None:
    assert names("Glm4ForCausalLM").keys() - GLM4.keys() == {"self_attention.linear_qkv.bias"}
    plain = names("LlamaForCausalLM").keys()
    attention = {"self_attention.linear_qkv.bias", "self_attention.linear_proj.bias"}
    mlp = {"mlp.linear_fc1.bias", "mlp.linear_fc2.bias"}
    assert names("LlamaForCausalLM", attention_bias=True).keys() - plain == attention
    assert names("LlamaForCausalLM", mlp_bias=True).keys() - plain == mlp
    assert names("InternLM3ForCausalLM", bias=True).keys() - plain == mlp | {"self_attention.linear_proj.bias"}
    assert names("InternLM3ForCausalLM", qkv_bias=True).keys() - plain == {"self_attention.linear_qkv.bias"}
    assert names("Qwen3ForCausalLM", attention_bias=True).keys() - plain == attention | QK_NORM.keys()


# Settings


def test_megatron_has_two_switches_for_biases() -> None:
    everywhere = groups("LlamaForCausalLM", attention_bias=True, mlp_bias=True)["transformer"]
    assert everywhere["add_bias_linear"] is True
    assert groups("InternLM3ForCausalLM", qkv_bias=True)["transformer"]["add_qkv_bias"] is True
    for key in ("attention_bias", "mlp_bias"):
        with pytest.raises(InputError, match="not on all"):
            groups("LlamaForCausalLM", **{key: True})
    with pytest.raises(InputError, match="mlp_bias, proj_bias"):
        groups("InternLM3ForCausalLM", bias=True)


def test_an_absent_bias_of_internlm2_is_true() -> None:
    assert "qkv_bias" in model(config("InternLM2ForCausalLM")).facts


def test_the_head_of_internlm2_is_called_output() -> None:
    tied = model(config("InternLM2ForCausalLM", tie_word_embeddings=True))
    assert tied.duplicates() == {"output.weight": "model.tok_embeddings.weight"}
    assert model(config("InternLM2ForCausalLM", tie_word_embeddings=False)).duplicates() == {}


def test_gemma_is_tied_unless_it_says_otherwise() -> None:
    assert model(config("Gemma2ForCausalLM")).tied
    assert model(config("Gemma2ForCausalLM")).duplicates() == {"lm_head.weight": "model.embed_tokens.weight"}
    assert not model(config("Gemma3ForCausalLM", tie_word_embeddings=False)).tied
    assert model(config("Gemma2ForCausalLM")).dims.head_dim == 256


def test_the_image_reading_gemma3_is_not_known() -> None:
    with pytest.raises(InputError, match="Gemma3ForConditionalGeneration"):
        family_for(config("Gemma3ForConditionalGeneration"))


def test_rotation_of_glm() -> None:
    made = groups("GlmForCausalLM")
    assert made["transformer"]["rotary_interleaved"] is True
    assert made["transformer"]["layernorm_epsilon"] == 1e-5
    assert made["transformer"]["kv_channels"] == 128
    assert made["gpt"]["rotary_percent"] == 0.5
    assert groups("GlmForCausalLM", partial_rotary_factor=1.0)["gpt"]["rotary_percent"] == 1.0


def test_windows_and_long_rope_of_phi3() -> None:
    assert groups("Phi3ForCausalLM", sliding_window=2047)["transformer"]["window_size"] == (2046, 0)
    assert "window_size" not in groups("Phi3ForCausalLM")["transformer"]
    with pytest.raises(InputError, match="longrope"):
        groups("Phi3ForCausalLM", rope_scaling={"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]})


def test_dynamic_rope_changes_nothing_within_the_positions() -> None:
    made = groups("InternLM3ForCausalLM", rope_scaling={"rope_type": "dynamic", "factor": 6.0}, rope_theta=5e7)
    assert (made["gpt"]["rotary_base"], made["rope"]) == (5e7, {})
    assert "seq_len_interpolation_factor" not in made["gpt"]


def test_baichuan() -> None:
    """7B by its positions; 13B has none; the second generation's head is no plain output layer."""
    assert model(config("BaichuanForCausalLM")).dims.groups == 8
    for key in ({"max_position_embeddings": None, "model_max_length": 4096}, {"hidden_size": 5120}):
        with pytest.raises(InputError, match="ALiBi"):
            model(config("BaichuanForCausalLM", **key))
    with pytest.raises(InputError, match="NormHead"):
        groups("BaichuanForCausalLM", vocab_size=125696)


def test_qwen1_5_and_old_mistral_keys() -> None:
    old = {"use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 21, "rope_theta": 1e6}
    made = groups("Qwen2ForCausalLM", **old)
    assert (made["transformer"]["add_qkv_bias"], made["gpt"]["rotary_base"]) == (True, 1e6)
    assert "window_size" not in made["transformer"]
    nemo = groups("MistralForCausalLM", head_dim=16, sliding_window=None, rope_theta=1e6)
    assert (nemo["transformer"]["kv_channels"], nemo["gpt"]["rotary_base"]) == (16, 1e6)


def test_what_is_called_proved_by_logits_is_compared_by_logits() -> None:
    """PROOFS against the cases of the two oracles."""
    from tests.oracle import test_families, test_families_moe

    from mst_core.families import FAMILIES, PROOFS

    compared = {
        case[0].replace("_", "-") for case in (*test_families.BUILT.values(), *test_families_moe.BUILT.values())
    }
    said = {family.model_type.replace("_", "-") for family in FAMILIES if PROOFS[family.name].startswith("logits")}
    assert said == compared
    assert PROOFS.keys() == {family.name for family in FAMILIES}
