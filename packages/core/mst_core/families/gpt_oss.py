"""gpt-oss in bfloat16: sinks, biases everywhere, clamped SwiGLU, every layer with experts (MAPPINGS.md 2.13).

Experts are stacked and stored [in, out], the rows of gate and up alternate. The MXFP4 form (``_blocks``, ``_scales``)
has other tensors and is not these rows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mst_core.errors import InputError
from mst_core.families.llama import EMBEDDING, FINAL_NORM, INPUT_NORM, OUTPUT, PROJ, PROJ_BIAS, QKV, QKV_BIAS
from mst_core.families.mixtral import PRE_MLP_NORM, expert_sizes
from mst_core.families.rules import Config, Family, Reading, Rule, Where
from mst_core.families.translate import dense_dims, not_in_megatron, size, tie_fact, with_defaults
from mst_core.families.translate_moe import expert_fields, yarn_groups

MEGATRON = "decoder.layers.{i}.mlp."
HF = "model.layers.{i}.mlp."
EXPERTS = MEGATRON + "experts.experts.{e}."
MLP = (
    Rule(MEGATRON + "router.weight", (HF + "router.weight [experts,h]",)),
    Rule(MEGATRON + "router.bias", (HF + "router.bias [experts]",)),
    Rule(
        EXPERTS + "linear_fc1.weight",
        (HF + "experts.gate_up_proj [experts,h,2moe_ffn]",),
        "deinterleave",
        transposed=True,
    ),
    Rule(EXPERTS + "linear_fc1.bias", (HF + "experts.gate_up_proj_bias [experts,2moe_ffn]",), "deinterleave"),
    Rule(EXPERTS + "linear_fc2.weight", (HF + "experts.down_proj [experts,moe_ffn,h]",), transposed=True),
    Rule(EXPERTS + "linear_fc2.bias", (HF + "experts.down_proj_bias [experts,h]",)),
)
SINKS = Rule(
    "decoder.layers.{i}.self_attention.core_attention.softmax_offset",
    ("model.layers.{i}.self_attn.sinks [heads]",),
)
YARN = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}


def _defaults(config: Config) -> Config:
    """What transformers takes where config.json is silent; windows alternate, the first layer has one."""
    kinds = ["full_attention" if i % 2 else "sliding_attention" for i in range(config.get("num_hidden_layers") or 0)]
    rope = config.get("rope_parameters") or config.get("rope_scaling") or YARN
    theta = config.get("rope_theta") or 150000.0
    return {
        **with_defaults(config, head_dim=64, layer_types=kinds, rms_norm_eps=1e-5, num_local_experts=128),
        "rope_parameters": {"rope_theta": theta, **rope},
    }


def _read(config: Config, where: Where) -> Reading:
    if config.get("attention_bias", True) is False:
        raise InputError("attention_bias = false is not supported for this architecture", where=where)
    config = _defaults(config)
    dims = dense_dims(config, where)
    more = {**expert_sizes(size(config, "num_local_experts", where), dims.ffn), "heads": dims.heads}
    return Reading(replace(dims, more=more), frozenset({tie_fact(config), "moe", "qkv_bias", "proj_bias"}))


def _translate(config: Config, where: Where) -> dict[str, dict[str, Any]]:
    if config.get("swiglu_alpha", 1.702) != 1.702:
        raise not_in_megatron(f"swiglu_alpha {config['swiglu_alpha']} (Megatron's quick_gelu has 1.702)", where)
    dims, config = _read(config, where).dims, _defaults(config)
    fields = {
        **expert_fields(config, where, experts=dims.more["experts"], moe_ffn=dims.ffn),
        "moe_router_pre_softmax": False,
        "add_bias_linear": True,
        "add_qkv_bias": True,
        "activation_func": "quick_gelu",
        "glu_linear_offset": 1.0,
        "activation_func_clamp_value": float(config.get("swiglu_limit", 7.0)),
        "softmax_type": "learnable",
    }
    return yarn_groups(config, where, window=config.get("sliding_window", 128), **fields)


GPT_OSS = Family(
    name="gpt-oss",
    architecture="GptOssForCausalLM",
    reward="GptOssForSequenceClassification",
    model_type="gpt_oss",
    rules=(EMBEDDING, INPUT_NORM, QKV, QKV_BIAS, PROJ, PROJ_BIAS, SINKS, PRE_MLP_NORM, *MLP, FINAL_NORM, OUTPUT),
    read=_read,
    translate=_translate,
)
