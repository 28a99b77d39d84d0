"""Readings of config.json that more than one family shares, and Megatron's settings made of them.

``megatron_groups`` returns
  transformer   TransformerConfig fields. ``activation_func`` is a name in torch.nn.functional;
                ``window_size`` and ``window_attn_skip_freq`` are there only for sliding-window attention
  gpt           GPTModel arguments (without vocab_size's padding)
  rope          empty, or the arguments of RotaryEmbedding._apply_scaling where GPTModel's own ``rope_scaling``
                would put its constants (1, 4, 8192) in place of the model's: the engine applies these to inv_freq
"""

from __future__ import annotations

from typing import Any

from mst_core.errors import InputError
from mst_core.families.rules import Config, Dims, Where

MEGATRON_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def size(config: Config, key: str, where: Where, default: int | None = None) -> int:
    """A positive integer of config.json."""
    value = config.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{key} must be a positive integer, found {value!r}", where=where)
    return value


def dense_dims(config: Config, where: Where) -> Dims:
    """Dims of a dense decoder; key-value heads and head size have the defaults of transformers."""
    hidden = size(config, "hidden_size", where)
    heads = size(config, "num_attention_heads", where)
    groups = size(config, "num_key_value_heads", where, heads)
    if heads % groups:
        raise InputError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {groups}", where=where)
    if config.get("head_dim") is None and hidden % heads:
        raise InputError(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}", where=where)
    return Dims(
        layers=size(config, "num_hidden_layers", where),
        hidden=hidden,
        heads=heads,
        groups=groups,
        head_dim=size(config, "head_dim", where, max(hidden // heads, 1)),
        ffn=size(config, "intermediate_size", where),
        vocab=size(config, "vocab_size", where),
    )


def tie_fact(config: Config, default: bool = False) -> str:
    """ "tied" or "untied"."""
    return "tied" if config.get("tie_word_embeddings", default) else "untied"


def with_defaults(config: Config, **defaults: Any) -> Config:
    """``config`` with what transformers takes where a key is absent or null."""
    return {**config, **{key: value for key, value in defaults.items() if config.get(key) is None}}


def not_in_megatron(what: str, where: Where) -> InputError:
    """The refusal of a model that can be converted but not built by the megatron engine."""
    hint = "conversion keeps it; to train, use --engine plain with the Hugging Face directory"
    return InputError(f"{what} has no equivalent in the megatron engine", where=where, hint=hint)


def bias_fields(facts: frozenset[str], where: Where) -> dict[str, Any]:
    """TransformerConfig fields for the facts qkv_bias, proj_bias and mlp_bias.

    megatron-core has two switches: one for q, k and v, one for every linear layer of a block.
    """
    biased = facts & {"qkv_bias", "proj_bias", "mlp_bias"}
    if len(biased) == 3:
        return {"add_bias_linear": True}
    if biased - {"qkv_bias"}:
        raise not_in_megatron(f"bias on some linear layers ({', '.join(sorted(biased))}) but not on all", where)
    return {"add_qkv_bias": True} if biased else {}


def refuse_flags(config: Config, where: Where, *names: str) -> None:
    """Refuse a switch that would add tensors the family's rules do not have."""
    on = [name for name in names if config.get(name)]
    if on:
        raise InputError(f"{' and '.join(on)} = true is not supported for this architecture", where=where)


def megatron_groups(config: Config, where: Where, *, window: int | None, **fields: Any) -> dict[str, dict[str, Any]]:
    """The groups of this module's docstring for a dense RMSNorm, SwiGLU, RoPE decoder; ``fields`` go to transformer."""
    dims = dense_dims(config, where)
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise InputError(f"hidden_act {activation!r} is not known to this family (silu is)", where=where)
    transformer: dict[str, Any] = {
        "num_layers": dims.layers,
        "hidden_size": dims.hidden,
        "num_attention_heads": dims.heads,
        "num_query_groups": dims.groups,
        "kv_channels": dims.head_dim,
        "ffn_hidden_size": dims.ffn,
        "normalization": "RMSNorm",
        "layernorm_epsilon": float(config.get("rms_norm_eps", 1e-6)),
        "gated_linear_unit": True,
        "activation_func": "silu",
        "add_bias_linear": False,
        "attention_dropout": float(config.get("attention_dropout") or 0.0),
        "hidden_dropout": 0.0,
        "init_method_std": float(config.get("initializer_range", 0.02)),
        **fields,
    }
    _window(config, transformer, window)
    gpt: dict[str, Any] = {
        "vocab_size": dims.vocab,
        "max_sequence_length": size(config, "max_position_embeddings", where),
        "position_embedding_type": "rope",
        "rotary_percent": float(config.get("partial_rotary_factor") or 1.0),
        "share_embeddings_and_output_weights": tie_fact(config) == "tied",
    }
    return {"transformer": transformer, "gpt": gpt, "rope": _rope(config, where, gpt)}


def _window(config: Config, transformer: dict[str, Any], window: int | None) -> None:
    """Hugging Face's window counts the token itself, Megatron's counts those before it."""
    if window is None:
        return
    kinds = config.get("layer_types") or ["sliding_attention"] * transformer["num_layers"]
    if "sliding_attention" in kinds:
        transformer["window_size"] = (window - 1, 0)
    if len(set(kinds)) > 1:
        transformer["window_attn_skip_freq"] = [int(kind == "sliding_attention") for kind in kinds]


def _rope(config: Config, where: Where, gpt: dict[str, Any]) -> dict[str, Any]:
    """Fill ``gpt``'s rotary arguments; returns the ``rope`` group."""
    # transformers 5 writes rope_parameters (theta inside); 4 wrote rope_theta and rope_scaling.
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    gpt["rotary_base"] = rope.get("rope_theta") or config.get("rope_theta") or 10000.0
    gpt["rotary_percent"] = float(rope.get("partial_rotary_factor") or gpt["rotary_percent"])
    kind = rope.get("rope_type") or rope.get("type") or "default"
    # "dynamic" begins beyond max_position_embeddings, where no run may go.
    if kind in ("default", "dynamic"):
        return {}
    factor = rope.get("factor")
    if kind not in ("linear", "llama3") or factor is None:
        raise not_in_megatron(f"rope scaling {kind!r}", where)
    if kind == "linear":
        gpt["seq_len_interpolation_factor"] = float(factor)
        return {}
    constants = {name: rope.get(name, default) for name, default in MEGATRON_LLAMA3.items()}
    if constants == MEGATRON_LLAMA3:
        gpt["rope_scaling"] = True
        gpt["rope_scaling_factor"] = float(factor)
        return {}
    return {"factor": float(factor), **constants}
