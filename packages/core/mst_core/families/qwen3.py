"""Qwen3, dense: the rows of Llama, a norm on each head's q and k, a head size of its own (MAPPINGS.md 2.3)."""

from __future__ import annotations

from typing import Any

from mst_core.families.llama import LLAMA
from mst_core.families.qwen2 import qwen_window, with_layer_types
from mst_core.families.rules import Config, Family, Reading, Rule, Where
from mst_core.families.translate import bias_fields, dense_dims, megatron_groups, tie_fact, with_defaults

QK_NORM = (
    Rule("decoder.layers.{i}.self_attention.q_layernorm.weight", ("model.layers.{i}.self_attn.q_norm.weight [d]",)),
    Rule("decoder.layers.{i}.self_attention.k_layernorm.weight", ("model.layers.{i}.self_attn.k_norm.weight [d]",)),
)


def _defaults(config: Config) -> Config:
    """To transformers an absent head_dim is 128 in this family, whatever the hidden size."""
    return with_defaults(config, head_dim=128)


def _read(config: Config, where: Where) -> Reading:
    biases = {"qkv_bias", "proj_bias"} if config.get("attention_bias") else set()
    return Reading(dense_dims(_defaults(config), where), frozenset({tie_fact(config), *biases}))


def _translate(config: Config, where: Where) -> dict[str, dict[str, Any]]:
    biases = bias_fields(_read(config, where).facts, where)
    config = with_layer_types(_defaults(config))
    return megatron_groups(config, where, window=qwen_window(config), qk_layernorm=True, **biases)


QWEN3 = Family(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    reward="Qwen3ForSequenceClassification",
    model_type="qwen3",
    rules=(*LLAMA.rules, *QK_NORM),
    read=_read,
    translate=_translate,
)
