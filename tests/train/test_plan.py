"""What the plan of a run refuses from headers and files alone, each before torch is loaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mst_convert import plan as convert_plan
from mst_convert import work as convert_work
from mst_convert.spec import ConvertSpec
from mst_core.errors import InputError, MstError, SettingsError
from mst_core.families import family_for
from mst_core.tensors import file_headers
from mst_train.plan import plan
from mst_train.spec import TrainSpec


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a?", "completion": "b"}\n\n{"prompt": "c?", "completion": "d"}\n')
    return path


@pytest.fixture
def model(tiny_hf: Callable[..., Path], tmp_path: Path) -> Path:
    """A copy that a test may break."""
    return shutil.copytree(tiny_hf("llama"), tmp_path / "model")


def settings(model: Path, data: Path, **more: Any) -> TrainSpec:
    return TrainSpec(**{"model": str(model), "data": (data,), "out": data.parent / "out", **more})


def refused(model: Path, data: Path, **more: Any) -> MstError:
    with pytest.raises(MstError) as caught:
        plan(settings(model, data, **more))
    return caught.value


def edit(model: Path, **change: Any) -> None:
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))


def test_a_plan(model: Path, data: Path) -> None:
    found = plan(settings(model, data, global_batch=2, epochs=3))
    assert (found.engine, found.layout, found.ranks, found.lines, found.seq_length) == ("plain", "hf", 1, 2, 256)
    assert found.parameters == sum(ref.nbytes // 4 for ref in file_headers(model / "model.safetensors").values())
    assert dict(found.rows())["out"] == str(data.parent / "out")


def test_several_ranks_of_a_hugging_face_directory(model: Path, data: Path) -> None:
    found = plan(settings(model, data, engine="fsdp", nproc=4))
    assert (found.engine, found.layout, found.ranks) == ("fsdp", "hf", 4)
    found = plan(settings(model, data, engine="deepspeed", nproc=2, zero=3, offload="all"))
    assert found.layout_of_ranks == "tp 1, pp 1, dp 2, zero 3, offload_optimizer cpu, offload_param cpu"
    error = refused(model, data, nproc=2)
    assert "the plain engine is one process" in str(error)
    assert str(error.hint).startswith("--engine fsdp, deepspeed or megatron")
    assert "was seen to diverge" in str(refused(model, data, engine="deepspeed", zero=0, precision="bf16"))


def test_what_an_engine_does_not_recompute(model: Path, data: Path) -> None:
    assert plan(settings(model, data, recompute="full")).engine == "plain"
    with pytest.raises(ValueError, match="--engine fsdp has no --recompute selective: it needs megatron"):
        settings(model, data, engine="fsdp", recompute="selective")


def test_tensors_that_the_config_does_not_know(model: Path, data: Path) -> None:
    """They would be neither trained nor written again."""
    edit(model, num_hidden_layers=3)
    error = refused(model, data)
    assert isinstance(error, InputError)
    assert "holds 9 tensors that its config does not know: model.layers.3." in str(error)


def test_weights_that_cannot_be_trained(model: Path, data: Path) -> None:
    path = model / "model.safetensors"
    head, _, rest = path.read_bytes().partition(b'"dtype":"F32"')
    path.write_bytes(head + b'"dtype":"I32"' + rest)
    error = refused(model, data)
    assert "has the dtype I32; weights to train are F32, BF16, F16" in str(error)
    assert error.hint == "give the unquantised model"


def test_an_output_that_exists(model: Path, data: Path) -> None:
    (data.parent / "out").mkdir()
    error = refused(model, data)
    assert str(error).endswith("out: exists")
    assert "--overwrite" in str(error.hint)


def test_an_adapter_and_a_gguf_file(model: Path, data: Path) -> None:
    (model / "adapter_config.json").write_text("{}")
    error = refused(model, data)
    assert "is an adapter, not a model" in str(error)
    assert str(error.hint).startswith("merge it first: mst-merge --model BASE --adapter")
    gguf = data.with_suffix(".gguf")
    gguf.write_bytes(b"GGUF")
    assert str(refused(gguf, data).hint).startswith(f"mst-convert --model {gguf} --to hf")


SIZES: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 50,
}  # fmt: skip
FUSED: dict[str, tuple[dict[str, Any], str]] = {
    "Phi3ForCausalLM": ({}, "qkv_proj"),
    "InternLM2ForCausalLM": ({}, "wqkv"),
    "Qwen3MoeForCausalLM": ({"num_experts": 4, "moe_intermediate_size": 12, "num_experts_per_tok": 2}, "gate_up_proj"),
}


@pytest.mark.parametrize("architecture", FUSED)
def test_lora_on_layers_that_are_fused(model: Path, data: Path, architecture: str) -> None:
    config, fused = FUSED[architecture]
    full = {"architectures": [architecture], **SIZES, **config}
    (model / "config.json").write_text(json.dumps(full))
    made = family_for(full).model(full)
    save_file({spec.name: torch.zeros(spec.shape) for spec in made.hf_tensors()}, model / "model.safetensors")
    for targets in (("all-linear",), (fused,)):
        assert plan(settings(model, data, lora_rank=4, lora_targets=targets)).engine == "plain"
    error = refused(model, data, lora_rank=4, lora_targets=("gate_proj",))
    assert isinstance(error, SettingsError)
    assert f"{architecture} has no layer gate_proj" in str(error)
    assert fused in str(error.hint)
    if "Moe" in architecture:
        error = refused(model, data, lora_rank=4, lora_dora=True)
        assert error.hint == "--lora-targets q_proj,k_proj,v_proj,o_proj"


def test_files_of_rows(model: Path, data: Path) -> None:
    assert "no such file" in str(refused(model, data.with_name("none.jsonl")))
    other = data.with_suffix(".xml")
    other.write_text("a,b\n")
    assert "rows come as .jsonl" in str(refused(model, data, eval_data=(other,)))


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"lora_alpha": 8.0}, "need --lora-rank"),
        ({"lora_rslora": True}, "--lora-rslora, --lora-dora and --qlora need --lora-rank"),
        ({"lora_rank": 2, "lora_dora": True, "engine": "megatron"}, "--lora-dora: the megatron engine has no DoRA"),
        ({"steps": 1, "epochs": 1}, "contradict"),
        ({"engine": "plain", "pp": 2}, "--engine plain has no --pp: it needs megatron"),
        ({"engine": "plain", "nproc": 2}, "--engine plain is one process"),
        ({"engine": "fsdp", "tp": 2}, "--engine fsdp has no --tp"),
        ({"engine": "deepspeed", "pp": 2}, "--engine deepspeed has no --pp"),
        ({"engine": "fsdp", "distributed_optimizer": True}, "has no --distributed-optimizer"),
        ({"zero": 2}, "--zero, --offload and --deepspeed need --engine deepspeed"),
        ({"engine": "fsdp", "offload": "all"}, "need --engine deepspeed"),
        ({"engine": "megatron", "deepspeed": "ds.json"}, "need --engine deepspeed"),
        ({"engine": "deepspeed", "zero": 4}, "--zero: input should be less than or equal to 3"),
        ({"sp": True}, "--sp needs --tp"),
        ({"async_save": True}, "--async-save needs --save-every"),
        ({"engine": "fsdp", "compile": True}, "--compile is for the plain engine"),
        ({"global_batch": 6, "micro_batch": 4}, "is not a multiple"),
        ({"nproc": 3, "tp": 2}, "is not a multiple of tp x cp x pp"),
        ({"min_lr": 1.0}, "is above --lr"),
    ],
)
def test_settings_that_contradict_each_other(more: dict[str, Any], says: str) -> None:
    words = [word for name, value in more.items() for word in _flag(name, value)]
    with pytest.raises(SettingsError, match="") as caught:
        TrainSpec.parse(["--model", "m", "--data", "d.jsonl", "--out", "o", *words])
    assert says in str(caught.value)


def _flag(name: str, value: Any) -> list[str]:
    flag = "--" + name.replace("_", "-")
    if value is True:
        return [flag]
    return [flag, *value] if isinstance(value, tuple) else [flag, str(value)]


def test_a_hugging_face_directory_and_what_needs_megatron(model: Path, data: Path) -> None:
    assert plan(settings(model, data, engine="megatron", pp=2, cp=2)).layout_of_ranks == "tp 1, pp 2, dp 1, cp 2"
    error = refused(model, data, tp=2)
    assert "which the plain engine trains; --tp needs megatron" in str(error)
    assert error.hint == "--engine megatron"
    assert "--ep needs a model with experts" in str(refused(model, data, engine="megatron", ep=2))


def test_megatron_directories_that_cannot_name_themselves(
    tiny_hf: Callable[..., Path], data: Path, tmp_path: Path
) -> None:
    """Known before the first step, because the output names its base."""
    spec = ConvertSpec(model=str(tiny_hf("llama")), to="megatron", out=tmp_path / "m")
    convert_work.work(spec, convert_plan.plan(spec))
    found = plan(settings(tmp_path / "m", data, tp=2, pp=2, nproc=8))
    assert (found.engine, found.layout, found.ranks) == ("megatron", "megatron", 8)
    assert found.layout_of_ranks == "tp 2, pp 2, dp 2"
    error = refused(tmp_path / "m", data, engine="fsdp")
    assert "is a megatron directory, which the fsdp engine does not eat" in str(error)
    assert "--to hf" in str(error.hint)
    assert "--out is the model itself" in str(refused(tmp_path / "m", data, out=tmp_path / "m", overwrite=True))
    manifest = tmp_path / "m" / "mst.json"
    whole = manifest.read_text()
    manifest.write_text(whole.replace('"te"', '"local"'))
    assert "was edited" in str(refused(tmp_path / "m", data))
    manifest.unlink()
    error = refused(tmp_path / "m", data)
    assert "has no mst.json" in str(error)
    assert "--hf-config" in str(error.hint)
    manifest.write_text(whole)
    (tmp_path / "m" / "hf" / "config.json").unlink()
    assert "has no hf/config.json" in str(refused(tmp_path / "m", data))
