"""check_layout: what does not fit is refused before any process starts, all of it at once, with what would fit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mst_core import families
from mst_core.errors import InputError, SettingsError
from mst_core.megatron_names import model_of
from mst_core.parallel.layout import check_layout, divisors
from mst_core.runspec import RunSpec

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536,
    "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
}  # fmt: skip


MOE = {
    **CONFIG, "architectures": ["Qwen2MoeForCausalLM"], "num_attention_heads": 8, "num_key_value_heads": 8,
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 4,
}  # fmt: skip
MLA = {
    **CONFIG, "architectures": ["DeepseekV3ForCausalLM"], "num_attention_heads": 8, "num_key_value_heads": 8,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 20, "rms_norm_eps": 1e-6,
}  # fmt: skip


def check(config: dict[str, Any] = CONFIG, **settings: Any) -> None:
    spec = RunSpec(model="m", data=(Path("d.jsonl"),), out=Path("o"), global_batch=24, **settings)
    check_layout(families.family_for(config, "m").model(config), spec, "m")


@pytest.mark.parametrize("settings", [{}, {"tp": 3}, {"pp": 2}, {"tp": 3, "pp": 30}, {"tp": 3, "sp": True}])
def test_what_fits(settings: dict[str, Any]) -> None:
    check(**settings)


@pytest.mark.parametrize(
    ("settings", "said", "hint"),
    [
        ({"tp": 9}, "--tp 9 does not divide 3 key-value heads", "--tp of 1, 3"),
        ({"tp": 2}, "--tp 2 does not divide 9 attention heads", "--tp of 1, 3"),
        ({"pp": 4}, "--pp 4 does not divide 30 layers", "--pp of 1, 2, 3, 5, 6, 10, 15, 30"),
        ({"pp": 31}, "--pp 31 needs as many layers, the model has 30", None),
    ],
)
def test_what_does_not(settings: dict[str, Any], said: str, hint: str | None) -> None:
    with pytest.raises(InputError) as refused:
        check(**settings)
    assert said in str(refused.value)
    assert refused.value.exit_code == 3
    assert hint is None or refused.value.hint == hint


@pytest.mark.parametrize(
    ("settings", "said", "hint"),
    [
        ({"pp": 5, "vp": 4}, "--pp 5 times --vp 4 does not divide 30 layers", "--vp of 1, 2, 3, 6"),
        ({"pp": 2, "decoder_first_pipeline_num_layers": 30}, "30 layers less 30 do not divide into 1 more", None),
        ({"pp": 4, "decoder_last_pipeline_num_layers": 4}, "30 layers less 4 do not divide into 3 more stages", None),
        ({"pp": 2, "decoder_first_pipeline_num_layers": 10, "decoder_last_pipeline_num_layers": 10}, "into 0", None),
        ({"pp": 2, "vp": 2, "decoder_first_pipeline_num_layers": 11}, "stages of 11 and 19 layers", None),
        ({"ep": 2}, "--ep needs a model with experts", None),
        ({"etp": 1}, "--etp needs a model with experts", None),
        ({"moe_aux_loss_coeff": 0.1}, "--moe-aux-loss-coeff needs a model with experts", None),
    ],
)
def test_stages_and_experts_of_a_dense_model(settings: dict[str, Any], said: str, hint: str | None) -> None:
    test_what_does_not(settings, said, hint)


@pytest.mark.parametrize(
    ("config", "settings", "said"),
    [
        (MOE, {"ep": 4}, "--ep 4 does not divide 6 experts"),
        (MOE, {"tp": 2, "ep": 2}, "with sequence parallelism only"),
        (MOE, {"etp": 8, "ep": 1}, "--etp 8 does not divide 12 neurons of an expert"),
        (MOE, {"tp": 8, "sp": True}, "--tp 8 does not divide 4 neurons of the shared expert"),
        (MLA, {"tp": 2, "sp": True}, "latent attention train with --tp 1 only"),
    ],
)
def test_experts_and_latent_attention(config: dict[str, Any], settings: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as refused:
        check(config, **settings)
    assert said in str(refused.value)


def test_multi_token_prediction() -> None:
    """Keys decide: transformers writes num_nextn_predict_layers 1 for models without such layers."""
    config = {**MLA, "num_nextn_predict_layers": 1}
    family, spec = families.family_for(config), RunSpec(model="m", data=(Path("d"),), out=Path("o"))
    check_layout(model_of(family, config, ["decoder.layers.0.mlp.router.weight"]), spec, "m")
    with pytest.raises(InputError, match="multi-token-prediction layers are not trained"):
        check_layout(model_of(family, config, ["mtp.layers.0.enorm.weight"]), spec, "m")


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        (CONFIG, {"pp": 5, "vp": 3}),
        (CONFIG, {"pp": 4, "decoder_first_pipeline_num_layers": 5, "decoder_last_pipeline_num_layers": 5}),
        (MOE, {"tp": 2, "sp": True, "ep": 3, "etp": 1, "nproc": 6}),
        (MOE, {"ep": 2, "lora_rank": 4, "lora_targets": ("q_proj", "o_proj")}),
        (MLA, {"ep": 2, "cp": 2, "pp": 30}),
    ],
)
def test_layouts_with_experts_that_fit(config: dict[str, Any], settings: dict[str, Any]) -> None:
    check(config, **settings)


def test_all_mistakes_at_once() -> None:
    with pytest.raises(InputError) as refused:
        check(tp=2, pp=4)
    for said in ("9 attention heads", "3 key-value heads", "30 layers"):
        assert said in str(refused.value)


@pytest.mark.parametrize("settings", [{"sp": True}, {"tp": 2, "nproc": 3}, {"micro_batch": 5}])
def test_settings_that_contradict_each_other(settings: dict[str, Any]) -> None:
    with pytest.raises((SettingsError, ValueError)):
        check(**settings)


def test_divisors() -> None:
    assert divisors(12) == [1, 2, 3, 4, 6, 12]


def test_it_needs_no_torch() -> None:
    code = "import sys, mst_core.parallel.layout; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
