"""The rooms of the trainer: schedule, LoRA's start, micro-batches, metrics, the loop on a real engine."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mst_align.methods import choose
from mst_align.pairs import objective as of_pairs
from mst_core.checkpoint import stage
from mst_core.data.render import Sample
from mst_core.engine import loop, lora, metrics, schedule
from mst_core.engine.plain import PlainEngine
from mst_core.engine.seam import Batch, Objective, weights
from mst_core.errors import Stopped
from mst_core.runspec import RunSpec
from mst_train.objective import SFT


def spec_of(**settings: Any) -> RunSpec:
    fields = {"precision": "fp32", "lr": 1e-3, **settings}
    return RunSpec(model="m", data=(Path("d"),), out=Path("o"), **fields)


def units_of(count: int, rows: int = 1, seed: int = 0) -> list[loop.Unit]:
    generator = torch.Generator().manual_seed(seed)

    def sample() -> Sample:
        length = int(torch.randint(6, 14, (1,), generator=generator))
        tokens = torch.randint(3, 330, (length,), generator=generator).tolist()
        return Sample(tokens, [0, 0, 0] + [1] * (length - 3))

    return [tuple(sample() for _ in range(rows)) for _ in range(count)]


def rates(steps: int, **settings: Any) -> list[float]:
    fields: dict[str, Any] = {"peak": 1.0, "floor": 0.0, "warmup": 0, "schedule": "cosine", **settings}
    return [schedule.lr(step, steps=steps, **fields) for step in range(steps)]


def test_the_rate_rises_to_the_peak_and_falls_and_no_step_is_wasted_at_zero() -> None:
    found = rates(10, warmup=4)
    assert found[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert found[5:] == sorted(found[5:], reverse=True)
    assert min(found) > 0
    # Half-way between warmup and end the cosine is at half of the peak.
    assert found[7] == pytest.approx(0.5)
    assert rates(1, warmup=1) == [1.0]
    assert rates(3, schedule="constant", warmup=2) == [0.5, 1.0, 1.0]
    assert min(rates(50, floor=0.3)) >= 0.3
    assert [schedule.warmup_steps(steps, 0.03) for steps in (1, 33, 34, 100)] == [1, 1, 2, 3]
    assert schedule.warmup_steps(100, 0.0) == 0


def test_steps_of_epochs_drop_nothing() -> None:
    assert spec_of(global_batch=8).total_steps(17) == 3
    assert spec_of(global_batch=8, epochs=2).total_steps(16) == 4
    assert spec_of(global_batch=8, epochs=0.5).total_steps(32) == 2
    assert spec_of(global_batch=8, epochs=0.01).total_steps(8) == 1
    assert spec_of(steps=7).total_steps(1) == 7


def test_lora_starts_the_same_wherever_it_starts() -> None:
    first = lora.lora_init(3, "model.layers.0.self_attn.q_proj", 4, 64)
    torch.randn(7)  # the global generator has no say
    assert torch.equal(first, lora.lora_init(3, "model.layers.0.self_attn.q_proj", 4, 64))
    assert not torch.equal(first, lora.lora_init(3, "model.layers.1.self_attn.q_proj", 4, 64))
    assert not torch.equal(first, lora.lora_init(4, "model.layers.0.self_attn.q_proj", 4, 64))
    assert (first.dtype, first.shape) == (torch.float32, (4, 64))
    # kaiming_uniform_(a=sqrt(5)): uniform within 1 / sqrt(in_features)
    many = lora.lora_init(0, "x", 64, 256)
    assert many.abs().max() <= 1 / 16
    assert many.std() == pytest.approx(1 / 16 / 3**0.5, rel=0.02)
    # Golden: another value means that adapters of older versions cannot be made again.
    assert first[0, :3].tolist() == pytest.approx(GOLDEN, abs=1e-7)


GOLDEN = [0.0894776, 0.10215311, -0.02869478]


def test_the_scale_of_lora() -> None:
    assert (spec_of(lora_rank=4).alpha, spec_of(lora_rank=4).lora_scale) == (8, 2)
    assert spec_of(lora_rank=4, lora_alpha=12.0).lora_scale == 3
    assert spec_of(lora_rank=4, lora_alpha=12.0, lora_rslora=True).lora_scale == 6
    flags = ["--model", "m", "--data", "d", "--out", "o", "--lora-rank", "16", "--use-rslora", "--lora-alpha", "2"]
    assert RunSpec.parse(flags).lora_scale == 0.5


@pytest.mark.parametrize("dp", [1, 2, 3])
@pytest.mark.parametrize("rows", [1, 2])
def test_micro_batches_cover_a_global_batch_once_and_split_no_pair(dp: int, rows: int) -> None:
    units = units_of(7, rows)
    spec = spec_of(micro_batch=2, global_batch=12, nproc=dp)
    references = torch.arange(7.0).unsqueeze(1).expand(7, rows)
    seen: list[list[int]] = []
    found: list[float] = []
    counts = set()
    for rank in range(dp):
        batches = loop.micro_batches(units, SimpleNamespace(dp_rank=rank, dp_size=dp), spec, references)  # type: ignore[arg-type]
        counts.add(len(batches))
        for batch in batches:
            assert len(batch.tokens_BT) % rows == 0
            for row in range(len(batch.tokens_BT)):
                if batch.mask_BT[row].any():
                    seen.append(batch.tokens_BT[row, : batch.lengths_B[row]].tolist())
                    found.append(float(batch.extra["ref_logp_B"][row]))
    assert len(counts) == 1  # every rank takes part in as many passes
    assert sorted(seen) == sorted(sample.tokens for unit in units for sample in unit)
    assert sorted(found) == sorted(float(i) for i in range(7) for _ in range(rows))


def test_what_fills_up_a_rank_weighs_nothing() -> None:
    units = units_of(1)
    empty = SimpleNamespace(dp_rank=1, dp_size=2)
    filled = loop.micro_batches(units, empty, spec_of(global_batch=8, nproc=2), None)  # type: ignore[arg-type]
    assert weights(SFT, filled) == {"nll": 0.0}


@pytest.fixture(scope="module")
def model(tiny_hf: Callable[..., Path]) -> Path:
    return tiny_hf("llama")


class Watched(PlainEngine):
    """The real engine, and what it was given."""

    def __init__(self, spec: RunSpec, model_dir: Path) -> None:
        super().__init__(spec, model_dir)
        self.given: list[list[Batch]] = []
        self.rates: list[float] = []
        self.kill_at = -1

    def step(self, micro_batches: Sequence[Batch], objective: Objective, lr: float) -> dict[str, float]:
        self.given.append(list(micro_batches))
        self.rates.append(lr)
        if len(self.given) == self.kill_at:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().step(micro_batches, objective, lr)


def test_an_epoch_sees_each_row_once_in_a_seeded_order(model: Path) -> None:
    units = units_of(10)
    wanted = sorted(sample.tokens for unit in units for sample in unit)
    orders = []
    for seed in (0, 0, 1):
        spec = spec_of(global_batch=4, micro_batch=2, epochs=2, seed=seed)
        engine = Watched(spec, model)
        done = loop.fit(engine, SFT, units, spec, None)
        sizes = [sum(len(batch.tokens_BT) for batch in step) for step in engine.given]
        assert sizes == [4, 4, 2, 4, 4, 2]
        order = [
            batch.tokens_BT[row, : batch.lengths_B[row]].tolist()
            for step in engine.given
            for batch in step
            for row in range(len(batch.tokens_BT))
        ]
        assert sorted(order[:10]) == sorted(order[10:]) == wanted
        assert order[:10] != order[10:]
        assert done.tokens == 2 * sum(map(len, wanted))
        orders.append(order)
    assert orders[0] == orders[1] != orders[2]


def test_a_run_writes_its_metrics_and_its_plot(model: Path, tmp_path: Path) -> None:
    from PIL import Image
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    spec = spec_of(global_batch=4, steps=5, log_every=3, eval_every=2)
    pairs = units_of(8, 2)
    with stage(tmp_path / "out") as staging:
        done = loop.fit(
            PlainEngine(spec, model),
            of_pairs(choose("dpo", {"beta": 0.1})),
            pairs,
            spec,
            staging,
            units_of(3, 2, seed=1),
        )
        rows = [json.loads(line) for line in (staging.path / "metrics.jsonl").read_text().splitlines()]
        board = EventAccumulator(str(staging.path / "tensorboard")).Reload()
        for name, panels in (("loss.png", 1), ("rewards.png", 3)):
            with Image.open(staging.path / name) as image:
                image.load()
                assert image.size == (840, pytest.approx(120 * (0.6 + 2.6 * panels), abs=2))
        attached = set(staging._attachments)
    # Logged: every third step, each evaluation, the last.
    assert [row["step"] for row in rows] == [0, 1, 2, 4, 5]
    assert [row["step"] for row in rows if "eval/loss" in row] == [0, 2, 4, 5]
    assert (rows[0]["eval/loss"], rows[0]["eval/rewards/accuracy"]) == (pytest.approx(math.log(2), abs=1e-6), 0.0)
    assert {"loss", "lr", "grad_norm", "tokens_per_s", "rewards/margin", "eval/rewards/accuracy"} <= rows[-1].keys()
    assert rows[-1]["eval/loss"] == done.evaluation["loss"]
    assert [event.step for event in board.Scalars("loss")] == [1, 2, 4, 5]
    assert board.Scalars("loss")[-1].value == pytest.approx(rows[-1]["loss"])
    assert {"metrics.jsonl", "loss.png", "rewards.png"} < attached
    assert any(name.startswith("tensorboard/") for name in attached)


def test_what_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of KTO rewards and divergence alone: 240 steps under means of four, and the evaluations as they are."""
    from matplotlib import pyplot

    kept: list[Any] = []
    monkeypatch.setattr(pyplot, "close", kept.append)
    rows = [{"step": step, "loss": 1.0, "rewards/chosen": step % 4, "kl": 0.0} for step in range(1, 241)]
    metrics.draw(
        [{"step": 0, "eval/rewards/rejected": -1.0}, *rows, {"step": 240, "eval/rewards/rejected": -2.0}], tmp_path
    )
    loss, rewards = kept
    assert [axis.get_ylabel() for axis in loss.axes + rewards.axes] == ["loss", "reward", "KL (z)"]
    raw, mean, measured = rewards.axes[0].lines
    assert list(raw.get_ydata()) == [row["rewards/chosen"] for row in rows]
    assert list(mean.get_ydata()) == pytest.approx([1, 1.5, 2, *[1.5] * 237])
    assert (list(measured.get_xdata()), list(measured.get_ydata())) == ([0, 240], [-1, -2])
    assert measured.get_color() != raw.get_color() == mean.get_color()
    monkeypatch.undo()
    for figure in kept:
        pyplot.close(figure)
    (tmp_path / "sft").mkdir()
    metrics.draw([{"step": 1, "loss": 1.0}], tmp_path / "sft")
    assert [path.name for path in (tmp_path / "sft").iterdir()] == ["loss.png"]


def test_an_evaluation_is_one_mean_over_all_its_rows(model: Path) -> None:
    units = units_of(5)
    found = [
        loop.evaluate(PlainEngine(spec_of(micro_batch=size, global_batch=12), model), SFT, units, spec_of(
            micro_batch=size, global_batch=12), None)["loss"]
        for size in (1, 2, 3)
    ]  # fmt: skip
    assert found == pytest.approx([found[0]] * 3, abs=1e-6)


def test_sigterm_stops_after_the_step_and_leaves_nothing(model: Path, tmp_path: Path) -> None:
    spec = spec_of(global_batch=4, steps=50)
    engine = Watched(spec, model)
    engine.kill_at = 2
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Stopped, match="after step 2 of 50"), stage(tmp_path / "out") as staging:
        loop.fit(engine, SFT, units_of(8), spec, staging)
    assert len(engine.given) == 2
    assert signal.getsignal(signal.SIGTERM) == before
    assert list(tmp_path.iterdir()) == []
