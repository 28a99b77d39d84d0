"""mst-merge against PEFT: what ``merge_and_unload`` gives, what the adapter computes when on, and what PEFT saves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mst_convert import plan as convert_planning
from mst_convert import work as convert_working
from mst_convert.merge import plan as planning
from mst_convert.merge import work as working
from mst_convert.merge.spec import MergeSpec
from mst_convert.spec import ConvertSpec
from mst_core.errors import InputError

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

TinyHF = Callable[..., Path]
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
IDS = torch.arange(3, 43).reshape(2, 20)


def adapt(base: Path, out: Path, *, size: float = 0.1, fp32: bool = True, **config: Any) -> Any:
    """A PEFT model on ``base`` with random factors, saved in ``out``; returned with the adapter on.

    ``fp32``: the factors are, as PEFT makes them by itself; else they have the base's dtype.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    settings = {"r": 4, "lora_alpha": 16, "target_modules": TARGETS, "task_type": "CAUSAL_LM", **config}
    model = peft.get_peft_model(model, peft.LoraConfig(**settings), autocast_adapter_dtype=fp32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * size)
    model.save_pretrained(out)
    return model.eval()


def merge(base: Path, adapter: Path, out: Path) -> dict[str, torch.Tensor]:
    spec = MergeSpec(model=str(base), adapter=str(adapter), out=out)
    working.work(spec, planning.plan(spec))
    return load_file(out / "model.safetensors")


def by_peft(model: Any) -> dict[str, torch.Tensor]:
    return dict(model.merge_and_unload().state_dict())


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(IDS).logits
    return found


CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rslora": {"use_rslora": True},
    "patterns": {
        "rank_pattern": {"q_proj": 2, r"layers\.[12]\.mlp\.down_proj": 7},
        "alpha_pattern": {"layers.0.self_attn.v_proj": 3, "up_proj": 1.5},
    },
    "some layers": {"layers_to_transform": [1, 3], "exclude_modules": ["k_proj"]},
    "an expression": {"target_modules": r".*\.(q_proj|gate_proj)"},
}


@pytest.mark.parametrize(
    ("family", "config"), [("llama", name) for name in CONFIGS] + [("qwen2", "plain"), ("qwen3", "plain")]
)
def test_fp32_equals_merge_and_unload(tiny_hf: TinyHF, tmp_path: Path, family: str, config: str) -> None:
    base = tiny_hf(family)
    model = adapt(base, tmp_path / "lora", **CONFIGS[config])
    with_adapter = logits(model)
    ours = merge(base, tmp_path / "lora", tmp_path / "out")
    theirs = by_peft(model)
    assert ours.keys() == theirs.keys() - ({"lm_head.weight"} if family == "qwen2" else set())
    for name, tensor in ours.items():
        assert (tensor - theirs[name]).abs().max() <= 1e-6, name
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").eval()
    without = transformers.AutoModelForCausalLM.from_pretrained(base, dtype="auto").eval()
    assert (logits(merged) - with_adapter).abs().max() <= 1e-4
    assert (logits(without) - with_adapter).abs().max() > 0.1, "the adapter must matter for this test to say anything"


@pytest.mark.parametrize("fp32", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_bf16_is_nearer_to_the_truth_than_peft(tiny_hf: TinyHF, tmp_path: Path, family: str, fp32: bool) -> None:
    """peft #1035. The truth is the sum in fp32; ours is that, rounded once. PEFT rounds the delta of bf16 factors."""
    base = tiny_hf(family, dtype="bfloat16")
    model = adapt(base, tmp_path / "lora", size=0.3, fp32=fp32)
    ours, before = merge(base, tmp_path / "lora", tmp_path / "out"), load_file(base / "model.safetensors")
    factors = load_file(tmp_path / "lora" / "adapter_model.safetensors")
    theirs = by_peft(model)
    mean = {"ours": 0.0, "theirs": 0.0}
    for name, tensor in ours.items():
        stem = f"base_model.model.{name.removesuffix('weight')}"
        if f"{stem}lora_A.weight" not in factors:
            assert torch.equal(tensor, before[name])
            continue
        delta = factors[f"{stem}lora_B.weight"].float() @ factors[f"{stem}lora_A.weight"].float() * 4
        truth = before[name].float() + delta
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, truth.bfloat16()), name
        mean["ours"] += float((tensor.float() - truth).abs().mean())
        mean["theirs"] += float((theirs[name].float() - truth).abs().mean())
        assert (tensor.float() - truth).abs().max() <= (theirs[name].float() - truth).abs().max()
    assert mean["ours"] <= (1.0 if fp32 else 0.8) * mean["theirs"], mean


def test_a_megatron_base_equals_merge_and_unload(tiny_hf: TinyHF, tmp_path: Path) -> None:
    base = tiny_hf("qwen2")
    spec = ConvertSpec(model=str(base), to="megatron", out=tmp_path / "megatron")
    convert_working.work(spec, convert_planning.plan(spec))
    model = adapt(base, tmp_path / "lora")
    ours, theirs = merge(tmp_path / "megatron", tmp_path / "lora", tmp_path / "out"), by_peft(model)
    for name, tensor in ours.items():
        assert (tensor - theirs[name]).abs().max() <= 1e-6, name


def test_fan_in_fan_out_is_what_peft_makes_of_it(tiny_hf: TinyHF, tmp_path: Path) -> None:
    """True on a Linear layer: PEFT says so and goes on as if it were false, also for square weights."""
    base = tiny_hf("llama")
    adapt(base, tmp_path / "lora")
    path = tmp_path / "lora" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "fan_in_fan_out": True}))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    theirs = by_peft(peft.PeftModel.from_pretrained(loaded, tmp_path / "lora"))
    ours = merge(base, tmp_path / "lora", tmp_path / "out")
    for name, tensor in ours.items():
        assert (tensor - theirs[name]).abs().max() <= 1e-6, name


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "dora": ({"use_dora": True}, "use_dora"),
    "bias": ({"bias": "all"}, "bias is 'all'"),
    "modules": ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    "tokens": ({"trainable_token_indices": [5, 6]}, "trainable_token_indices"),
    "parameters": ({"target_parameters": ["self_attn.q_proj.weight"], "target_modules": []}, "target_parameters"),
    "pissa": ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
    "embedding": ({"target_modules": ["embed_tokens", "q_proj"]}, "LoRA on an embedding"),
    "head": ({"target_modules": ["lm_head", "q_proj"]}, "copy of a base tensor"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_peft_saves_of_other_kinds_is_refused_by_name(tiny_hf: TinyHF, tmp_path: Path, case: str) -> None:
    config, said = REFUSED[case]
    adapt(tiny_hf("llama"), tmp_path / "lora", **config)
    with pytest.raises(InputError, match=said):
        merge(tiny_hf("llama"), tmp_path / "lora", tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


def test_another_kind_of_adapter(tiny_hf: TinyHF, tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_hf("llama"))
    config = peft.LoHaConfig(r=2, alpha=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    peft.get_peft_model(model, config).save_pretrained(tmp_path / "loha")
    with pytest.raises(InputError, match="peft_type is 'LOHA'"):
        merge(tiny_hf("llama"), tmp_path / "loha", tmp_path / "out")
