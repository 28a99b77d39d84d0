"""Mistral and Mistral-Nemo: the rows of Llama, a head size of its own, sliding windows (MAPPINGS.md 2.1)."""

from __future__ import annotations

from typing import Any

from mst_core.families.llama import LLAMA
from mst_core.families.rules import Config, Family, Reading, Where
from mst_core.families.translate import dense_dims, megatron_groups, tie_fact


def _read(config: Config, where: Where) -> Reading:
    return Reading(dense_dims(config, where), frozenset({tie_fact(config)}))


def _translate(config: Config, where: Where) -> dict[str, dict[str, Any]]:
    # An absent key means 4096 to transformers; an explicit null means none.
    return megatron_groups(config, where, window=config.get("sliding_window", 4096))


MISTRAL = Family(
    name="mistral",
    architecture="MistralForCausalLM",
    reward="MistralForSequenceClassification",
    model_type="mistral",
    rules=LLAMA.rules,
    read=_read,
    translate=_translate,
)
