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


def adapt(base: Path, out: Path, *, size: float = 0.1, fp32: bool = True, seed: int = 0, **config: Any) -> Any:
    """A PEFT model on ``base`` with everything trainable randomised, saved in ``out``; returned with the adapter on.

    ``fp32``: the factors are, as PEFT makes them by itself; else they have the base's dtype.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    settings = {"r": 4, "lora_alpha": 16, "target_modules": TARGETS, "task_type": "CAUSAL_LM", **config}
    model = peft.get_peft_model(model, peft.LoraConfig(**settings), autocast_adapter_dtype=fp32)
    randomise(model, size, seed)
    model.save_pretrained(out)
    return model.eval()


def randomise(model: Any, size: float, seed: int = 0) -> None:
    """Factors become random, all else that is trained moves a little; magnitudes by a factor, as they are lengths."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * size
            if "magnitude" in name:
                parameter.mul_(1 + noise)
            elif "lora_" in name:
                parameter.copy_(noise)
            elif parameter.requires_grad:
                parameter.add_(noise)


def merge(base: Path, adapter: Path | tuple[Path, ...], out: Path, **settings: Any) -> dict[str, torch.Tensor]:
    adapters = tuple(map(str, adapter)) if isinstance(adapter, tuple) else (str(adapter),)
    spec = MergeSpec(model=str(base), adapter=adapters, out=out, **settings)
    working.work(spec, planning.plan(spec))
    return load_file(out / "model.safetensors")


def by_peft(model: Any, out: Path) -> dict[str, torch.Tensor]:
    """PEFT's merge under the names that transformers saves."""
    model.merge_and_unload().save_pretrained(out)
    return load_file(out / "model.safetensors")


def load(directory: Path, dtype: Any = "auto") -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()


def check_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.shape == theirs[name].shape, name
        assert (tensor - theirs[name]).abs().max() <= 1e-6, name


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
    "dora": {"use_dora": True},
    "dora, rslora, patterns": {"use_dora": True, "use_rslora": True, "rank_pattern": {"q_proj": 2}},
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "embedding and head, dora": {"target_modules": ["q_proj", "embed_tokens", "lm_head"], "use_dora": True},
    "modules": {"modules_to_save": ["lm_head", "embed_tokens", "norm"]},
    "a module of several tensors": {"modules_to_save": ["layers.1.mlp"], "target_modules": ["q_proj"]},
    "tokens": {"trainable_token_indices": [5, 300, 7]},
    "tokens of both": {"trainable_token_indices": {"embed_tokens": [5, 6], "lm_head": [9]}},
    "parameters": {"target_parameters": ["self_attn.q_proj.weight", "mlp.up_proj.weight"], "target_modules": [],
                   "rank_pattern": {"q_proj.weight": 2}},
    "some layers": {"layers_to_transform": [1, 3], "exclude_modules": ["k_proj"]},
    "an expression": {"target_modules": r".*\.(q_proj|gate_proj)"},
}  # fmt: skip
BIASED: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias all": {"bias": "all"},
    "bias lora_only": {"bias": "lora_only", "target_modules": ["q_proj", "up_proj"]},
    "lora_bias": {"lora_bias": True, "target_modules": ["q_proj", "v_proj"]},
    "tokens, tied": {"trainable_token_indices": [5, 6]},
    "modules, kept tied": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
}


@pytest.mark.parametrize(
    ("family", "config"),
    [*(("llama", name) for name in CONFIGS), *(("qwen2", name) for name in BIASED), ("qwen3", "plain")],
)
def test_fp32_equals_merge_and_unload(tiny_hf: TinyHF, tmp_path: Path, family: str, config: str) -> None:
    base = tiny_hf(family)
    model = adapt(base, tmp_path / "lora", **(BIASED if family == "qwen2" else CONFIGS)[config])
    with_adapter = logits(model)
    check_equal(merge(base, tmp_path / "lora", tmp_path / "out"), by_peft(model, tmp_path / "peft"))
    assert (logits(load(tmp_path / "out")) - with_adapter).abs().max() <= 1e-4
    assert (logits(load(base)) - with_adapter).abs().max() > 0.1, (
        "the adapter must matter for this test to say anything"
    )


@pytest.mark.parametrize(
    ("family", "config", "fp32"),
    [
        ("llama", "plain", True),
        ("llama", "plain", False),
        ("llama", "embedding and head, dora", True),
        ("llama", "dora", False),
        ("llama", "modules", True),
        ("llama", "tokens", True),
        ("qwen2", "plain", False),
        ("qwen2", "bias all", False),
        ("qwen2", "lora_bias", False),
    ],
)
def test_bf16_is_nearer_to_the_truth_than_peft(
    tiny_hf: TinyHF, tmp_path: Path, family: str, config: str, fp32: bool
) -> None:
    """peft #1035. The truth is PEFT's merge in fp32; ours is that, rounded once. PEFT rounds deltas and norms too."""
    base = tiny_hf(family, dtype="bfloat16")
    settings = (BIASED if family == "qwen2" else CONFIGS)[config]
    model = adapt(base, tmp_path / "lora", size=0.3, fp32=fp32, **settings)
    exact = peft.PeftModel.from_pretrained(load(base, torch.float32), tmp_path / "lora")
    truth, theirs = by_peft(exact, tmp_path / "truth"), by_peft(model, tmp_path / "peft")
    mean = {"ours": 0.0, "theirs": 0.0}
    ours, before = merge(base, tmp_path / "lora", tmp_path / "out"), load_file(base / "model.safetensors")
    assert ours.keys() == truth.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == torch.bfloat16
        if torch.equal(truth[name], before[name].float()):
            assert torch.equal(tensor, before[name])
            continue
        errors = {who: (t.float() - truth[name]).abs() for who, t in (("ours", tensor), ("theirs", theirs[name]))}
        # One rounding of what was computed in fp32: half a step of bf16, and the last bit of fp32 beside it.
        assert bool((errors["ours"] <= truth[name].abs() * 2**-8 * 1.001 + 1e-6).all()), name
        if theirs[name].dtype == torch.bfloat16:  # what PEFT trains whole it leaves in fp32
            assert errors["ours"].max() <= errors["theirs"].max() + 1e-6, name
            mean = {who: mean[who] + float(errors[who].mean()) for who in mean}
    assert mean["ours"] <= (1.0 if fp32 else 0.9) * mean["theirs"] + 1e-9, mean


def test_a_megatron_base_equals_merge_and_unload(tiny_hf: TinyHF, tmp_path: Path) -> None:
    base = tiny_hf("qwen2")
    spec = ConvertSpec(model=str(base), to="megatron", out=tmp_path / "megatron")
    convert_working.work(spec, convert_planning.plan(spec))
    model = adapt(base, tmp_path / "lora")
    ours = merge(tmp_path / "megatron", tmp_path / "lora", tmp_path / "out")
    check_equal(ours, by_peft(model, tmp_path / "peft"))


def test_fan_in_fan_out_is_what_peft_makes_of_it(tiny_hf: TinyHF, tmp_path: Path) -> None:
    """True on a Linear layer: PEFT says so and goes on as if it were false, also for square weights."""
    base = tiny_hf("llama")
    adapt(base, tmp_path / "lora")
    path = tmp_path / "lora" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "fan_in_fan_out": True}))
    theirs = by_peft(peft.PeftModel.from_pretrained(load(base), tmp_path / "lora"), tmp_path / "peft")
    check_equal(merge(base, tmp_path / "lora", tmp_path / "out"), theirs)


def test_pissa_is_refused(tiny_hf: TinyHF, tmp_path: Path) -> None:
    adapt(tiny_hf("llama"), tmp_path / "lora", init_lora_weights="pissa")
    with pytest.raises(InputError, match="init_lora_weights is 'pissa'"):
        merge(tiny_hf("llama"), tmp_path / "lora", tmp_path / "out")


def test_another_kind_of_adapter(tiny_hf: TinyHF, tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_hf("llama"))
    config = peft.LoHaConfig(r=2, alpha=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    peft.get_peft_model(model, config).save_pretrained(tmp_path / "loha")
    with pytest.raises(InputError, match="peft_type is 'LOHA'"):
        merge(tiny_hf("llama"), tmp_path / "loha", tmp_path / "out")
