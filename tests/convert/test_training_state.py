"""Training state from torch_dist to torch_dist: as the weights it belongs to, or refused by name.

tests/oracle/test_convert_optimizer.py has Megatron itself go on training from it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.convert.test_layouts import convert, make
from torch.distributed.checkpoint import DefaultSavePlanner

from mst_convert import plan as planning
from mst_convert.spec import ConvertSpec
from mst_core import checkpoint, manifest, torch_dist
from mst_core.errors import InputError

STATES = ("exp_avg", "exp_avg_sq", "fp32_param")
COMMON = "common_state/shard_0_1"
ROWS, WIDER, VOCAB = 64, 96, 50


def common(**more: Any) -> dict[str, Any]:
    args = argparse.Namespace(padded_vocab_size=ROWS, num_layers=4)
    return {"iteration": 7, "optimizer": {"step": torch.tensor(7.0)}, "args": args, **more}


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """A per-layer checkpoint of mixtral's local spec with state for every tensor; its hf/ is in it."""
    hf = make(tmp_path / "hf", "mixtral")
    return save(tmp_path / "trained", hf, {COMMON: [common()], "rng_state/shard_0.0_1.1": [b"random"]})


def save(out: Path, hf: Path, objects: Mapping[str, Any], only: str = "", prefix: str = "") -> Path:
    made = convert(
        model=hf, to="megatron", out=out.with_name("made"), spec="local", form="per-layer", vocab_padding=ROWS
    )
    state: dict[str, Any] = dict(objects)
    generator = torch.Generator().manual_seed(2)
    for key, stored in torch_dist.metadata(made).items():
        state[key] = torch_dist.read(stored)
        if key.endswith(("word_embeddings.weight", "output_layer.weight")):
            state[key][VOCAB:] = torch.randn(ROWS - VOCAB, 16, generator=generator)  # padding is trained too
        for name in STATES if only in key else ():
            state[f"{prefix}optimizer.state.{name}.{key}"] = torch.randn(stored.shape, generator=generator)
    planner = DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(state, checkpoint_id=str(out / "iter_0000007"), planner=planner, no_dist=True)
    (out / "latest_checkpointed_iteration.txt").write_text("7\n")
    (out / "hf").mkdir()
    (out / "hf" / "config.json").write_bytes((hf / "config.json").read_bytes())
    return out


def read(directory: Path) -> dict[str, torch.Tensor]:
    return {key: torch_dist.read(stored) for key, stored in torch_dist.metadata(directory).items()}


def same(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    assert [key for key, tensor in first.items() if not torch.equal(tensor, second[key])] == []


def test_state_is_renamed_stacked_and_padded_as_its_parameter(trained: Path, tmp_path: Path) -> None:
    out = convert(model=trained, to="megatron", out=tmp_path / "out", vocab_padding=WIDER, verify="roundtrip")
    before, after = read(trained), read(out)
    assert not (out / "release").exists()
    assert (out / "latest_checkpointed_iteration.txt").read_text() == "7"
    assert len(after) == 10 * (1 + len(STATES))
    for prefix in ("", *(f"optimizer.state.{name}." for name in STATES)):
        embedding = after[f"{prefix}embedding.word_embeddings.weight"]
        assert torch.equal(embedding[:ROWS], before[f"{prefix}embedding.word_embeddings.weight"])
        assert embedding.shape[0] == WIDER
        assert not embedding[ROWS:].any()
        for te, local in {
            "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
            "mlp.router.weight": "",
        }.items():
            layers = [before[f"{prefix}decoder.layers.{i}.{local or te}"] for i in range(4)]
            assert torch.equal(after[f"{prefix}decoder.layers.{te}"], torch.stack(layers))
    encoding = manifest.read(out).encoding
    assert encoding["optimizer"] == list(STATES)
    assert encoding["iteration"] == 7
    assert encoding["vocab_fill"] == "as trained, then zeros"
    report = json.loads((out / "convert.json").read_text())
    assert report["sources"] == len(before)
    assert report["elements"] == report["equal_elements"] == sum(tensor.numel() for tensor in before.values())
    stored = torch_dist.contents(out).objects
    source = torch_dist.contents(trained).objects
    random = "rng_state/shard_0.0_1.1"
    assert torch_dist.object_bytes(stored[random]) == torch_dist.object_bytes(source[random])
    args = torch_dist.common_state(out)["args"].state
    assert args == {"padded_vocab_size": WIDER, "num_layers": 4}
    back = convert(model=out, to="megatron", out=tmp_path / "back", spec="local", form="per-layer", vocab_padding=ROWS)
    same(before, read(back))
    assert torch_dist.common_state(back)["args"].state["padded_vocab_size"] == ROWS


def test_numbered_chains_keep_their_numbers(tmp_path: Path) -> None:
    hf = make(tmp_path / "hf", "mixtral")
    source = save(tmp_path / "trained", hf, {COMMON: [common()]}, prefix="chained_1.")
    out = convert(model=source, to="megatron", out=tmp_path / "out", vocab_padding=ROWS)
    keys = [key for key in read(out) if "optimizer" in key]
    assert len(keys) == 10 * len(STATES)
    assert all(key.startswith("chained_1.optimizer.state.") for key in keys)


def test_the_plan_says_what_goes_along(trained: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"model": str(trained), "to": "megatron", "out": tmp_path / "x", "dry_run": True}
    made = planning.plan(ConvertSpec(**settings))
    assert ("training state", "exp_avg, exp_avg_sq, fp32_param, iteration 7") in made.rows()
    assert made.dtype == "bfloat16"
    assert made.lossless
    left = planning.plan(ConvertSpec(**settings, weights_only=True))
    assert left.tensors_out * 4 == made.tensors_out
    assert not left.training
    assert "training state" in left.left_out[0]


def test_parts_make_the_same_checkpoint(trained: Path, tmp_path: Path) -> None:
    whole = convert(model=trained, to="megatron", out=tmp_path / "whole", max_shard_size=30_000)
    spec: dict[str, Any] = {"model": str(trained), "to": "megatron", "out": tmp_path / "out", "max_shard_size": 30_000}
    from mst_convert import work as working

    for part in ("1/2", "2/2"):
        settings = ConvertSpec(**spec, part=part)
        working.work(settings, planning.plan(settings))
    assert manifest.read(tmp_path / "out").id == manifest.read(whole).id
    assert len(list((whole / "iter_0000007").glob("*.distcp"))) > 4


def test_weights_only_leaves_it_behind(trained: Path, tmp_path: Path) -> None:
    out = convert(model=trained, to="megatron", out=tmp_path / "out", weights_only=True, vocab_padding=ROWS)
    assert (out / "latest_checkpointed_iteration.txt").read_text() == "release"
    assert not [key for key in read(out) if "optimizer" in key]
    assert not read(out)["output_layer.weight"][VOCAB:].any()
    assert (
        manifest.read(out).id
        != manifest.read(convert(model=trained, to="megatron", out=tmp_path / "all", vocab_padding=ROWS)).id
    )


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"to": "hf"}, "from torch_dist to torch_dist only"),
        ({"to": "megatron-legacy"}, "from torch_dist to torch_dist only"),
        ({"to": "megatron", "dtype": "fp32"}, "state of weights in bfloat16"),
    ],
)
def test_what_cannot_hold_it_is_refused(trained: Path, tmp_path: Path, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said) as raised:
        planning.plan(ConvertSpec(model=str(trained), out=tmp_path / "x", **settings))
    assert "--weights-only" in (raised.value.hint or "")


BUCKET = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0.param"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({BUCKET: torch.zeros(3)}, "not by parameter"),
        ({"optimizer.distributed.dp_group_idx_0.param_state/shard_0_1": [None]}, "not by parameter"),
        ({"optimizer.state.exp_avg.decoder.nowhere": torch.zeros(3)}, "nowhere"),
        ({"optimizer.state.momentum.output_layer.weight": torch.zeros(3, 16)}, "momentum"),
        ({COMMON: [{"iteration": 7}]}, "no iteration or no optimizer"),
        ({COMMON: [{"optimizer": {"step": 1}}]}, "no iteration or no optimizer"),
        ({COMMON: None}, "no common state"),
    ],
)
def test_state_that_is_not_by_parameter_is_refused(tmp_path: Path, more: dict[str, Any], said: str) -> None:
    hf = make(tmp_path / "hf", "llama")
    objects = {name: value for name, value in {COMMON: [common()], **more}.items() if value is not None}
    source = save(tmp_path / "trained", hf, objects)
    with pytest.raises(InputError, match=said) as raised:
        planning.plan(ConvertSpec(model=str(source), to="megatron", out=tmp_path / "x"))
    assert "--weights-only" in (raised.value.hint or "")
    assert convert(model=source, to="megatron", out=tmp_path / "weights", weights_only=True)


def test_state_of_some_layers_is_not_stacked(tmp_path: Path) -> None:
    """Frozen layers have none."""
    hf = make(tmp_path / "hf", "llama")
    source = save(tmp_path / "trained", hf, {COMMON: [common()]}, only="layers.2.")
    with pytest.raises(InputError, match=r"exp_avg\.decoder\.layers\..*1 chunks do not fill \[4"):
        planning.plan(ConvertSpec(model=str(source), to="megatron", out=tmp_path / "x"))
    out = convert(model=source, to="megatron", out=tmp_path / "out", form="per-layer", vocab_padding=ROWS)
    assert len([key for key in read(out) if "exp_avg." in key]) == 6


def test_the_common_state_of_older_megatron_is_a_file(tmp_path: Path) -> None:
    hf = make(tmp_path / "hf", "llama")
    source = save(tmp_path / "trained", hf, {"rng_state/shard_0.0_1.1": [b"random"]})
    content = {"non_homogeneous_layers": True}
    torch.save(common(content_metadata=content), source / "iter_0000007" / "common.pt")
    out = convert(model=source, to="megatron", out=tmp_path / "out", vocab_padding=WIDER)
    assert COMMON not in torch_dist.contents(out).objects
    made = torch.load(out / "iter_0000007" / "common.pt", weights_only=False)
    assert made["content_metadata"] == {"non_homogeneous_layers": False}
    assert made["optimizer"] == {"step": torch.tensor(7.0)}
    assert vars(made["args"]) == {"padded_vocab_size": WIDER, "num_layers": 4}
    assert checkpoint.verify(out) == []
