"""Qwen1.5, Qwen2 and Qwen2.5, dense: the rows of Llama and a bias on q, k and v (MAPPINGS.md 2.2)."""

from __future__ import annotations

from typing import Any

from mst_core.families.llama import LLAMA
from mst_core.families.rules import Config, Family, Reading, Where
from mst_core.families.translate import dense_dims, megatron_groups, tie_fact


def qwen_window(config: Config) -> int | None:
    """The window, if ``use_sliding_window`` is on; ``layer_types`` is filled in where old configs leave it out."""
    if not config.get("use_sliding_window"):
        return None
    window = config.get("sliding_window", 4096)
    return None if window is None else int(window)


def with_layer_types(config: Config) -> Config:
    """Old configs name the first windowed layer (``max_window_layers``) instead of each layer's kind."""
    if config.get("layer_types") or not config.get("use_sliding_window"):
        return config
    first, layers = config.get("max_window_layers", 28), config.get("num_hidden_layers", 0)
    kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    return {**config, "layer_types": kinds}


def _read(config: Config, where: Where) -> Reading:
    return Reading(dense_dims(config, where), frozenset({tie_fact(config), "qkv_bias"}))


def _translate(config: Config, where: Where) -> dict[str, dict[str, Any]]:
    return megatron_groups(with_layer_types(config), where, window=qwen_window(config), add_qkv_bias=True)


QWEN2 = Family(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    reward="Qwen2ForSequenceClassification",
    model_type="qwen2",
    rules=LLAMA.rules,
    read=_read,
    translate=_translate,
)
