"""--qlora against NF4 by hand: a plain LoRA run on the weights that 4 bits keep makes the same steps."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from mst_core.engine import loop
from mst_core.engine.plain import PlainEngine
from mst_core.errors import InputError, MissingPackage
from mst_train.objective import SFT
from tests.oracle.test_merge_peft import merge
from tests.oracle.test_plain import _logp, saved, spec_of, units_of, without_manifest

LEVELS = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
]  # fmt: skip
"""NF4, appendix E of arXiv 2305.14314."""


def nf4(weight: Tensor) -> Tensor:
    """What NF4 keeps of a matrix: in blocks of 64, the nearest level times the largest magnitude."""
    blocks, levels = weight.float().reshape(-1, 64), torch.tensor(LEVELS)
    most = blocks.abs().amax(1, keepdim=True)
    nearest = ((blocks / most)[..., None] - levels).abs().argmin(-1)
    return (levels[nearest] * most).reshape(weight.shape)


@pytest.fixture(scope="module")
def model(tiny_hf: Callable[..., Path]) -> Path:
    return tiny_hf("llama", intermediate_size=128)


@pytest.fixture(scope="module")
def kept(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with all linear layers of its decoder as NF4 keeps them, in fp32."""
    out = shutil.copytree(model, tmp_path_factory.mktemp("nf4") / "kept")
    tensors = load_file(out / "model.safetensors")
    named = {name: nf4(t) if "_proj" in name else t for name, t in tensors.items()}
    save_file(named, out / "model.safetensors", metadata={"format": "pt"})
    return out


def steps(engine: PlainEngine, spec: Any, count: int = 4) -> list[dict[str, float]]:
    units = units_of(8)
    return [engine.step(loop.micro_batches(units, engine, spec, None), SFT, spec.lr) for _ in range(count)]


@pytest.mark.parametrize("more", [{}, {"lora_dora": True}, {"lora_rslora": True, "recompute": "full"}])
def test_steps_are_those_of_lora_on_what_4_bits_keep(model: Path, kept: Path, more: dict[str, Any]) -> None:
    spec = spec_of(lora_rank=4, lr=5e-3, **more)
    engine = PlainEngine(spec.model_copy(update={"qlora": "nf4"}), model)
    packed = [name for name, p in engine.model.named_parameters() if p.dtype == torch.uint8]
    assert len(packed) == 7 * 4
    found, wanted = steps(engine, spec), steps(PlainEngine(spec, kept), spec)
    for one, other in zip(found, wanted, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-5)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
    assert found[-1]["loss"] < found[0]["loss"] - 0.05
    assert abs(steps(PlainEngine(spec, model), spec, 1)[0]["loss"] - found[0]["loss"]) > 1e-3


def test_double_quantisation_is_near_and_bf16_computes(model: Path) -> None:
    single, double, half = (
        steps(PlainEngine(spec := spec_of(lora_rank=4, qlora=kind, precision=precision), model), spec, 2)
        for kind, precision in (("nf4", "fp32"), ("nf4-double", "fp32"), ("nf4-double", "bf16"))
    )
    assert 0 < abs(single[0]["loss"] - double[0]["loss"]) < 0.02
    assert 0 < abs(half[1]["loss"] - double[1]["loss"]) < 0.02


def test_what_is_merged_later_is_the_full_base(model: Path, tmp_path: Path) -> None:
    spec = spec_of(lora_rank=4, qlora="nf4", lr=5e-3)
    engine = PlainEngine(spec, model)
    steps(engine, spec)
    out = without_manifest(saved(engine, tmp_path / "adapter"), tmp_path / "only")
    tensors, base = load_file(out / "adapter_model.safetensors"), load_file(model / "model.safetensors")
    merged = merge(model, out, tmp_path / "merged")
    for name, weight in base.items():
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{stem}.lora_A.weight" in tensors:
            weight = weight + 2 * tensors[f"{stem}.lora_B.weight"] @ tensors[f"{stem}.lora_A.weight"]
        assert (merged[name] - weight).abs().max() <= 1e-6, name
    batch = loop._collate(units_of(4), None)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert (_logp(whole, batch) - engine.score(batch)).abs().max() > 1e-3  # near, and not the same


def test_a_run_goes_on_bit_for_bit(model: Path, tmp_path: Path) -> None:
    spec = spec_of(lora_rank=4, qlora="nf4-double")
    first, second = (PlainEngine(spec, model) for _ in range(2))
    steps(first, spec, 2)
    first.save_state(tmp_path)
    second.load_state(tmp_path)
    assert steps(first, spec, 2) == steps(second, spec, 2)


def test_rows_that_bitsandbytes_misreads_on_a_cpu_are_refused(tiny_hf: Callable[..., Path]) -> None:
    with pytest.raises(InputError, match=r"misreads 4-bit rows of 96, no multiple of 64: .*down_proj"):
        PlainEngine(spec_of(lora_rank=4, qlora="nf4"), tiny_hf("llama"))


def test_without_bitsandbytes_the_pip_line_is_told(model: Path, monkeypatch: Any) -> None:
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "bitsandbytes" else find(name))
    with pytest.raises(MissingPackage) as caught:
        PlainEngine(spec_of(lora_rank=4, qlora="nf4"), model)
    assert caught.value.hint == "pip install 'mst-tools-core[qlora]'"
