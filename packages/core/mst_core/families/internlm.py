"""InternLM2 and 2.5, InternLM3 (remote code, never run; MAPPINGS.md 2.1 and 2.11).

InternLM2's fused ``wqkv`` is already in Megatron's row order, q of a group then its k and v: it is copied as it is.
"""

from __future__ import annotations

from typing import Any

from mst_core.families.llama import FINAL_NORM, LLAMA
from mst_core.families.rules import Config, Family, Reading, Rule, Where
from mst_core.families.translate import bias_fields, dense_dims, megatron_groups, tie_fact

LAYER2 = "decoder.layers.{i}.self_attention.linear_qkv"
ROWS2 = (
    Rule("embedding.word_embeddings.weight", ("model.tok_embeddings.weight [v,h]",)),
    Rule(f"{LAYER2}.layer_norm_weight", ("model.layers.{i}.attention_norm.weight [h]",)),
    Rule(f"{LAYER2}.weight", ("model.layers.{i}.attention.wqkv.weight [qkv,h]",)),
    Rule(f"{LAYER2}.bias", ("model.layers.{i}.attention.wqkv.bias [qkv]",), when="qkv_bias"),
    Rule("decoder.layers.{i}.self_attention.linear_proj.weight", ("model.layers.{i}.attention.wo.weight [h,q]",)),
    Rule(
        "decoder.layers.{i}.self_attention.linear_proj.bias",
        ("model.layers.{i}.attention.wo.bias [h]",),
        when="proj_bias",
    ),
    Rule("decoder.layers.{i}.mlp.linear_fc1.layer_norm_weight", ("model.layers.{i}.ffn_norm.weight [h]",)),
    Rule(
        "decoder.layers.{i}.mlp.linear_fc1.weight",
        ("model.layers.{i}.feed_forward.w1.weight [f,h]", "model.layers.{i}.feed_forward.w3.weight [f,h]"),
        "concat",
    ),
    Rule("decoder.layers.{i}.mlp.linear_fc2.weight", ("model.layers.{i}.feed_forward.w2.weight [h,f]",)),
    FINAL_NORM,
    Rule("output_layer.weight", ("output.weight [v,h]",), when="untied"),
)


def _read2(config: Config, where: Where) -> Reading:
    # An absent key means true to configuration_internlm2.py; every published config says false.
    biases = {"qkv_bias", "proj_bias"} if config.get("bias", True) else set()
    return Reading(dense_dims(config, where), frozenset({tie_fact(config), *biases}))


def _read3(config: Config, where: Where) -> Reading:
    flags = {"qkv_bias": {"qkv_bias"}, "bias": {"proj_bias", "mlp_bias"}}
    biases = (fact for flag, facts in flags.items() if config.get(flag) for fact in facts)
    return Reading(dense_dims(config, where), frozenset({tie_fact(config), *biases}))


def _translate2(config: Config, where: Where) -> dict[str, dict[str, Any]]:
    return megatron_groups(config, where, window=None, **bias_fields(_read2(config, where).facts, where))


def _translate3(config: Config, where: Where) -> dict[str, dict[str, Any]]:
    return megatron_groups(config, where, window=None, **bias_fields(_read3(config, where).facts, where))


INTERNLM2 = Family(
    name="internlm2",
    architecture="InternLM2ForCausalLM",
    model_type="internlm2",
    rules=ROWS2,
    read=_read2,
    translate=_translate2,
    ignored=("model.layers.{i}.attention.rotary_emb.inv_freq",),
)
INTERNLM3 = Family(
    name="internlm3",
    architecture="InternLM3ForCausalLM",
    model_type="internlm3",
    rules=LLAMA.rules,
    read=_read3,
    translate=_translate3,
)
