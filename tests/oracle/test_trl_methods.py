"""Each method against TRL: the same rows through TRL's own trainers, loss and gradient norm of the first step.

The policy is not the reference, so that no first loss is a constant of its formula. Where TRL's definition is another
one, both numbers stand here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mst_align import pairs, rewards, unpaired
from mst_align.methods import choose
from mst_align.plan import plan
from mst_align.spec import AlignSpec
from mst_align.work import work
from mst_core.data import shapes
from mst_core.data.order import Order
from mst_core.data.render import load_tokenizer
from mst_core.engine import loop
from mst_core.engine.plain import PlainEngine
from mst_core.engine.seam import Objective
from mst_core.runspec import RunSpec
from tests.oracle.test_trl import NO, PAIR_ROWS, TEMPLATE, YES, each, history, load, renderer, says, settings, user

JUDGED_ROWS = [
    {"prompt": user(i), "completion": says((YES, NO)[i % 2] + "!" * i), "label": i % 3 != 0} for i in range(8)
]


@pytest.fixture(scope="module")
def model(tiny_hf: Callable[..., Path]) -> Path:
    return tiny_hf("llama", template=TEMPLATE)


@pytest.fixture(scope="module")
def reference(tiny_hf: Callable[..., Path]) -> Path:
    return tiny_hf("llama", template=TEMPLATE, seed=1)


class Stands(Order):
    """The rows as they stand."""

    def epoch(self, number: int) -> list[int]:
        return list(range(self.count))


def spec_of(model: Path) -> RunSpec:
    return RunSpec(
        model=str(model), data=(Path("d"),), out=Path("o"), precision="fp32", micro_batch=8, global_batch=8,
        seq_length=256,
    )  # fmt: skip


def first_step(model: Path, reference: Path, objective: Objective, units: list[loop.Unit]) -> dict[str, float]:
    """One step of mst on all rows at once."""
    spec, ref = spec_of(model), PlainEngine(spec_of(reference), reference)
    engine = PlainEngine(spec, model)
    found = loop.refer(ref, objective, units, (), spec, Stands(len(units), 0))
    divergence = loop._divergence(engine, units, found.totals, spec, Stands(len(units), 0))
    batches = loop.micro_batches(units, engine, spec, found.logp_NR, divergence.of(0) if divergence else None)
    return engine.step(batches, objective, spec.lr)


def at_once(folder: Path) -> dict[str, Any]:
    """TRL's arguments for one step of all eight rows in one batch, as its definitions are per batch."""
    return settings(folder) | {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "max_steps": 1}


def of_pairs(model: Path, given: list[dict[str, Any]] = PAIR_ROWS) -> list[loop.Unit]:
    make = renderer(model)
    return [make.pair(shapes.pair(row), row.where) for row in each(given)]


DPO: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sigmoid": ({"loss": "sigmoid"}, {"loss_type": ["sigmoid"]}),
    "hinge": ({"loss": "hinge"}, {"loss_type": ["hinge"]}),
    "ipo": ({"loss": "ipo"}, {"loss_type": ["ipo"]}),
    "robust": ({"loss": "robust", "label_smoothing": 0.2}, {"loss_type": ["robust"], "label_smoothing": 0.2}),
    "sigmoid-norm": ({"loss": "sigmoid-norm"}, {"loss_type": ["sigmoid_norm"]}),
    "apo-zero": ({"loss": "apo-zero"}, {"loss_type": ["apo_zero"]}),
    "apo-down": ({"loss": "apo-down"}, {"loss_type": ["apo_down"]}),
    "bco": ({"loss": "bco"}, {"loss_type": ["bco_pair"]}),
    "rpo": ({"sft_weight": 0.5}, {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]}),
    "ld": ({"ld_alpha": 0.3}, {"ld_alpha": 0.3}),
}


@pytest.mark.parametrize("name", DPO)
def test_the_losses_of_dpo(model: Path, reference: Path, tmp_path: Path, name: str) -> None:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    ours, theirs = DPO[name]
    trainer = DPOTrainer(
        load(model), load(reference), DPOConfig(**at_once(tmp_path), beta=0.3, **theirs),
        train_dataset=Dataset.from_list(PAIR_ROWS), processing_class=load_tokenizer(model),
    )  # fmt: skip
    found = first_step(model, reference, pairs.objective(choose("dpo", {"beta": 0.3, **ours})), of_pairs(model))
    step = history(trainer)[0]
    assert found["loss"] == pytest.approx(step["loss"], abs=1e-6)
    assert found["grad_norm"] == pytest.approx(step["grad_norm"], rel=3e-6)


def test_cdpo_where_trl_ignores_the_smoothing(model: Path, reference: Path, tmp_path: Path) -> None:
    """TRL 1.16's ``sigmoid`` reads no label_smoothing; ours is (1 - e) of its loss and e of that with d turned."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    def trl(smoothing: float) -> float:
        trainer = DPOTrainer(
            load(model), load(reference), DPOConfig(**at_once(tmp_path), beta=0.3, label_smoothing=smoothing),
            train_dataset=Dataset.from_list(PAIR_ROWS), processing_class=load_tokenizer(model),
        )  # fmt: skip
        return history(trainer)[0]["loss"]

    units = of_pairs(model)
    plain, turned = (
        first_step(model, reference, pairs.objective(choose("dpo", {"beta": 0.3})), rows)["loss"]
        for rows in (units, [(rejected, chosen) for chosen, rejected in units])
    )
    smoothed = first_step(
        model, reference, pairs.objective(choose("dpo", {"beta": 0.3, "label_smoothing": 0.2})), units
    )
    assert trl(0.2) == pytest.approx(trl(0.0), abs=1e-7)
    assert smoothed["loss"] == pytest.approx(0.8 * plain + 0.2 * turned, rel=1e-6)
    assert abs(smoothed["loss"] - plain) > 1e-3


@pytest.mark.parametrize("method", ["kto", "apo-zero-unpaired"])
def test_single_answers(model: Path, reference: Path, tmp_path: Path, method: Any) -> None:
    """The prompt of a row meets the answer of the next one, as in KTO's paper; in TRL that of the row before: TRL gets
    the rows backwards, which makes the same mismatched rows."""
    from datasets import Dataset
    from trl import KTOConfig, KTOTrainer

    trainer = KTOTrainer(
        model=load(model), ref_model=load(reference),
        args=KTOConfig(
            **at_once(tmp_path) | {"train_sampling_strategy": "sequential"}, beta=0.3, desirable_weight=1.2,
            undesirable_weight=0.7, loss_type=method.replace("-", "_"),
        ),
        train_dataset=Dataset.from_list(JUDGED_ROWS[::-1]), processing_class=load_tokenizer(model),
    )  # fmt: skip
    make = renderer(model)
    units: list[loop.Unit] = [(make.judged(*shapes.judged(row), row.where),) for row in each(JUDGED_ROWS)]
    given = {"beta": 0.3, "desirable_weight": 1.2, "undesirable_weight": 0.7}
    found = first_step(model, reference, unpaired.objective(choose(method, given)), units)
    step = history(trainer)[0]
    if method == "kto":
        assert found["kl"] == pytest.approx(step["kl"], rel=1e-5)
    assert found["loss"] == pytest.approx(step["loss"], abs=1e-6)
    assert found["grad_norm"] == pytest.approx(step["grad_norm"], rel=3e-6)


def rows_in(folder: Path, rows: list[dict[str, Any]]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def aligned(
    model: Path, reference: Path, folder: Path, rows: list[dict[str, Any]], **more: Any
) -> list[dict[str, Any]]:
    """What mst-align --reference says of each step."""
    given = AlignSpec(
        model=str(model), reference=str(reference), data=(rows_in(folder, rows),), out=folder / "out",
        cache=folder / "cache", precision="fp32", micro_batch=8, global_batch=8, seq_length=256, beta=0.3, lr=1e-3,
        warmup=0, schedule="constant", **more,
    )  # fmt: skip
    work(given, plan(given))
    return [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]


def test_a_run_with_a_reference_of_its_own(model: Path, reference: Path, tmp_path: Path) -> None:
    """The whole of mst-align --reference against DPOTrainer with ref_model: three steps, each of all rows."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    trainer = DPOTrainer(
        load(model), load(reference), DPOConfig(**at_once(tmp_path / "trl") | {"max_steps": 3}, beta=0.3),
        train_dataset=Dataset.from_list(PAIR_ROWS), processing_class=load_tokenizer(model),
    )  # fmt: skip
    found = aligned(model, reference, tmp_path, PAIR_ROWS, steps=3)
    for ours, theirs in zip(found, history(trainer), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=2e-6)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
        assert ours["rewards/margin"] == pytest.approx(theirs["rewards/margins"], abs=2e-6)


def test_a_kto_run_with_a_reference_of_its_own(model: Path, reference: Path, tmp_path: Path) -> None:
    """One step: TRL gets the rows of it backwards, as above."""
    from datasets import Dataset
    from trl import KTOConfig, KTOTrainer

    (found,) = aligned(model, reference, tmp_path, JUDGED_ROWS, method="kto", steps=1)
    met = [JUDGED_ROWS[index] for index in Order(8, 0).epoch(0)]
    trainer = KTOTrainer(
        model=load(model), ref_model=load(reference),
        args=KTOConfig(**at_once(tmp_path / "trl") | {"train_sampling_strategy": "sequential"}, beta=0.3),
        train_dataset=Dataset.from_list(met[::-1]), processing_class=load_tokenizer(model),
    )  # fmt: skip
    (step,) = history(trainer)
    assert found["kl"] == pytest.approx(step["kl"], rel=1e-5)
    assert found["loss"] == pytest.approx(step["loss"], abs=1e-6)
    assert found["grad_norm"] == pytest.approx(step["grad_norm"], rel=3e-6)


def test_methods_without_a_reference(model: Path) -> None:
    """The pair terms of TRL's CPOTrainer (cpo, simpo) and ORPOTrainer on our log-probabilities; their trainers are
    experimental, and ORPO's SFT term counts the prompt, which ours, as the paper's, does not."""
    from types import SimpleNamespace

    from trl.experimental.cpo import CPOTrainer
    from trl.experimental.orpo import ORPOTrainer

    units, engine = of_pairs(model), PlainEngine(spec_of(model), model)
    (batch,) = loop.micro_batches(units, engine, spec_of(model), None)
    logp_BT = engine.score(batch)
    logp_P2 = (logp_BT * batch.mask_BT).sum(1).view(-1, 2)
    mean_P2 = logp_P2 / batch.mask_BT.sum(1).view(-1, 2)
    fake = SimpleNamespace(
        alpha=0.0, beta=2.0, simpo_gamma=0.7, loss_type="simpo", label_smoothing=0.0,
        accelerator=SimpleNamespace(device=torch.device("cpu")),
    )  # fmt: skip
    theirs = {"simpo": CPOTrainer.cpo_loss(fake, mean_P2[:, 0], mean_P2[:, 1])[0].mean()}
    fake.beta, fake.loss_type = 0.3, "sigmoid"
    theirs["cpo"] = CPOTrainer.cpo_loss(fake, logp_P2[:, 0], logp_P2[:, 1])[0].mean()
    theirs["orpo"] = -ORPOTrainer.odds_ratio_loss(fake, mean_P2[:, 0], mean_P2[:, 1])[0].mean()
    given = {"simpo": {"beta": 2.0, "gamma": 0.7}, "cpo": {"beta": 0.3}, "orpo": {"beta": 0.3}}
    for method, expected in theirs.items():
        term = pairs.objective(choose(method, given[method])).loss(logp_BT, batch)[method]
        assert float(term.sum) / term.weight == pytest.approx(float(expected), rel=1e-6), method
        assert math.isfinite(float(expected))


@pytest.mark.parametrize("centre", [0.0, 0.05])
def test_reward_models(tiny_hf: Callable[..., Path], tmp_path: Path, centre: float) -> None:
    """The rows with a centre have margins as well."""
    from datasets import Dataset
    from transformers import AutoModelForSequenceClassification
    from trl import RewardConfig, RewardTrainer

    model = tiny_hf("llama", template=TEMPLATE, scores=True)
    given = [{**row, "margin": 0.25 * i} for i, row in enumerate(PAIR_ROWS)] if centre else PAIR_ROWS
    trainer = RewardTrainer(
        AutoModelForSequenceClassification.from_pretrained(model, dtype=torch.float32),
        RewardConfig(**at_once(tmp_path), center_rewards_coefficient=centre or None),
        train_dataset=Dataset.from_list(given), processing_class=load_tokenizer(model),
    )  # fmt: skip
    method = rewards.objective(choose("rm", {"center_rewards_coefficient": centre}))
    found = first_step(model, model, method, list(rewards.LastTokens(of_pairs(model, given), 0)))
    step = history(trainer)[0]
    assert found["loss"] == pytest.approx(step["loss"], abs=1e-6)
    assert found["grad_norm"] == pytest.approx(step["grad_norm"], rel=3e-6)
