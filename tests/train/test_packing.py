"""Packed rows: samples kept apart exactly, so that losses and gradients are those of the samples alone."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mst_core import manifest
from mst_core.data import load, pack
from mst_core.data.render import Sample
from mst_core.data.sources import Source
from mst_core.engine import loop
from mst_core.engine.batches import Singles, collate, positions
from mst_core.engine.plain import PlainEngine
from mst_core.errors import InputError, RowError, SettingsError
from mst_core.runspec import RunSpec
from mst_train.objective import CPT, SFT
from mst_train.plan import plan
from mst_train.spec import TrainSpec
from mst_train.work import work


def samples_of(count: int, longest: int = 20) -> list[Sample]:
    draw = random.Random(5)
    made = []
    for _ in range(count):
        length = draw.randint(3, longest)
        prompt = draw.randint(1, length - 1)
        made.append(Sample([draw.randint(3, 120) for _ in range(length)], [0] * prompt + [1] * (length - prompt)))
    return made


@pytest.mark.parametrize("window", [7, 1024])
def test_every_sample_stands_in_one_row(window: int) -> None:
    lengths = [len(sample.tokens) for sample in samples_of(300)]
    rows = pack.bins(lengths, 64, seed=2, window=window)
    assert sorted(index for row in rows for index in row) == list(range(300))
    assert all(sum(lengths[index] for index in row) <= 64 for row in rows)
    assert rows == pack.bins(lengths, 64, seed=2, window=window) != pack.bins(lengths, 64, seed=3, window=window)
    if window > 300:
        assert len(rows) <= 1.03 * sum(lengths) / 64 + 1


def test_first_fit_decreasing_by_hand() -> None:
    lengths = [4, 8, 1, 4, 2, 1]  # decreasing into rows of 10: 8+2, 4+4+1+1
    found = sorted(sorted(lengths[index] for index in row) for row in pack.bins(lengths, 10, seed=0))
    assert found == [[1, 1, 4, 4], [2, 8]]


def test_a_packed_batch_says_where_its_samples_are() -> None:
    samples = [Sample([5, 6, 7], [1, 1, 1]), Sample([8, 9], [0, 1]), Sample([3], [0]), Sample([4, 4], [1, 0])]
    batch = collate(list(pack.Packed(samples, [[0, 1], [2, 3, 2]])), pad_id=1)
    assert batch.packed == ((3, 2), (1, 2, 1))
    assert batch.tokens_BT.tolist() == [[5, 6, 7, 8, 9], [3, 4, 4, 3, 1]]
    assert batch.mask_BT.tolist() == [[0, 1, 1, 0, 1], [0, 0, 0, 0, 0]]  # no first token is learnt
    assert positions(batch).tolist() == [[0, 1, 2, 0, 1], [0, 0, 1, 0, 0]]
    assert batch.lengths_B.tolist() == [sum(row) for row in batch.packed]
    assert collate(samples).packed is None


DIMS: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "vocab_size": 130, "initializer_range": 0.1,
    "tie_word_embeddings": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2, windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "mistral, window": ("mistral", {"head_dim": 32, "sliding_window": 6}),
    "phi3, window": ("phi3", {"sliding_window": 7}),
    "glm4": ("glm4", {"head_dim": 32}),
    "gemma2, its own attention": ("gemma2", {"head_dim": 32, "sliding_window": 5}),
    "gemma3, windows": ("gemma3_text", {"head_dim": 32, "sliding_window": 5}),
}


def spec_of(**options: Any) -> RunSpec:
    base = {"model": "m", "data": ("d",), "out": "o", "precision": "fp32", "lr": 1e-3, "clip_grad": 0.0}
    return RunSpec(**{**base, **options})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A tiny model of a type, its parameters away from their start."""

    def make(kind: str, dims: dict[str, Any], **more: Any) -> Path:
        from transformers import AutoConfig, AutoModelForCausalLM

        folder = tmp_path_factory.mktemp("packed")
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**DIMS, **dims, **more}))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape) * 0.1)
        model.save_pretrained(folder)
        return folder

    return make


def stepped(model: Path, rows: list[Any], micro: int, **options: Any) -> tuple[dict[str, float], torch.Tensor]:
    options["packing"] = any(row.parts for row in rows)
    spec = spec_of(micro_batch=micro, global_batch=len(rows) + -len(rows) % micro, **options)
    engine = PlainEngine(spec, model)
    values = engine.step(loop.micro_batches([(row,) for row in rows], engine, spec, None), SFT, 1e-3)
    return values, torch.cat([p.grad.flatten() for _, p in engine.trained if p.grad is not None])


@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients_are_those_of_the_samples_alone(made: Callable[..., Path], name: str) -> None:
    kind, dims = MODELS[name]
    model = made(kind, dims)
    samples = samples_of(9)
    rows = list(pack.Packed(samples, pack.bins([len(sample.tokens) for sample in samples], 48, seed=1)))
    assert 1 < len(rows) < 6
    alone, gradient = stepped(model, samples, 1)
    scale = float(gradient.abs().max())
    for micro in (1, 2):
        values, found = stepped(model, rows, micro)
        assert values["loss"] == pytest.approx(alone["loss"], abs=1e-5)
        torch.testing.assert_close(found / scale, gradient / scale, atol=1e-5, rtol=0)
    # The test can fail: the same rows without their borders are another loss.
    mixed, _ = stepped(model, [replace(row, parts=()) for row in rows], 1)
    assert abs(mixed["loss"] - alone["loss"]) > 1e-3


def test_logp_of_each_sample_is_its_own_and_0_at_its_first_token(made: Callable[..., Path]) -> None:
    engine = PlainEngine(spec_of(lora_rank=2, packing=True), made("llama", {}))
    samples = samples_of(4)
    (row,) = pack.Packed(samples, [[2, 0, 3, 1]])
    for reference in (False, True):
        (packed_T,) = engine.score(collate([row]), reference=reference)
        for part_T, index in zip(packed_T.split(row.parts), (2, 0, 3, 1), strict=True):
            (alone_T,) = engine.score(collate([samples[index]]), reference=reference)
            assert part_T[0] == 0
            torch.testing.assert_close(part_T, alone_T, atol=1e-5, rtol=0)


def test_a_model_with_a_state_along_the_row_is_refused(made: Callable[..., Path]) -> None:
    """LFM2's short convolutions run over the borders, whatever the positions say."""
    model = made("lfm2", {"layer_types": ["conv", "full_attention", "conv"]})
    assert stepped(model, samples_of(2), 1)[0]["loss"] > 0
    with pytest.raises(InputError, match="does not keep packed samples apart"):
        stepped(model, list(pack.Packed(samples_of(2), [[0, 1]])), 1)


def test_a_source_with_a_share_is_packed_apart() -> None:
    found = load.Loaded(samples_of(60))
    found.counts = [(Source("a", (), weight=1.0), 40), (Source("b", (), weight=3.0), 20)]
    said = found.pack(64, seed=0)
    (_, first), (_, second) = found.counts
    assert isinstance(found.samples, pack.Packed)
    assert {index for row in found.samples.bins[:first] for index in row} == set(range(40))
    assert first + second == len(found.samples)
    order = found.order(0, 30)  # about as many packed rows as hold 30 samples
    assert order.size == round(30 * len(found.samples) / 60)
    assert order.quotas()[1] == pytest.approx(0.75 * order.size, abs=0.5)
    assert f"60 samples packed into {len(found.samples)} rows of 64 tokens" in said
    with pytest.raises(SettingsError):
        TrainSpec.parse(["--model", "m", "--data", "d", "--out", "o", "--pakcing"])


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"Is number {i} odd?", "completion": "yes" if i % 2 else "no"} for i in range(12)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def train(model: Path, data: Path, out: Path, **settings: Any) -> dict[str, Any]:
    fields = {"global_batch": 64, "lr": 3e-3, "precision": "fp32", "seq_length": 200, "warmup": 0, **settings}
    spec = TrainSpec(model=str(model), data=(data,), out=out, **fields)
    return work(spec, plan(spec)).data


@pytest.mark.parametrize("stage", ["sft", "cpt"])
def test_a_packed_run_is_the_run(
    tiny_hf: Callable[..., Path], data: Path, tmp_path: Path, stage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """All samples in one step: the same losses, in fewer rows; evaluation rows are packed too."""
    if stage == "cpt":
        data.write_text(
            "".join(json.dumps({"text": f"The fox number {i} jumps. " * (i % 4 + 1)}) + "\n" for i in range(12))
        )
    model = tiny_hf("llama")
    alone = train(model, data, tmp_path / "alone", steps=3, stage=stage, eval_data=(data,))
    assert "packed" not in capsys.readouterr().err
    more = {"packing": True, "micro_batch": 2, "eval_data": (data,)}
    packed = train(model, data, tmp_path / "packed", steps=3, stage=stage, **more)
    assert capsys.readouterr().err.count("samples packed into") == 2
    assert packed["eval/loss"] == pytest.approx(alone["eval/loss"], abs=1e-4)
    assert packed["rows"] < alone["rows"] / 2
    assert packed["first_loss"] == pytest.approx(alone["first_loss"], abs=1e-5)
    assert packed["loss"] == pytest.approx(alone["loss"], abs=1e-4)
    assert packed["id"] != alone["id"]
    settings = manifest.read(tmp_path / "packed").made_by
    assert settings is not None
    assert settings.settings["packing"] is True


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["fsdp", "deepspeed"])
def test_packed_rows_on_two_ranks(tiny_hf: Callable[..., Path], data: Path, tmp_path: Path, engine: str) -> None:
    model, settings = tiny_hf("llama"), {"packing": True, "steps": 2, "global_batch": 2}
    alone = train(model, data, tmp_path / "alone", **settings)
    ranks = train(model, data, tmp_path / "ranks", **settings, engine=engine, nproc=2)
    for name in ("first_loss", "loss"):
        assert ranks[name] == pytest.approx(alone[name], abs=1e-5)


def test_refused_before_a_step(tiny_hf: Callable[..., Path], mst: Any, data: Path, tmp_path: Path) -> None:
    with pytest.raises(RowError, match="--seq-length is 8"):
        train(tiny_hf("llama"), data, tmp_path / "out", packing=True, seq_length=8)
    mst("mst-convert", "--model", tiny_hf("llama"), "--to", "megatron", "--out", tmp_path / "megatron")
    with pytest.raises(SettingsError, match="not there yet for context parallel ranks"):
        train(tmp_path / "megatron", data, tmp_path / "out", packing=True, cp=2)
    ours = train(tmp_path / "megatron", data, tmp_path / "ours", packing=True, steps=3)
    plain = train(tiny_hf("llama"), data, tmp_path / "plain", packing=True, steps=3)
    assert ours["loss"] == pytest.approx(plain["loss"], abs=1e-5)
    assert ours["first_loss"] == pytest.approx(plain["first_loss"], abs=1e-5)


def test_units_are_made_when_they_are_asked_for() -> None:
    units = Singles(samples_of(5))
    assert [unit[0] for unit in units] == samples_of(5)
    assert list(units[1:3]) == [(sample,) for sample in samples_of(5)[1:3]]
    assert CPT.rows == 1
