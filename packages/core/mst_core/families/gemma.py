"""Gemma 2 and the text models of Gemma 3 (MAPPINGS.md 2.8).

Four norms a layer: here ``post_attention_layernorm`` follows attention, and the MLP's own is
``pre_feedforward_layernorm``. Native names of the two norms that follow are those of NVIDIA's Megatron-Bridge.
Gemma's norms multiply by 1 + weight; so does Megatron with layernorm_zero_centered_gamma: weights are copied.
"""

from __future__ import annotations

from typing import Any

from mst_core.families.llama import BIASES, EMBEDDING, FC1, FC2, FINAL_NORM, INPUT_NORM, OUTPUT, PROJ, QKV
from mst_core.families.qwen3 import QK_NORM
from mst_core.families.rules import Config, Family, Reading, Rule, Where
from mst_core.families.translate import dense_dims, not_in_megatron, tie_fact, with_defaults

NORMS = (
    Rule(
        "decoder.layers.{i}.self_attention.linear_proj.post_layernorm.weight",
        ("model.layers.{i}.post_attention_layernorm.weight [h]",),
    ),
    Rule(
        "decoder.layers.{i}.mlp.linear_fc1.layer_norm_weight",
        ("model.layers.{i}.pre_feedforward_layernorm.weight [h]",),
    ),
    Rule(
        "decoder.layers.{i}.mlp.linear_fc2.post_layernorm.weight",
        ("model.layers.{i}.post_feedforward_layernorm.weight [h]",),
    ),
)
ROWS = (EMBEDDING, INPUT_NORM, QKV, PROJ, *NORMS, FC1, FC2, *BIASES, FINAL_NORM, OUTPUT)


def _read(config: Config, where: Where) -> Reading:
    config = with_defaults(config, head_dim=256)
    biases = {"qkv_bias", "proj_bias"} if config.get("attention_bias") else set()
    # Unlike elsewhere, an absent tie_word_embeddings means tied.
    return Reading(dense_dims(config, where), frozenset({tie_fact(config, default=True), *biases}))


def _refuse(config: Config, where: Where) -> dict[str, dict[str, Any]]:
    raise not_in_megatron("Gemma's norm after attention and after the MLP (with scaled embeddings)", where)


GEMMA2 = Family(
    name="gemma2",
    architecture="Gemma2ForCausalLM",
    reward="Gemma2ForSequenceClassification",
    model_type="gemma2",
    rules=ROWS,
    read=_read,
    translate=_refuse,
)
GEMMA3 = Family(
    name="gemma3",
    architecture="Gemma3ForCausalLM",
    reward="Gemma3TextForSequenceClassification",
    model_type="gemma3_text",
    rules=(*ROWS, *QK_NORM),
    read=_read,
    translate=_refuse,
)
