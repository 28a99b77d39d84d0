"""GLM-4.5 and 4.6: the attention of Llama with half its head rotated, the experts of DeepSeek-V3 (MAPPINGS.md 2.10).

``attention_bias`` is a bias on q, k and v only, ``use_qk_norm`` a norm on each head's q and k. As with DeepSeek-V3 the
multi-token-prediction layer is in public checkpoints only.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mst_core.families.deepseek import MTP_DIALECTS, ROUTER_BIAS, moe_sizes, mtp_layer
from mst_core.families.llama import EMBEDDING, FINAL_NORM, INPUT_NORM, OUTPUT, PROJ, QKV, QKV_BIAS
from mst_core.families.qwen3 import QK_NORM
from mst_core.families.qwen_moe import DENSE_MLP, MOE, shared_expert
from mst_core.families.rules import Config, Family, Reading, Where
from mst_core.families.translate import bias_fields, dense_dims, megatron_groups, tie_fact, with_defaults
from mst_core.families.translate_moe import expert_fields, leading_dense, sigmoid_router


def _read(config: Config, where: Where) -> Reading:
    flags = {"attention_bias": "qkv_bias", "use_qk_norm": "qk_norm"}
    facts = frozenset({tie_fact(config), *(fact for flag, fact in flags.items() if config.get(flag))})
    dims = replace(dense_dims(config, where), more=moe_sizes(config, where))
    return Reading(dims, facts, leading_dense(with_defaults(config, first_k_dense_replace=1), where))


def _translate(config: Config, where: Where) -> dict[str, dict[str, Any]]:
    dims, facts, layers = _read(config, where)
    more = dims.more
    return megatron_groups(
        with_defaults(config, partial_rotary_factor=0.5, rms_norm_eps=1e-5),
        where,
        window=None,
        qk_layernorm="qk_norm" in facts,
        moe_shared_expert_intermediate_size=more["shared_ffn"],
        **expert_fields(config, where, experts=more["experts"], moe_ffn=more["moe_ffn"], layers=layers),
        **sigmoid_router(config, where),
        **bias_fields(facts, where),
    )


QK_NORM_IF = tuple(replace(rule, when="qk_norm") for rule in QK_NORM)
LAYER = (INPUT_NORM, QKV, QKV_BIAS, *QK_NORM_IF, PROJ, *DENSE_MLP, *MOE, ROUTER_BIAS, *shared_expert("shared_experts"))
GLM4_MOE = Family(
    name="glm4-moe",
    architecture="Glm4MoeForCausalLM",
    model_type="glm4_moe",
    rules=(EMBEDDING, *LAYER, FINAL_NORM, OUTPUT, *mtp_layer(LAYER)),
    read=_read,
    translate=_translate,
    dialects=MTP_DIALECTS,
)
