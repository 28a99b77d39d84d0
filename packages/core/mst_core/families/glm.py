"""GLM-4-9B (GlmForCausalLM) and GLM-4-0414, GLM-Z1 (Glm4ForCausalLM), as transformers has them (MAPPINGS.md 2.10).

The rotation pairs neighbouring elements of the first half of a head: a setting of Megatron, not another row order.
"""

from __future__ import annotations

from typing import Any

from mst_core.families.llama import EMBEDDING, FC2, FINAL_NORM, INPUT_NORM, MLP_NORM, OUTPUT, PROJ, QKV, QKV_BIAS
from mst_core.families.phi import GATE_UP
from mst_core.families.rules import Config, Family, Reading, Rule, Where
from mst_core.families.translate import (
    bias_fields,
    dense_dims,
    megatron_groups,
    not_in_megatron,
    tie_fact,
    with_defaults,
)

ROWS = (EMBEDDING, INPUT_NORM, QKV, QKV_BIAS, PROJ, MLP_NORM, GATE_UP, FC2, FINAL_NORM, OUTPUT)
POST_NORMS = (
    Rule(
        "decoder.layers.{i}.self_attention.post_self_attn_layernorm.weight",
        ("model.layers.{i}.post_self_attn_layernorm.weight [h]",),
    ),
    Rule(
        "decoder.layers.{i}.mlp.post_mlp_layernorm.weight",
        ("model.layers.{i}.post_mlp_layernorm.weight [h]",),
    ),
)
"""Norms of what attention and MLP give, by the names of modelscope/mcore-bridge."""


def _defaults(config: Config) -> Config:
    given = with_defaults(config, head_dim=128, partial_rotary_factor=0.5, rms_norm_eps=1.5625e-07)
    return {"attention_bias": True, "num_key_value_heads": 2, **given}


def _read(config: Config, where: Where) -> Reading:
    config = _defaults(config)
    biases = {"qkv_bias"} if config["attention_bias"] else set()
    return Reading(dense_dims(config, where), frozenset({tie_fact(config), *biases}))


def _translate(config: Config, where: Where) -> dict[str, dict[str, Any]]:
    biases = bias_fields(_read(config, where).facts, where)
    return megatron_groups(_defaults(config), where, window=None, rotary_interleaved=True, **biases)


def _refuse(config: Config, where: Where) -> dict[str, dict[str, Any]]:
    raise not_in_megatron("a norm after attention and after the MLP (post_self_attn_layernorm)", where)


GLM = Family(
    name="glm",
    architecture="GlmForCausalLM",
    reward="GlmForSequenceClassification",
    model_type="glm",
    rules=ROWS,
    read=_read,
    translate=_translate,
)
GLM4 = Family(
    name="glm4",
    architecture="Glm4ForCausalLM",
    reward="Glm4ForSequenceClassification",
    model_type="glm4",
    rules=(*ROWS, *POST_NORMS),
    read=_read,
    translate=_refuse,
)
