"""A user's DeepSpeed configuration beside the flags: what agrees is taken, what contradicts is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from mst_core import deepspeed_json
from mst_core.errors import SettingsError
from mst_core.runspec import RunSpec
from mst_train.spec import TrainSpec


def spec_of(**settings: Any) -> RunSpec:
    fields = {"model": "m", "data": ("d",), "out": "o", "engine": "deepspeed", "nproc": 2, "precision": "fp32"}
    return RunSpec(**{**fields, **settings})


def test_without_a_file_the_flags_say_it_all() -> None:
    found = deepspeed_json.configuration(spec_of(global_batch=16, micro_batch=2, clip_grad=0.5))
    assert found["zero_optimization"] == {"stage": 2}
    assert (found["train_batch_size"], found["train_micro_batch_size_per_gpu"]) == (16, 2)
    assert (found["gradient_accumulation_steps"], found["gradient_clipping"]) == (4, 0.5)
    assert found["bf16"] == {"enabled": False}


@pytest.mark.parametrize(
    ("flags", "zero"),
    [
        ({"zero": 1, "offload": "optimizer"}, {"stage": 1, "offload_optimizer": {"device": "cpu"}}),
        (
            {"zero": 3, "offload": "all"},
            {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
        ),
    ],
)
def test_offload(flags: dict[str, Any], zero: dict[str, Any]) -> None:
    assert deepspeed_json.configuration(spec_of(**flags))["zero_optimization"] == zero


def test_a_users_file_that_agrees(tmp_path: Path) -> None:
    """The usual one, made for transformers' Trainer; NVMe stays as it is."""
    nvme = {"device": "nvme", "nvme_path": "/local"}
    given = {
        "zero_optimization": {"stage": 3, "offload_optimizer": nvme, "reduce_bucket_size": "auto", "sub_group_size": 9},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, 0.95], "eps": 1e-8}},
        "bf16": {"enabled": "auto"},
        "train_batch_size": "auto",
        "gradient_clipping": 1.0,
        "aio": {"block_size": 1048576},
    }
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(given))
    spec = spec_of(deepspeed=path, offload="optimizer")
    found = deepspeed_json.configuration(spec)
    assert found["zero_optimization"] == {"stage": 3, "offload_optimizer": nvme, "sub_group_size": 9}
    assert found["aio"] == given["aio"]
    assert "optimizer" not in found
    assert deepspeed_json.told(spec) == {"zero": 3, "offload_optimizer": "nvme"}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"train_batch_size": 9}, "train_batch_size is 9, the flags make it 8"),
        ({"train_micro_batch_size_per_gpu": 3}, "train_micro_batch_size_per_gpu is 3, the flags make it 1"),
        ({"gradient_accumulation_steps": 1}, "gradient_accumulation_steps is 1, the flags make it 4"),
        ({"gradient_clipping": 0.3}, "gradient_clipping is 0.3, the flags make it 1.0"),
        ({"zero_optimization": {"stage": 3}}, "zero_optimization.stage is 3, --zero is 1"),
        ({"zero_optimization": {"stage": 7}}, "zero_optimization.stage is 7: it takes 0, 1, 2 or 3"),
        ({"zero_optimization": {"zero_quantized_gradients": True}}, "zero_quantized_gradients: mst does not know"),
        ({"zero_optimization": {"offload_optimizer": {"device": "none"}}}, "is on no device, --offload is optimizer"),
        ({"bf16": {"bf16_master_weights_and_grads": True}}, "bf16.bf16_master_weights_and_grads: mst does not"),
        ({"zero_optimization": 3}, "zero_optimization: must hold names and values"),
        ({"bf16": {"enabled": True}}, "bf16.enabled is true, the precision is fp32"),
        ({"fp16": {"enabled": True}}, "fp16 is enabled"),
        ({"optimizer": {"type": "Adam"}}, "optimizer.type is Adam"),
        ({"optimizer": {"params": {"lr": 0.1}}}, "optimizer.params.lr is 0.1, the flags make it 1e-05"),
        ({"optimizer": {"params": {"bias_correction": False}}}, "optimizer.params.bias_correction: mst does not know"),
        ({"scheduler": {"type": "WarmupLR"}}, "scheduler: --lr"),
        ({"activation_checkpointing": {"cpu_checkpointing": True}}, "activation_checkpointing: --recompute full"),
        ({"prescale_gradients": True}, "prescale_gradients: mst does not know"),
    ],
)
def test_what_contradicts_is_named(given: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingsError) as caught:
        deepspeed_json.configuration(spec_of(deepspeed=given, zero=1, offload="optimizer"))
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"zero": 0, "precision": "bf16"}, "was seen to diverge"),
        ({"zero": 2, "offload": "all"}, "which ZeRO 2 does not shard"),
        ({"zero": 0, "offload": "optimizer"}, "--offload needs sharded optimizer state"),
        ({"zero": 3, "lora_rank": 2, "qlora": "nf4"}, "--qlora: ZeRO 3 cuts weights into parts"),
        ({"deepspeed": Path("none.json")}, "none.json: --deepspeed: No such file"),
    ],
)
def test_what_does_not_work_is_refused(flags: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingsError) as caught:
        deepspeed_json.configuration(spec_of(**flags))
    assert says in str(caught.value)


@pytest.mark.parametrize("content", ["[1]", "{", '"x"'])
def test_a_file_that_is_no_configuration(tmp_path: Path, content: str) -> None:
    path = tmp_path / "ds.json"
    path.write_text(content)
    with pytest.raises(SettingsError, match="--deepspeed: "):
        deepspeed_json.configuration(spec_of(deepspeed=path))


def test_in_yaml_it_may_be_nested(tmp_path: Path) -> None:
    nested = {"zero_optimization": {"stage": 1, "reduce_bucket_size": 1000}}
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({"engine": "deepspeed", "nproc": 2, "deepspeed": nested}))
    spec = TrainSpec.parse(["--model", "m", "--data", "d.jsonl", "--out", "o", "--config", str(path)])
    assert deepspeed_json.configuration(spec)["zero_optimization"] == nested["zero_optimization"]
    (tmp_path / "ds.json").write_text(json.dumps(nested))
    path.write_text("engine: deepspeed\nnproc: 2\n")
    words = ["--config", str(path), "--deepspeed", str(tmp_path / "ds.json"), "--zero", "1"]
    spec = TrainSpec.parse(["--model", "m", "--data", "d.jsonl", "--out", "o", *words])
    assert deepspeed_json.configuration(spec)["zero_optimization"] == nested["zero_optimization"]
