"""The language model of Qwen2-VL and Qwen2.5-VL; the vision tower is carried as it is (MAPPINGS.md 2.14).

The language model is Qwen2 under ``language_model.``, its rope is mrope. "flat" names are those of public checkpoints
and of transformers 5, "nested" those of transformers 4.52 and later. transformers 5 nests the text settings in
``text_config`` and keeps ``tie_word_embeddings`` outside; releases before it may have it inside only: then that counts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mst_core.families.qwen2 import QWEN2, qwen_window, with_layer_types
from mst_core.families.rules import Config, Family, Reading, Rule, Where
from mst_core.families.translate import dense_dims, megatron_groups, not_in_megatron, tie_fact, with_defaults


def _text(config: Config) -> Config:
    """The settings of the language model."""
    inner = config.get("text_config") or {}
    tied = inner.get("tie_word_embeddings") or config.get("tie_word_embeddings")
    return {**config, **inner, "tie_word_embeddings": bool(tied)}


def _prefixed(rule: Rule) -> tuple[Rule, ...]:
    """The row in each dialect; lm_head has one name in both."""
    native = "language_model." + rule.native
    nested = tuple(text.replace("model.", "model.language_model.", 1) for text in rule.hf)
    if rule.hf[0].startswith("lm_head."):
        return (replace(rule, native=native),)
    facts = {"flat": rule.hf, "nested": nested}
    return tuple(
        replace(rule, native=native, hf=hf, when=f"{rule.when} and {fact}" if rule.when else fact)
        for fact, hf in facts.items()
    )


def _read(config: Config, where: Where) -> Reading:
    text = _text(config)
    return Reading(dense_dims(text, where), frozenset({tie_fact(text), "qkv_bias"}))


def _translate(config: Config, where: Where) -> dict[str, dict[str, Any]]:
    text = with_layer_types(_text(config))
    rope = dict(text.get("rope_parameters") or text.get("rope_scaling") or {})
    section = rope.pop("mrope_section", None)
    if section is None:
        raise not_in_megatron("a vision-language model without mrope_section", where)
    # "mrope" is how releases before transformers 5 call the plain rope that takes three positions.
    kind = {key: "default" if rope[key] == "mrope" else rope[key] for key in ("type", "rope_type") if key in rope}
    theta = rope.get("rope_theta") or text.get("rope_theta") or 1e6
    text = with_defaults({**text, "rope_parameters": {**rope, **kind, "rope_theta": theta}}, rms_norm_eps=1e-5)
    groups = megatron_groups(text, where, window=qwen_window(text), add_qkv_bias=True, mrope_section=list(section))
    groups["gpt"]["position_embedding_type"] = "mrope"
    return groups


QWEN2_VL = Family(
    name="qwen2-vl",
    architecture="Qwen2VLForConditionalGeneration",
    model_type="qwen2_vl",
    rules=tuple(prefixed for rule in QWEN2.rules for prefixed in _prefixed(rule)),
    read=_read,
    translate=_translate,
    dialects={"flat": "model.embed_tokens.weight", "nested": "model.language_model.embed_tokens.weight"},
    carried=(("visual.", "visual."), ("model.visual.", "visual.")),
)
QWEN2_5_VL = replace(
    QWEN2_VL,
    name="qwen2.5-vl",
    architecture="Qwen2_5_VLForConditionalGeneration",
    model_type="qwen2_5_vl",
)
