"""Phi-3, Phi-3.5 and Phi-4 of Phi3ForCausalLM: the rows of Llama with q, k, v and gate, up fused (MAPPINGS.md 2.9)."""

from __future__ import annotations

from typing import Any

from mst_core.families.llama import EMBEDDING, FC2, FINAL_NORM, INPUT_NORM, MLP_NORM, OUTPUT, PROJ
from mst_core.families.rules import Config, Family, Reading, Rule, Where
from mst_core.families.translate import dense_dims, megatron_groups, tie_fact, with_defaults

FUSED_QKV = Rule(
    "decoder.layers.{i}.self_attention.linear_qkv.weight",
    ("model.layers.{i}.self_attn.qkv_proj.weight [qkv,h]",),
    "fused_qkv",
)
GATE_UP = Rule("decoder.layers.{i}.mlp.linear_fc1.weight", ("model.layers.{i}.mlp.gate_up_proj.weight [2f,h]",))
"""Gate above up on both sides."""


def _read(config: Config, where: Where) -> Reading:
    return Reading(dense_dims(config, where), frozenset({tie_fact(config)}))


def _translate(config: Config, where: Where) -> dict[str, dict[str, Any]]:
    config = with_defaults(config, rms_norm_eps=1e-5)
    return megatron_groups(config, where, window=config.get("sliding_window"))


PHI3 = Family(
    name="phi3",
    architecture="Phi3ForCausalLM",
    reward="Phi3ForSequenceClassification",
    model_type="phi3",
    rules=(EMBEDDING, INPUT_NORM, FUSED_QKV, PROJ, MLP_NORM, GATE_UP, FC2, FINAL_NORM, OUTPUT),
    read=_read,
    translate=_translate,
)
