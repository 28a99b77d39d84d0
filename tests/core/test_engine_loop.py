"""The trainer on the plain engine: one step is one step however it is cut, nothing dropped, the same twice."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from mst_align.methods import choose
from mst_align.pairs import objective as of_pairs
from mst_core import checkpoint
from mst_core.data.render import Sample
from mst_core.engine import loop
from mst_core.engine.hf import token_logp
from mst_core.engine.plain import PlainEngine
from mst_core.engine.seam import Batch, Objective, Term
from mst_core.errors import RunError
from mst_core.runspec import RunSpec
from mst_train.objective import SFT

DPO = of_pairs(choose("dpo", {"beta": 0.1}))


def spec_of(**options: Any) -> RunSpec:
    base = {"model": "m", "data": ("d",), "out": "o", "precision": "fp32", "lr": 1e-3, "global_batch": 4, "seed": 3}
    return RunSpec(**{**base, **options})


def units_of(count: int, rows: int = 1) -> list[loop.Unit]:
    """Random rows of different lengths, the first four tokens of each unit a prompt."""
    generator = torch.Generator().manual_seed(11)

    def tokens(number: int) -> list[int]:
        return torch.randint(3, 330, (number,), generator=generator).tolist()

    units = []
    for index in range(count):
        prompt = tokens(4)
        bodies = [tokens(2 + (5 * index + 3 * row) % 9) for row in range(rows)]
        units.append(tuple(Sample(prompt + body, [0] * 4 + [1] * len(body)) for body in bodies))
    return units


@pytest.fixture(scope="module")
def model(tiny_hf: Callable[..., Path]) -> Path:
    return tiny_hf("llama", num_hidden_layers=2)


@pytest.fixture
def staging(tmp_path: Path) -> Iterator[checkpoint.Staging]:
    with checkpoint.stage(tmp_path / "out") as made:
        yield made


def gradients(engine: PlainEngine) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for _, p in engine.trained if p.grad is not None])


@pytest.mark.parametrize("objective", [SFT, DPO], ids=lambda o: o.name)
def test_gradients_do_not_depend_on_micro_batches(model: Path, objective: Objective) -> None:
    """Sums and weights, not means of means: the rows have different lengths. 7 rows: the last one is smaller."""
    units = units_of(7, objective.rows)
    found = []
    for micro in (1, 2, 4):
        spec = spec_of(micro_batch=micro, clip_grad=0.0)
        engine = PlainEngine(spec, model)
        references = loop.refer(engine, objective, units, (), spec).logp_NR if objective.reference else None
        batches = loop.micro_batches(units, engine, spec, references)
        assert len(batches) == -(-7 // micro)
        values = engine.step(batches, objective, spec.lr)
        found.append((values["loss"], gradients(engine)))
    for loss, gradient in found[1:]:
        assert loss == pytest.approx(found[0][0], abs=1e-6)
        torch.testing.assert_close(gradient, found[0][1], atol=1e-6, rtol=1e-4)


class Watched(PlainEngine):
    """What it is asked to score, and to learn."""

    def __init__(self, spec: RunSpec, model_dir: Path) -> None:
        super().__init__(spec, model_dir)
        self.scored: list[Batch] = []
        self.learnt: list[Batch] = []

    def score(self, batch: Batch, *, reference: bool = False) -> torch.Tensor:
        self.scored.append(batch)
        return super().score(batch, reference=reference)

    def step(self, micro_batches: Sequence[Batch], objective: Objective, lr: float) -> dict[str, float]:
        self.learnt += micro_batches
        return super().step(micro_batches, objective, lr)


@pytest.mark.parametrize("lora", [None, 4])
def test_the_reference_is_scored_once_as_the_first_epoch_meets_it(
    model: Path, staging: checkpoint.Staging, lora: int | None
) -> None:
    """In the same micro-batches, so that the first step's ratios are exactly 0, not some roundings of it."""
    spec = spec_of(micro_batch=2, steps=5, lora_rank=lora, warmup=0)
    engine = Watched(spec, model)
    done = loop.fit(engine, DPO, units_of(7, 2), spec, staging)
    assert len(engine.scored) == 4  # 7 pairs, in steps of 4 and 3
    for scored, learnt in zip(engine.scored, engine.learnt, strict=False):
        assert torch.equal(scored.tokens_BT, learnt.tokens_BT)
    assert (done.first["rewards/margin"], done.first["rewards/chosen"]) == (0.0, 0.0)
    assert done.first["loss"] == float(torch.tensor(2.0).log())


def test_only_rows_that_are_met_are_scored(model: Path, staging: checkpoint.Staging) -> None:
    spec = spec_of(steps=1)
    engine = Watched(spec, model)
    loop.fit(engine, DPO, units_of(7, 2), spec, staging)
    assert len(engine.scored) == 4


def test_filling_up_changes_nothing(model: Path) -> None:
    """The step over both ranks' shares, the empty one included, is the step over the rows."""
    units, spec = units_of(3), spec_of(clip_grad=0.0)
    engine = PlainEngine(spec, model)
    alone = engine.step(loop.micro_batches(units, engine, spec, None), SFT, spec.lr)
    other = PlainEngine(spec, model)
    other.dp_size = 2
    both: list[Batch] = []
    for other.dp_rank in range(2):
        both += loop.micro_batches(units, other, spec, None)
    filled = other.step(both, SFT, spec.lr)
    assert len(both) == 4
    assert filled["loss"] == pytest.approx(alone["loss"], abs=1e-6)
    torch.testing.assert_close(gradients(other), gradients(engine), atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("lora", [None, 4])
def test_dpo_starts_at_ln_2(model: Path, staging: checkpoint.Staging, lora: int | None) -> None:
    """The reference is the model before its first step, or with its adapter off."""
    spec = spec_of(lora_rank=lora, micro_batch=2, steps=3, warmup=0)
    done = loop.fit(PlainEngine(spec, model), DPO, units_of(4, 2), spec, staging)
    assert done.first["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert done.last["loss"] < done.first["loss"]
    assert done.last["rewards/margin"] > 0


def test_the_adapter_off_is_the_base(model: Path) -> None:
    spec = spec_of(lora_rank=4)
    engine, base = PlainEngine(spec, model), PlainEngine(spec_of(), model)
    batch = loop._collate(units_of(3), None)
    before = base.score(batch)
    torch.testing.assert_close(engine.score(batch), before, atol=0, rtol=0)
    engine.step([batch], SFT, 1e-2)
    torch.testing.assert_close(engine.score(batch, reference=True), before, atol=0, rtol=0)
    assert not torch.allclose(engine.score(batch), before)


def test_a_run_is_the_same_twice_and_learns(model: Path, tmp_path: Path) -> None:
    spec = spec_of(epochs=2.5, micro_batch=2, eval_every=3)
    units, held_out = units_of(6), units_of(9)[6:]
    found = []
    for name in ("one", "two"):
        with checkpoint.stage(tmp_path / name) as staging:
            engine = PlainEngine(spec, model)
            done = loop.fit(engine, SFT, units, spec, staging, held_out)
            found.append((done, torch.cat([p.flatten() for _, p in engine.trained])))
    (one, weights), (two, others) = found
    assert one.steps == 5  # 2.5 epochs of two batches (4 and 2 rows)
    assert one.last["loss"] < one.first["loss"]
    assert torch.equal(weights, others)
    assert one.evaluation == two.evaluation


def test_evaluation_is_over_tokens_not_over_batches(model: Path) -> None:
    """The mean over all learnt tokens, by transformers' own logits, whatever the micro-batch."""
    units = units_of(5)
    engine = PlainEngine(spec_of(), model)
    total, count = 0.0, 0
    for (sample,) in units:
        tokens_BT = torch.tensor([sample.tokens])
        with torch.no_grad():
            logp_BT = token_logp(engine.model(input_ids=tokens_BT).logits, tokens_BT)
        total -= float((logp_BT * torch.tensor([sample.mask])).sum())
        count += sample.learnt
    for micro in (1, 2, 4):
        found = loop.evaluate(engine, SFT, units, spec_of(micro_batch=micro), None)
        assert found["loss"] == found["nll"] == pytest.approx(total / count, abs=1e-5)


def test_a_step_that_is_not_finite_leaves_the_weights(model: Path) -> None:
    engine = PlainEngine(spec_of(), model)
    before = [p.detach().clone() for _, p in engine.trained]

    def broken(logp_BT: torch.Tensor, batch: Batch) -> dict[str, Term]:
        return {"nll": Term(logp_BT.sum() * math.nan, 1.0)}

    with pytest.raises(RunError, match="step 1: loss nan"):
        engine.step([loop._collate(units_of(2), None)], Objective("broken", broken), 1e-3)
    assert all(torch.equal(a, p) for a, (_, p) in zip(before, engine.trained, strict=True))
