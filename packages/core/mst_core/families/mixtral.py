"""Mixtral: the attention of Llama, every layer with experts (MAPPINGS.md 2.6).

w1 is gate, w3 is up and w2 is down. transformers 5 keeps these names on disk; "stacked" are the names it has in memory.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mst_core.families.llama import EMBEDDING, FINAL_NORM, INPUT_NORM, OUTPUT, PROJ, QKV
from mst_core.families.rules import Config, Family, Reading, Rule, Where
from mst_core.families.translate import dense_dims, megatron_groups, size, tie_fact
from mst_core.families.translate_moe import expert_fields

PRE_MLP_NORM = Rule(
    "decoder.layers.{i}.pre_mlp_layernorm.weight", ("model.layers.{i}.post_attention_layernorm.weight [h]",), when="moe"
)
ROUTER = Rule("decoder.layers.{i}.mlp.router.weight", ("model.layers.{i}.mlp.gate.weight [experts,h]",), when="moe")
STACKED = (
    Rule(
        "decoder.layers.{i}.mlp.experts.experts.{e}.linear_fc1.weight",
        ("model.layers.{i}.mlp.experts.gate_up_proj [experts,2moe_ffn,h]",),
        when="moe and stacked",
    ),
    Rule(
        "decoder.layers.{i}.mlp.experts.experts.{e}.linear_fc2.weight",
        ("model.layers.{i}.mlp.experts.down_proj [experts,h,moe_ffn]",),
        when="moe and stacked",
    ),
)
BLOCK = "model.layers.{i}.block_sparse_moe"
BLOCK_SPARSE = (
    Rule("decoder.layers.{i}.mlp.router.weight", (BLOCK + ".gate.weight [experts,h]",), when="per_expert"),
    Rule(
        "decoder.layers.{i}.mlp.experts.experts.{e}.linear_fc1.weight",
        (BLOCK + ".experts.{e}.w1.weight [moe_ffn,h]", BLOCK + ".experts.{e}.w3.weight [moe_ffn,h]"),
        "concat",
        when="per_expert",
    ),
    Rule(
        "decoder.layers.{i}.mlp.experts.experts.{e}.linear_fc2.weight",
        (BLOCK + ".experts.{e}.w2.weight [h,moe_ffn]",),
        when="per_expert",
    ),
)


def expert_sizes(experts: int, moe_ffn: int) -> dict[str, int]:
    """Dims.more of any family with experts."""
    return {"experts": experts, "moe_ffn": moe_ffn}


def _read(config: Config, where: Where) -> Reading:
    dims = dense_dims(config, where)
    more = expert_sizes(size(config, "num_local_experts", where, 8), dims.ffn)
    return Reading(replace(dims, more=more), frozenset({tie_fact(config), "moe"}))


def _translate(config: Config, where: Where) -> dict[str, dict[str, Any]]:
    dims = _read(config, where).dims
    fields = expert_fields(config, where, experts=dims.more["experts"], moe_ffn=dims.ffn)
    return megatron_groups(config, where, window=config.get("sliding_window"), moe_router_pre_softmax=False, **fields)


MIXTRAL = Family(
    name="mixtral",
    architecture="MixtralForCausalLM",
    reward="MixtralForSequenceClassification",
    model_type="mixtral",
    rules=(
        EMBEDDING,
        *(INPUT_NORM, QKV, PROJ, PRE_MLP_NORM),
        *BLOCK_SPARSE,
        replace(ROUTER, when="stacked"),
        *STACKED,
        FINAL_NORM,
        OUTPUT,
    ),
    read=_read,
    translate=_translate,
    dialects={"per_expert": BLOCK + ".gate.weight", "stacked": "model.layers.{i}.mlp.experts.gate_up_proj"},
)
