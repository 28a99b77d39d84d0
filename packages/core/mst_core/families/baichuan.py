"""Baichuan and Baichuan2, 7B (remote code, never run): the rows of Llama, q, k and v in one W_pack (MAPPINGS.md 2.12).

Baichuan2's head is a NormHead: it divides each row of lm_head by its length in every forward pass. The rows are
converted as they are stored, so the round trip is exact; a plain output layer on them would give other logits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mst_core.errors import InputError
from mst_core.families.llama import EMBEDDING, FC1, FC2, FINAL_NORM, INPUT_NORM, MLP_NORM, OUTPUT, PROJ
from mst_core.families.rules import Config, Family, Reading, Rule, Where
from mst_core.families.translate import dense_dims, megatron_groups, not_in_megatron, tie_fact

W_PACK = Rule(
    "decoder.layers.{i}.self_attention.linear_qkv.weight",
    ("model.layers.{i}.self_attn.W_pack.weight [qkv,h]",),
    "fused_qkv",
)
NORM_HEAD_VOCAB = 125696
"""Baichuan2's vocabulary, which no other Baichuan has: config.json says nothing else of the head."""


def _multi_head(config: Config) -> Config:
    """Every query head has its own key and value, of hidden / heads: the remote code reads no other keys."""
    return {**config, "num_key_value_heads": config.get("num_attention_heads"), "head_dim": None}


def _read(config: Config, where: Where) -> Reading:
    # The 13B models alone have no max_position_embeddings (only model_max_length), for they have no positions.
    if config.get("max_position_embeddings") is None or config.get("hidden_size") == 5120:
        raise InputError(
            "a Baichuan of 13B has ALiBi in place of rotary positions, which megatron-core's GPT model lacks",
            where=where,
            hint="Baichuan 7B is known: its config.json has max_position_embeddings",
        )
    return Reading(dense_dims(_multi_head(config), where), frozenset({tie_fact(config)}))


def _translate(config: Config, where: Where) -> dict[str, dict[str, Any]]:
    _read(config, where)
    if config.get("vocab_size") == NORM_HEAD_VOCAB:
        raise not_in_megatron("Baichuan2's NormHead (an output layer whose rows are normalised in each pass)", where)
    return megatron_groups(_multi_head(config), where, window=None)


BAICHUAN = Family(
    name="baichuan",
    architecture="BaichuanForCausalLM",
    model_type="baichuan",
    rules=(EMBEDDING, INPUT_NORM, W_PACK, PROJ, MLP_NORM, FC1, FC2, FINAL_NORM, OUTPUT),
    read=_read,
    translate=_translate,
)
BAICHUAN1 = replace(BAICHUAN, name="baichuan1", architecture="BaiChuanForCausalLM")
"""The first Baichuan 7B, whose class is spelt with a capital C."""
