"""mst-convert against real megatron-core and transformers: one torchrun of four ranks serves all tests here."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mst_convert import plan as planning
from mst_convert import work as working
from mst_convert.spec import ConvertSpec
from mst_core import families, tensors
from tests.launch import torchrun

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.5, "high_freq_factor": 3.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", "dims": {"vocab_size": 130}, "padding": 64, "rows": 192, "save": True},
    "llama-tied": {
        "family": "llama", "dims": {"vocab_size": 130, "tie_word_embeddings": True}, "padding": 128, "rows": 256,
        "save": True,
    },
    # The checkpoint is padded to 256 rows, the model to 192: megatron-core allows the mismatch.
    "other-padding": {"family": "llama", "dims": {"vocab_size": 130}, "padding": 128, "rows": 192},
    "llama3-rope": {"family": "llama", "dims": {}, "rope": LLAMA3, "padding": 2, "rows": 330},
    "linear-rope": {
        "family": "llama", "padding": 2, "rows": 330,
        "dims": {}, "rope": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0},
    },
    "qwen2": {"family": "qwen2", "dims": {}, "padding": 128, "rows": 384},
    "qwen3": {"family": "qwen3", "dims": {}, "padding": 128, "rows": 384, "save": True},
    "mistral": {"family": "mistral", "dims": {"sliding_window": 8}, "padding": 128, "rows": 384},
}  # fmt: skip


def convert(**settings: Any) -> Path:
    spec = ConvertSpec(**settings)
    working.work(spec, planning.plan(spec))
    return spec.out


@pytest.fixture(scope="module")
def ran(tiny_hf: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    where = tmp_path_factory.mktemp("oracle")
    plan: dict[str, Any] = {"cases": {}}
    for name, case in CASES.items():
        hf = tiny_hf(case["family"], **case["dims"])
        if "rope" in case:
            hf = Path(shutil.copytree(hf, where / f"{name}-hf"))
            config = {**json.loads((hf / "config.json").read_text()), "rope_parameters": case["rope"]}
            (hf / "config.json").write_text(json.dumps(config))
        out = convert(model=str(hf), to="megatron", out=where / f"{name}-megatron", vocab_padding=case["padding"])
        model = AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float32, attn_implementation="eager")
        tokens = torch.randint(0, model.config.vocab_size, (2, 24), generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            torch.save({"tokens": tokens, "logits": model(tokens).logits}, where / f"{name}.pt")
        config = tensors.config(hf)
        plan["cases"][name] = {
            "hf": str(hf),
            "megatron": str(out),
            "logits": str(where / f"{name}.pt"),
            "vocab_rows": case["rows"],
            "settings": families.family_for(config).megatron(config),
            **({"save": str(where / f"{name}-saved" / "iter_0000007")} if case.get("save") else {}),
        }
    plan["ranks"] = torchrun("tests.oracle.convert_ranks", plan, where)
    return plan


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("layout", ["tp1 pp1", "tp2 pp2", "tp1 pp2", "tp2 pp1"])
def test_every_parameter_is_bit_equal_to_its_slice(ran: dict[str, Any], name: str, layout: str) -> None:
    for rank in ran["ranks"]:
        found = rank[f"{name} {layout}"]
        assert found["wrong"] == []
        assert found["parameters"] > 10
        assert found["common"] == ["args"] or name == "llama3-rope"


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(ran: dict[str, Any], name: str) -> None:
    assert ran["ranks"][0][f"{name} tp1 pp1"]["logits"] <= 1e-5


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.get("save")])
def test_what_megatron_saved_at_tp2_pp2_comes_back_equal(ran: dict[str, Any], name: str, tmp_path: Path) -> None:
    case = ran["cases"][name]
    saved = Path(case["save"]).parent
    (saved / "latest_checkpointed_iteration.txt").write_text("7\n")
    back = convert(model=str(saved), to="hf", out=tmp_path / "back", hf_config=Path(case["hf"]))
    _equal(load_file(Path(case["hf"]) / "model.safetensors"), load_file(back / "model.safetensors"))
    for file in ("config.json", "tokenizer.json", "generation_config.json"):
        assert (back / file).read_bytes() == (Path(case["hf"]) / file).read_bytes()


def _equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype
        assert torch.equal(tensor, second[name]), name
