"""DeepSeek-V2, V2-Lite, V3, R1 and Kimi-K2: multi-latent attention, shared experts (MAPPINGS.md 2.7).

Sizes: ``head_dim`` is that of values (o_proj has heads * v_head_dim columns), ``qk_nope`` and ``qk_rope`` those of
queries and keys; there are as many key-value heads as heads. ``q_lora_rank`` null (V2-Lite, Moonlight) is one q_proj.
V3's router has a bias, float32 in every file. Its multi-token-prediction (MTP) layers are in public checkpoints, not in
what transformers saves, though config.json names them in both: names decide. The norms of the compressed queries, keys
and values have eps 1e-6 in the reference and in transformers, ``rms_norm_eps`` in Megatron (also 1e-6 in V2, V3, Kimi).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from mst_core.families.llama import EMBEDDING, FINAL_NORM, OUTPUT, PROJ
from mst_core.families.mixtral import expert_sizes
from mst_core.families.qwen_moe import DENSE_MLP, DIALECTS, MOE, shared_expert
from mst_core.families.rules import Config, Dims, Family, Reading, Rule, Where
from mst_core.families.translate import dense_dims, not_in_megatron, refuse_flags, size, tie_fact, with_defaults
from mst_core.families.translate_moe import expert_fields, leading_dense, mla_groups, sigmoid_router, softmax_router

MEGATRON = "decoder.layers.{i}.self_attention."
HF = "model.layers.{i}.self_attn."
ATTENTION = (
    Rule("decoder.layers.{i}.input_layernorm.weight", ("model.layers.{i}.input_layernorm.weight [h]",)),
    Rule(MEGATRON + "linear_q_proj.weight", (HF + "q_proj.weight [q_up,h]",), when="q_whole"),
    Rule(MEGATRON + "linear_q_down_proj.weight", (HF + "q_a_proj.weight [q_lora,h]",), when="q_lora"),
    Rule(MEGATRON + "linear_q_up_proj.layer_norm_weight", (HF + "q_a_layernorm.weight [q_lora]",), when="q_lora"),
    Rule(MEGATRON + "linear_q_up_proj.weight", (HF + "q_b_proj.weight [q_up,q_lora]",), when="q_lora"),
    Rule(MEGATRON + "linear_kv_down_proj.weight", (HF + "kv_a_proj_with_mqa.weight [kv_down,h]",)),
    Rule(MEGATRON + "linear_kv_up_proj.layer_norm_weight", (HF + "kv_a_layernorm.weight [kv_lora]",)),
    Rule(MEGATRON + "linear_kv_up_proj.weight", (HF + "kv_b_proj.weight [kv_up,kv_lora]",)),
    PROJ,
)
ROUTER_BIAS = Rule(
    "decoder.layers.{i}.mlp.router.expert_bias",
    ("model.layers.{i}.mlp.gate.e_score_correction_bias [experts]",),
    when="moe",
)
MTP_HEAD = (
    Rule("mtp.layers.{m}.enorm.weight", ("model.layers.{n}.enorm.weight [h]",), when="mtp"),
    Rule("mtp.layers.{m}.hnorm.weight", ("model.layers.{n}.hnorm.weight [h]",), when="mtp"),
    Rule("mtp.layers.{m}.eh_proj.weight", ("model.layers.{n}.eh_proj.weight [h,2h]",), when="mtp"),
    Rule("mtp.layers.{m}.final_layernorm.weight", ("model.layers.{n}.shared_head.norm.weight [h]",), when="mtp"),
)
MTP_DIALECTS = {"per_expert and mtp": "model.layers.{n}.eh_proj.weight", **DIALECTS}


def mtp_layer(rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """The rows of an MTP layer: its own four and those of a decoder layer with experts."""
    body = []
    for rule in rules:
        facts = set((rule.when or "").split(" and ")) - {"moe", ""}
        if "{i}" in rule.native and not facts & {"dense", "stacked"}:
            native = rule.native.replace("decoder.layers.{i}.", "mtp.layers.{m}.transformer_layer.")
            hf = tuple(text.replace("layers.{i}.", "layers.{n}.") for text in rule.hf)
            body.append(replace(rule, native=native, hf=hf, when=" and ".join(sorted({*facts, "mtp"}))))
    return (*MTP_HEAD, *body)


def moe_sizes(config: Config, where: Where) -> dict[str, int]:
    """Dims.more of DeepSeek's experts: the shared ones are one, ``n_shared_experts`` times as wide."""
    moe_ffn = size(config, "moe_intermediate_size", where)
    return {
        **expert_sizes(size(config, "n_routed_experts", where), moe_ffn),
        "shared_ffn": moe_ffn * size(config, "n_shared_experts", where),
        **({"mtp": config["num_nextn_predict_layers"]} if config.get("num_nextn_predict_layers") else {}),
    }


def _dims(config: Config, where: Where) -> Dims:
    nope, rope = size(config, "qk_nope_head_dim", where), size(config, "qk_rope_head_dim", where)
    value, kv_lora = size(config, "v_head_dim", where), size(config, "kv_lora_rank", where)
    dims = dense_dims({**config, "head_dim": value, "num_key_value_heads": config.get("num_attention_heads")}, where)
    q_lora = {} if config.get("q_lora_rank") is None else {"q_lora": size(config, "q_lora_rank", where)}
    latent = {
        "qk_nope": nope,
        "qk_rope": rope,
        "kv_lora": kv_lora,
        **q_lora,
        "q_up": dims.heads * (nope + rope),
        "kv_down": kv_lora + rope,
        "kv_up": dims.heads * (nope + value),
    }
    return replace(dims, more={**latent, **moe_sizes(config, where)})


def _read(config: Config, where: Where) -> Reading:
    refuse_flags(config, where, "attention_bias", "mlp_bias")
    dims = _dims(config, where)
    facts = {tie_fact(config), "q_lora" if "q_lora" in dims.more else "q_whole"}
    return Reading(dims, frozenset(facts), leading_dense(config, where))


def _fields(config: Config, where: Where, reading: Reading) -> dict[str, Any]:
    more = reading.dims.more
    fields = expert_fields(config, where, experts=more["experts"], moe_ffn=more["moe_ffn"], layers=reading.layers)
    return {**fields, "moe_shared_expert_intermediate_size": more["shared_ffn"]}


def _translate2(config: Config, where: Where) -> dict[str, dict[str, Any]]:
    reading = _read(config, where)
    fields = {**_fields(config, where, reading), **softmax_router(config, where)}
    return mla_groups(config, where, reading.dims, **fields)


def _read3(config: Config, where: Where) -> Reading:
    return _read(with_defaults(config, first_k_dense_replace=3), where)


def _translate3(config: Config, where: Where) -> dict[str, dict[str, Any]]:
    for key, known in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        if config.get(key, known) != known:
            raise not_in_megatron(f"{key} {config[key]!r}", where)
    config = with_defaults(config, n_group=8, topk_group=4, routed_scaling_factor=2.5)
    reading = _read3(config, where)
    fields = {**_fields(config, where, reading), **sigmoid_router(config, where)}
    return mla_groups(config, where, reading.dims, **fields)


LAYER = (*ATTENTION, *DENSE_MLP, *MOE, *shared_expert("shared_experts"))
DEEPSEEK_V2 = Family(
    name="deepseek-v2",
    architecture="DeepseekV2ForCausalLM",
    reward="DeepseekV2ForSequenceClassification",
    model_type="deepseek_v2",
    rules=(EMBEDDING, *LAYER, FINAL_NORM, OUTPUT),
    read=_read,
    translate=_translate2,
    dialects=DIALECTS,
)
DEEPSEEK_V3 = Family(
    name="deepseek-v3",
    architecture="DeepseekV3ForCausalLM",
    reward="DeepseekV3ForSequenceClassification",
    model_type="deepseek_v3",
    rules=(EMBEDDING, *LAYER, ROUTER_BIAS, FINAL_NORM, OUTPUT, *mtp_layer((*LAYER, ROUTER_BIAS))),
    read=_read3,
    translate=_translate3,
    dialects=MTP_DIALECTS,
)
