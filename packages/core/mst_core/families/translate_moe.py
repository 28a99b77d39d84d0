"""What config.json says of experts and of multi-latent attention (MLA), and Megatron's settings made of it.

To the groups of translate.py these families add, each only where it is needed:
  mla          fields beyond TransformerConfig's: with this group the config is
               ``MLATransformerConfig(**transformer, **mla)``, and rotary arguments come from it, not from ``gpt``
  attributes   what GPTModel and attention read from the config by name though TransformerConfig does not declare it
               (yarn_*, with ``position_embedding_type`` "yarn"): set them on the config once it is made
``activation_func`` may be "quick_gelu", which is megatron.core.fusions.fused_bias_geglu.quick_gelu. MTP layers are
converted but not built: ``mtp_num_layers`` is never set. Losses that balance the load are off.

Routers (MAPPINGS.md 3; read in transformers 5.24 and megatron-core 0.19.2):
  softmax   Megatron without pre-softmax takes the softmax over the chosen experts, which is Hugging Face's
            ``norm_topk_prob``; with it the softmax over all, not renormalised
  sigmoid   Megatron renormalises whenever it chooses more than one
  groups    Megatron ranks a group by the sum of its best (topk // group_topk), DeepSeek-V3 by its best two and
            DeepSeek-V2 by its best one
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mst_core.families.rules import Config, Dims, Where
from mst_core.families.translate import megatron_groups, not_in_megatron, size

Groups = dict[str, dict[str, Any]]


def layer_facts(moe: Iterable[bool]) -> tuple[frozenset[str], ...]:
    """The fact "moe" or "dense" of each layer."""
    return tuple(frozenset({"moe" if yes else "dense"}) for yes in moe)


def leading_dense(config: Config, where: Where) -> tuple[frozenset[str], ...]:
    """Layers of models whose first ``first_k_dense_replace`` are dense."""
    first = config.get("first_k_dense_replace") or 0
    return layer_facts(i >= first for i in range(size(config, "num_hidden_layers", where)))


def expert_fields(
    config: Config, where: Where, *, experts: int, moe_ffn: int, layers: tuple[frozenset[str], ...] = ()
) -> dict[str, Any]:
    """The experts themselves. ``moe_layer_freq`` is a list only where layers differ: a list means keys per layer."""
    kinds = [int("moe" in facts) for facts in layers]
    return {
        "num_moe_experts": experts,
        "moe_ffn_hidden_size": moe_ffn,
        "moe_router_topk": size(config, "num_experts_per_tok", where),
        "moe_layer_freq": 1 if all(kinds) else kinds,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
    }


def sigmoid_router(config: Config, where: Where) -> dict[str, Any]:
    """The router of DeepSeek-V3 and GLM-4.5: sigmoid, a bias that only chooses, renormalised, scaled."""
    topk = size(config, "num_experts_per_tok", where)
    if bool(config.get("norm_topk_prob", True)) != (topk > 1):
        raise not_in_megatron(f"norm_topk_prob {config.get('norm_topk_prob')} with {topk} experts per token", where)
    return {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_dtype": "fp32",
        **scaling(config),
        **_groups(config, where, topk, best=2),
    }


def softmax_router(config: Config, where: Where) -> dict[str, Any]:
    """The router of DeepSeek-V2: softmax over all experts, not renormalised, scaled."""
    if config.get("norm_topk_prob"):
        raise not_in_megatron("norm_topk_prob = true, which transformers itself ignores in this family,", where)
    limited = {
        "greedy": dict[str, Any],
        "group_limited_greedy": lambda: _groups(config, where, size(config, "num_experts_per_tok", where), best=1),
    }
    method = config.get("topk_method") or "greedy"
    if method not in limited:
        raise not_in_megatron(f"topk_method {method!r}", where)
    return {
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": True,
        "moe_router_dtype": "fp32",
        **scaling(config),
        **limited[method](),
    }


def scaling(config: Config) -> dict[str, Any]:
    factor = float(config.get("routed_scaling_factor") or 1.0)
    return {} if factor == 1.0 else {"moe_router_topk_scaling_factor": factor}


def _groups(config: Config, where: Where, topk: int, *, best: int) -> dict[str, Any]:
    """Experts chosen within ``topk_group`` of ``n_group`` groups; nothing where that is all of them."""
    groups, chosen = config.get("n_group") or 1, config.get("topk_group") or 1
    if chosen >= groups:
        return {}
    if topk // chosen != best:
        raise not_in_megatron(
            f"a choice of groups by their best {best} experts (Megatron takes the best {topk // chosen}: "
            f"{topk} experts from {chosen} groups)",
            where,
        )
    return {"moe_router_num_groups": groups, "moe_router_group_topk": chosen}


def yarn_groups(config: Config, where: Where, *, window: int | None, **fields: Any) -> Groups:
    """``megatron_groups`` of a family whose rope may be yarn with the plain attention factor (gpt-oss)."""
    rope = rope_of(config)
    groups = megatron_groups(without_rope(config, rope), where, window=window, **fields)
    if rope["kind"] == "yarn":
        if rope.get("mscale") or rope.get("mscale_all_dim") or rope.get("attention_factor"):
            raise not_in_megatron("yarn with an attention factor of its own", where)
        groups["gpt"]["position_embedding_type"] = "yarn"
        groups["attributes"] = {
            "yarn_rotary_scaling_factor": float(rope["factor"]),
            "yarn_original_max_position_embeddings": size(rope, "original_max_position_embeddings", where),
            "yarn_beta_fast": float(rope.get("beta_fast") or 32),
            "yarn_beta_slow": float(rope.get("beta_slow") or 1),
            "yarn_mscale": None,  # both None: 0.1 * ln(factor) + 1, as in transformers
            "yarn_mscale_all_dim": None,
            "yarn_correction_range_round_to_int": bool(rope.get("truncate", True)),
        }
    elif rope["kind"] != "default":
        raise not_in_megatron(f"rope scaling {rope['kind']!r}", where)
    return groups


def mla_groups(config: Config, where: Where, dims: Dims, **fields: Any) -> Groups:
    """The groups of a family with multi-latent attention. Its rope turns interleaved pairs, in Megatron too."""
    if config.get("rope_interleave", True) is False:
        raise not_in_megatron("rope_interleave = false", where)
    if "q_lora" not in dims.more:
        # mla_qk_norm_config.py of 0.19.2 fuses a norm into linear_q_proj (Megatron-Bridge issue 5261).
        raise not_in_megatron(
            "q_lora_rank = null, to which megatron-core adds a norm that the model does not have,", where
        )
    if float(config.get("rms_norm_eps", 1e-6)) != 1e-6:
        # transformers builds the norms of the compressed queries and keys without config.json's epsilon.
        raise not_in_megatron(f"rms_norm_eps {config['rms_norm_eps']}, not that of its latent norms (1e-06),", where)
    rope = rope_of(config)
    plain = without_rope(config, rope)
    groups = megatron_groups(
        {**plain, "head_dim": dims.head_dim, "num_key_value_heads": dims.heads},
        where,
        window=None,
        multi_latent_attention=True,
        qk_layernorm=True,  # the norm of the compressed keys and values is always there
        **fields,
    )
    groups["mla"] = {
        "q_lora_rank": dims.more["q_lora"],
        "kv_lora_rank": dims.more["kv_lora"],
        "qk_head_dim": dims.more["qk_nope"],
        "qk_pos_emb_head_dim": dims.more["qk_rope"],
        "v_head_dim": dims.head_dim,
        "rotary_base": groups["gpt"]["rotary_base"],
        **_mla_rope(rope, where),
    }
    return groups


def _mla_rope(rope: dict[str, Any], where: Where) -> dict[str, Any]:
    if rope["kind"] == "default":
        return {"rope_type": "rope", "rotary_scaling_factor": 1.0}
    if rope["kind"] != "yarn":
        raise not_in_megatron(f"rope scaling {rope['kind']!r}", where)
    mscale, all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    # transformers divides the two factors only where both are given, Megatron always.
    if rope.get("attention_factor") or not rope.get("truncate", True) or (all_dim and not mscale):
        raise not_in_megatron("yarn with attention_factor, without truncation or with mscale_all_dim alone", where)
    return {
        "rope_type": "yarn",
        "rotary_scaling_factor": float(rope["factor"]),
        "original_max_position_embeddings": size(rope, "original_max_position_embeddings", where),
        "beta_fast": float(rope.get("beta_fast") or 32),
        "beta_slow": float(rope.get("beta_slow") or 1),
        "mscale": float(mscale) if mscale and all_dim else 1.0,
        "mscale_all_dim": float(all_dim or 0.0),
    }


def rope_of(config: Config) -> dict[str, Any]:
    """The rope settings of transformers 5 (``rope_parameters``) or 4 (``rope_scaling``), and their ``kind``."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = rope.get("rope_type") or rope.get("type") or "default"
    return {**rope, "kind": "yarn" if kind == "deepseek_yarn" else kind}


def without_rope(config: Config, rope: dict[str, Any]) -> Config:
    """``config`` with the base of its rope alone: the caller translates the scaling."""
    kept = {key: value for key, value in config.items() if key not in ("rope_parameters", "rope_scaling")}
    return {**kept, "rope_theta": rope.get("rope_theta") or config.get("rope_theta")}
