"""Llama 2 and 3, Yi, SmolLM2 and others of LlamaForCausalLM (MAPPINGS.md 2.1)."""

from __future__ import annotations

from typing import Any

from mst_core.families.rules import Config, Family, Reading, Rule, Where
from mst_core.families.translate import dense_dims, megatron_groups, refuse_flags, tie_fact

EMBEDDING = Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight [v,h]",))
FINAL_NORM = Rule("decoder.final_layernorm.weight", ("model.norm.weight [h]",))
OUTPUT = Rule("output_layer.weight", ("lm_head.weight [v,h]",), when="untied")

LAYER = (
    Rule(
        "decoder.layers.{i}.self_attention.linear_qkv.layer_norm_weight",
        ("model.layers.{i}.input_layernorm.weight [h]",),
    ),
    Rule(
        "decoder.layers.{i}.self_attention.linear_qkv.weight",
        (
            "model.layers.{i}.self_attn.q_proj.weight [q,h]",
            "model.layers.{i}.self_attn.k_proj.weight [k,h]",
            "model.layers.{i}.self_attn.v_proj.weight [k,h]",
        ),
        "qkv",
    ),
    Rule(
        "decoder.layers.{i}.self_attention.linear_proj.weight",
        ("model.layers.{i}.self_attn.o_proj.weight [h,q]",),
    ),
    Rule(
        "decoder.layers.{i}.mlp.linear_fc1.layer_norm_weight",
        ("model.layers.{i}.post_attention_layernorm.weight [h]",),
    ),
    Rule(
        "decoder.layers.{i}.mlp.linear_fc1.weight",
        ("model.layers.{i}.mlp.gate_proj.weight [f,h]", "model.layers.{i}.mlp.up_proj.weight [f,h]"),
        "concat",
    ),
    Rule("decoder.layers.{i}.mlp.linear_fc2.weight", ("model.layers.{i}.mlp.down_proj.weight [h,f]",)),
)


def _read(config: Config, where: Where) -> Reading:
    refuse_flags(config, where, "attention_bias", "mlp_bias")
    return Reading(dense_dims(config, where), frozenset({tie_fact(config)}))


def _translate(config: Config, where: Where) -> dict[str, dict[str, Any]]:
    return megatron_groups(config, where, window=None)


LLAMA = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    model_type="llama",
    rules=(EMBEDDING, *LAYER, FINAL_NORM, OUTPUT),
    read=_read,
    translate=_translate,
)
