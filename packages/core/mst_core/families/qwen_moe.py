"""Qwen2-MoE (and Qwen1.5-MoE) and Qwen3-MoE (MAPPINGS.md 2.4, 2.5).

The attention of Qwen2 or Qwen3. Layers named in ``mlp_only_layers``, or left out by ``decoder_sparse_step``, are dense.
Qwen2-MoE has a shared expert whose output a gate of its own scales. Files hold one matrix an expert; "stacked" are the
names of transformers 5 in memory.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mst_core.families.llama import (
    EMBEDDING,
    FC1,
    FC2,
    FINAL_NORM,
    INPUT_NORM,
    MLP_NORM,
    OUTPUT,
    PROJ,
    PROJ_BIAS,
    QKV,
    QKV_BIAS,
)  # fmt: skip
from mst_core.families.mixtral import PRE_MLP_NORM, ROUTER, STACKED, expert_sizes
from mst_core.families.qwen2 import qwen_window
from mst_core.families.qwen3 import QK_NORM
from mst_core.families.rules import Config, Family, Reading, Rule, Where
from mst_core.families.translate import bias_fields, dense_dims, megatron_groups, size, tie_fact, with_defaults
from mst_core.families.translate_moe import expert_fields, layer_facts

DENSE_MLP = tuple(replace(rule, when="dense") for rule in (MLP_NORM, FC1, FC2))
PER_EXPERT = (
    Rule(
        "decoder.layers.{i}.mlp.experts.experts.{e}.linear_fc1.weight",
        (
            "model.layers.{i}.mlp.experts.{e}.gate_proj.weight [moe_ffn,h]",
            "model.layers.{i}.mlp.experts.{e}.up_proj.weight [moe_ffn,h]",
        ),
        "concat",
        when="moe and per_expert",
    ),
    Rule(
        "decoder.layers.{i}.mlp.experts.experts.{e}.linear_fc2.weight",
        ("model.layers.{i}.mlp.experts.{e}.down_proj.weight [h,moe_ffn]",),
        when="moe and per_expert",
    ),
)
MOE = (PRE_MLP_NORM, ROUTER, *PER_EXPERT, *STACKED)
DIALECTS = {
    "per_expert": "model.layers.{i}.mlp.experts.0.gate_proj.weight",
    "stacked": "model.layers.{i}.mlp.experts.gate_up_proj",
}


def shared_expert(hf: str) -> tuple[Rule, ...]:
    """The rows of a shared expert, which Hugging Face names ``shared_expert`` or ``shared_experts``."""
    parts = [f"model.layers.{{i}}.mlp.{hf}.{part}_proj.weight" for part in ("gate", "up", "down")]
    return (
        Rule(
            "decoder.layers.{i}.mlp.shared_experts.linear_fc1.weight",
            (parts[0] + " [shared_ffn,h]", parts[1] + " [shared_ffn,h]"),
            "concat",
            when="moe",
        ),
        Rule("decoder.layers.{i}.mlp.shared_experts.linear_fc2.weight", (parts[2] + " [h,shared_ffn]",), when="moe"),
    )


SHARED_GATE = Rule(
    "decoder.layers.{i}.mlp.shared_experts.gate_weight",
    ("model.layers.{i}.mlp.shared_expert_gate.weight [1,h]",),
    when="moe",
)


def _layers(config: Config, where: Where) -> tuple[frozenset[str], ...]:
    dense, step = config.get("mlp_only_layers") or [], size(config, "decoder_sparse_step", where, 1)
    layers = range(size(config, "num_hidden_layers", where))
    return layer_facts(i not in dense and (i + 1) % step == 0 for i in layers)


def _sizes(config: Config, where: Where, experts: int) -> dict[str, int]:
    return expert_sizes(experts, size(config, "moe_intermediate_size", where))


def _read2(config: Config, where: Where) -> Reading:
    more = {
        **_sizes(config, where, size(config, "num_experts", where)),
        "shared_ffn": size(config, "shared_expert_intermediate_size", where),
    }
    facts = frozenset({tie_fact(config), *(["qkv_bias"] if config.get("qkv_bias", True) else [])})
    return Reading(replace(dense_dims(config, where), more=more), facts, _layers(config, where))


def _read3(config: Config, where: Where) -> Reading:
    # transformers 5 writes num_local_experts.
    more = _sizes(
        config, where, size(with_defaults(config, num_experts=config.get("num_local_experts")), "num_experts", where)
    )
    facts = {tie_fact(config), *(("qkv_bias", "proj_bias") if config.get("attention_bias") else ())}
    return Reading(replace(dense_dims(config, where), more=more), frozenset(facts), _layers(config, where))


def _fields(config: Config, where: Where, reading: Reading) -> dict[str, Any]:
    more = reading.dims.more
    return {
        **expert_fields(config, where, experts=more["experts"], moe_ffn=more["moe_ffn"], layers=reading.layers),
        "moe_router_pre_softmax": not config.get("norm_topk_prob", False),
        **bias_fields(reading.facts, where),
    }


def _translate2(config: Config, where: Where) -> dict[str, dict[str, Any]]:
    reading = _read2(config, where)
    last = config.get("max_window_layers", 28)
    # Unlike Qwen2, and so in transformers only: every other layer below max_window_layers has the window.
    kinds = ["sliding_attention" if i % 2 == 0 and i < last else "full_attention" for i in range(reading.dims.layers)]
    return megatron_groups(
        with_defaults(config, layer_types=kinds),
        where,
        window=qwen_window(config),
        moe_shared_expert_intermediate_size=reading.dims.more["shared_ffn"],
        moe_shared_expert_gate=True,
        **_fields(config, where, reading),
    )


def _translate3(config: Config, where: Where) -> dict[str, dict[str, Any]]:
    fields = _fields(config, where, _read3(config, where))
    return megatron_groups(config, where, window=qwen_window(config), qk_layernorm=True, **fields)


ATTENTION = (INPUT_NORM, QKV, QKV_BIAS, PROJ)
QWEN2_MOE = Family(
    name="qwen2-moe",
    architecture="Qwen2MoeForCausalLM",
    reward="Qwen2MoeForSequenceClassification",
    model_type="qwen2_moe",
    rules=(EMBEDDING, *ATTENTION, *DENSE_MLP, *MOE, *shared_expert("shared_expert"), SHARED_GATE, FINAL_NORM, OUTPUT),
    read=_read2,
    translate=_translate2,
    dialects=DIALECTS,
)
QWEN3_MOE = Family(
    name="qwen3-moe",
    architecture="Qwen3MoeForCausalLM",
    reward="Qwen3MoeForSequenceClassification",
    model_type="qwen3_moe",
    rules=(EMBEDDING, *ATTENTION, PROJ_BIAS, *QK_NORM, *DENSE_MLP, *MOE, FINAL_NORM, OUTPUT),
    read=_read3,
    translate=_translate3,
    dialects=DIALECTS,
)
