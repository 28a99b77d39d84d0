"""check_layout: what does not fit is refused before any process starts, all of it at once, with what would fit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mst_core import families
from mst_core.errors import InputError, SettingsError
from mst_core.parallel.layout import check_layout, divisors
from mst_core.runspec import RunSpec

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536,
    "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
}  # fmt: skip


def check(**settings: Any) -> None:
    spec = RunSpec(model="m", data=(Path("d.jsonl"),), out=Path("o"), global_batch=24, **settings)
    check_layout(families.family_for(CONFIG, "m").model(CONFIG), spec, "m")


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
