"""Llama 2 and 3, Yi, SmolLM2 and others of LlamaForCausalLM; early Yi (MAPPINGS.md 2.1).

``attention_bias`` is a bias on q, k, v and o, ``mlp_bias`` one on gate, up and down: conversion has rows for both.
"""

from __future__ import annotations

from typing import Any

from mst_core.families.rules import Config, Family, Reading, Rule, Where
from mst_core.families.translate import bias_fields, dense_dims, megatron_groups, tie_fact

EMBEDDING = Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight [v,h]",))
FINAL_NORM = Rule("decoder.final_layernorm.weight", ("model.norm.weight [h]",))
OUTPUT = Rule("output_layer.weight", ("lm_head.weight [v,h]",), when="untied")

INPUT_NORM = Rule(
    "decoder.layers.{i}.self_attention.linear_qkv.layer_norm_weight",
    ("model.layers.{i}.input_layernorm.weight [h]",),
)
QKV = Rule(
    "decoder.layers.{i}.self_attention.linear_qkv.weight",
    (
        "model.layers.{i}.self_attn.q_proj.weight [q,h]",
        "model.layers.{i}.self_attn.k_proj.weight [k,h]",
        "model.layers.{i}.self_attn.v_proj.weight [k,h]",
    ),
    "qkv",
)
PROJ = Rule(
    "decoder.layers.{i}.self_attention.linear_proj.weight",
    ("model.layers.{i}.self_attn.o_proj.weight [h,q]",),
)
MLP_NORM = Rule(
    "decoder.layers.{i}.mlp.linear_fc1.layer_norm_weight",
    ("model.layers.{i}.post_attention_layernorm.weight [h]",),
)
FC1 = Rule(
    "decoder.layers.{i}.mlp.linear_fc1.weight",
    ("model.layers.{i}.mlp.gate_proj.weight [f,h]", "model.layers.{i}.mlp.up_proj.weight [f,h]"),
    "concat",
)
FC2 = Rule("decoder.layers.{i}.mlp.linear_fc2.weight", ("model.layers.{i}.mlp.down_proj.weight [h,f]",))
LAYER = (INPUT_NORM, QKV, PROJ, MLP_NORM, FC1, FC2)

QKV_BIAS = Rule(
    "decoder.layers.{i}.self_attention.linear_qkv.bias",
    (
        "model.layers.{i}.self_attn.q_proj.bias [q]",
        "model.layers.{i}.self_attn.k_proj.bias [k]",
        "model.layers.{i}.self_attn.v_proj.bias [k]",
    ),
    "qkv",
    when="qkv_bias",
)
PROJ_BIAS = Rule(
    "decoder.layers.{i}.self_attention.linear_proj.bias",
    ("model.layers.{i}.self_attn.o_proj.bias [h]",),
    when="proj_bias",
)
MLP_BIAS = (
    Rule(
        "decoder.layers.{i}.mlp.linear_fc1.bias",
        ("model.layers.{i}.mlp.gate_proj.bias [f]", "model.layers.{i}.mlp.up_proj.bias [f]"),
        "concat",
        when="mlp_bias",
    ),
    Rule("decoder.layers.{i}.mlp.linear_fc2.bias", ("model.layers.{i}.mlp.down_proj.bias [h]",), when="mlp_bias"),
)
BIASES = (QKV_BIAS, PROJ_BIAS, *MLP_BIAS)

YI_NORMS = (
    Rule("decoder.layers.{i}.self_attention.linear_qkv.layer_norm_weight", ("model.layers.{i}.ln1.weight [h]",)),
    Rule("decoder.layers.{i}.mlp.linear_fc1.layer_norm_weight", ("model.layers.{i}.ln2.weight [h]",)),
)


def _read(config: Config, where: Where) -> Reading:
    flags = {"attention_bias": {"qkv_bias", "proj_bias"}, "mlp_bias": {"mlp_bias"}}
    biases = (fact for flag, facts in flags.items() if config.get(flag) for fact in facts)
    return Reading(dense_dims(config, where), frozenset({tie_fact(config), *biases}))


def _translate(config: Config, where: Where) -> dict[str, dict[str, Any]]:
    return megatron_groups(config, where, window=None, **bias_fields(_read(config, where).facts, where))


LLAMA = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    reward="LlamaForSequenceClassification",
    model_type="llama",
    rules=(EMBEDDING, *LAYER, *BIASES, FINAL_NORM, OUTPUT),
    read=_read,
    translate=_translate,
)
YI = Family(
    name="yi",
    architecture="YiForCausalLM",
    model_type="Yi",
    rules=(EMBEDDING, YI_NORMS[0], QKV, PROJ, YI_NORMS[1], FC1, FC2, FINAL_NORM, OUTPUT),
    read=_read,
    translate=_translate,
)
"""The first releases of Yi (remote code): later ones are plain LlamaForCausalLM."""
