"""What must not change a step: how its rows are cut into micro-batches and ranks, their order, the amount of padding.

Each method as a pure function of log-probabilities first, then on the plain engine with a model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from mst_align import pairs, unpaired
from mst_align.methods import UNPAIRED, choose
from mst_core.data.render import Sample
from mst_core.engine import loop
from mst_core.engine.plain import PlainEngine
from mst_core.engine.seam import Batch, Objective, weights
from mst_core.runspec import RunSpec

METHODS: dict[str, tuple[Any, dict[str, Any]]] = {
    **{loss: ("dpo", {"loss": loss}) for loss in pairs.DPO},
    "cdpo": ("dpo", {"label_smoothing": 0.2}),
    "rpo": ("dpo", {"sft_weight": 0.5}),
    "rpo-sequence": ("dpo", {"sft_weight": 0.5, "sft_average": "sequence"}),
    "ld": ("dpo", {"ld_alpha": 0.5}),
    **{method: (method, {}) for method in ("orpo", "simpo", "cpo")},
    **{method: (method, {"desirable_weight": 1.3}) for method in UNPAIRED},
}
FEW = settings(
    max_examples=25, deadline=None, database=None, derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip


def objective_of(name: str) -> Objective:
    method, given = METHODS[name]
    return (unpaired if method in UNPAIRED else pairs).objective(choose(method, given))


@dataclass(frozen=True)
class Row:
    """A prompt and an answer as an engine has scored them."""

    prompt: int
    answer: list[float]
    """Log-probabilities of its tokens."""
    reference: float
    desirable: bool


exact = st.integers(-512, 0).map(lambda number: number / 64)
"""Numbers whose sums are exact in any order: a tie stays a tie."""
rows = st.builds(
    Row,
    prompt=st.integers(1, 3),
    answer=st.lists(exact.filter(bool), min_size=1, max_size=5),
    reference=exact,
    desirable=st.booleans(),
)
units = st.lists(st.tuples(rows, rows), min_size=1, max_size=6)


def batch_of(given: Sequence[Row], padding: int, kl: float) -> tuple[Batch, torch.Tensor]:
    """The rows with ``padding`` more tokens than the longest needs, and logp_BT, not 0 where nothing is learnt."""
    width = max(row.prompt + len(row.answer) for row in given) + padding
    mask_BT, logp_BT = torch.zeros(len(given), width), torch.full((len(given), width), -3.0)
    for index, row in enumerate(given):
        place = slice(row.prompt, row.prompt + len(row.answer))
        mask_BT[index, place], logp_BT[index, place] = 1.0, torch.tensor(row.answer)
    extra = {
        "ref_logp_B": torch.tensor([row.reference for row in given]),
        "desirable_B": torch.tensor([float(row.desirable) for row in given]),
        "kl_B": torch.full((len(given),), kl),
    }
    lengths_B = torch.tensor([row.prompt + len(row.answer) for row in given])
    return Batch(torch.zeros(len(given), width, dtype=torch.int64), mask_BT, lengths_B, extra), logp_BT.requires_grad_()


def step(
    objective: Objective, given: Sequence[tuple[Row, ...]], size: int, padding: int = 0, kl: float = 0.4
) -> tuple[dict[str, float], list[list[float]]]:
    """What an engine makes of the units in micro-batches of ``size``: means, and the gradient of each answer."""
    cut = [[row for unit in given[start : start + size] for row in unit] for start in range(0, len(given), size)]
    made = [batch_of(part, padding, kl) for part in cut]
    total = weights(objective, [batch for batch, _ in made])
    sums: dict[str, float] = dict.fromkeys(total, 0.0)
    gradients = []
    for part, (batch, logp_BT) in zip(cut, made, strict=True):
        terms = objective.loss(logp_BT, batch)
        torch.stack([t.coefficient * t.sum / (total[n] or 1.0) for n, t in terms.items()]).sum().backward()
        for name, term in terms.items():
            sums[name] += float(term.sum)
        assert logp_BT.grad is not None
        assert not logp_BT.grad[batch.mask_BT == 0].any()
        gradients += [logp_BT.grad[i, row.prompt : row.prompt + len(row.answer)].tolist() for i, row in enumerate(part)]
    return {name: sums[name] / total[name] for name in sums if total[name]}, gradients


@pytest.mark.parametrize("name", METHODS)
@FEW
@given(given_units=units, data=st.data())
def test_cuts_order_and_padding_change_nothing(
    name: str, given_units: list[tuple[Row, Row]], data: st.DataObject
) -> None:
    objective = objective_of(name)
    made = [unit[: objective.rows] for unit in given_units]
    order = data.draw(st.permutations(range(len(made))))
    size, padding = data.draw(st.integers(1, len(made))), data.draw(st.integers(0, 4))
    means, gradients = step(objective, made, len(made))
    others, turned = step(objective, [made[index] for index in order], size, padding)
    assert others == pytest.approx(means, rel=1e-4, abs=1e-5)
    for place, index in enumerate(order):
        for row in range(objective.rows):
            wanted = gradients[index * objective.rows + row]
            assert turned[place * objective.rows + row] == pytest.approx(wanted, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("name", METHODS)
@FEW
@given(given_units=units, scale=st.sampled_from([0.0, 1e-6, 1.0, 2e3]))
def test_losses_and_gradients_are_finite(name: str, given_units: list[tuple[Row, Row]], scale: float) -> None:
    objective = objective_of(name)
    made = [
        tuple(replace(row, answer=[scale * value for value in row.answer]) for row in unit[: objective.rows])
        for unit in given_units
    ]
    means, gradients = step(objective, made, 2)
    assert all(map(math.isfinite, means.values()))
    assert all(math.isfinite(value) for row in gradients for value in row)


@pytest.mark.parametrize("name", UNPAIRED)
@FEW
@given(given_rows=st.lists(rows, min_size=1, max_size=5), good=st.booleans(), kl=st.floats(0, 50))
def test_answers_of_one_label_alone(name: str, given_rows: list[Row], good: bool, kl: float) -> None:
    """Finite, a loss within 0 and the weight, and no reward of a kind that is not there."""
    made = [(replace(row, desirable=good),) for row in given_rows]
    means, gradients = step(objective_of(name), made, 2, kl=kl)
    assert 0 <= means[name] <= (1.3 if good else 1.0) + 1e-6
    assert ("rewards/chosen" in means, "rewards/rejected" in means) == (good, not good)
    # More of a good answer, less of a bad one.
    assert all(value <= 0 if good else value >= 0 for row in gradients for value in row)


def samples(count: int, rows: int) -> list[loop.Unit]:
    """Units of random tokens: of pairs both answers after the same prompt."""
    generator = torch.Generator().manual_seed(7)

    def tokens(number: int) -> list[int]:
        return torch.randint(3, 330, (number,), generator=generator).tolist()

    made = []
    for index in range(count):
        prompt = tokens(2 + index % 3)
        answers = [tokens(1 + (3 * index + 2 * row) % 6) for row in range(rows)]
        made.append(
            tuple(
                Sample([*prompt, *a], [0] * len(prompt) + [1] * len(a), desirable=None if rows == 2 else index % 2 == 0)
                for a in answers
            )
        )
    return made


def spec_of(rows: int, **options: Any) -> RunSpec:
    fields = {"precision": "fp32", "global_batch": rows, "clip_grad": 0.0, "seq_length": 64, **options}
    return RunSpec(model="m", data=(Path("d"),), out=Path("o"), **fields)


class Trained:
    """A policy and another model as its reference; steps on five units that change no weight."""

    def __init__(self, model: Path, reference: Path, name: str) -> None:
        self.objective = objective_of(name)
        self.units = samples(5, self.objective.rows)
        self.engine, self.other = (PlainEngine(spec_of(5), path) for path in (model, reference))

    def step(
        self, units: Sequence[loop.Unit], size: int = 5, ranks: int = 1, padding: int = 0
    ) -> tuple[dict[str, float], torch.Tensor]:
        """Values and gradient over the micro-batches of all ranks, each with ``padding`` more tokens."""
        batches: list[Batch] = []
        spec = spec_of(5).model_copy(update={"micro_batch": size})  # sizes that do not divide five too
        self.engine.dp_size = ranks
        for self.engine.dp_rank in range(ranks):
            batches += loop.micro_batches(units, self.engine, spec, None, 0.4)
        self.engine.dp_rank, self.engine.dp_size = 0, 1
        made = []
        for batch in batches:
            parts = (F.pad(part, (0, padding), value=fill) for part, fill in ((batch.tokens_BT, 7), (batch.mask_BT, 0)))
            padded = Batch(*parts, batch.lengths_B, batch.extra)
            reference_B = self.objective.answers(self.other.score(padded), padded)
            made.append(replace(padded, extra={**batch.extra, "ref_logp_B": reference_B}))
        values = self.engine.step(made, self.objective, 0.0)
        return values, torch.cat([p.grad.flatten() for _, p in self.engine.trained if p.grad is not None])


@pytest.fixture(scope="module")
def trained(tiny_hf: Callable[..., Path]) -> Callable[[str], tuple[Trained, Any]]:
    """``trained(name)``: a method, and its step on all rows at once."""
    made: dict[str, tuple[Trained, Any]] = {}

    def make(name: str) -> tuple[Trained, Any]:
        if name not in made:
            one = Trained(*(tiny_hf("llama", num_hidden_layers=1, seed=seed) for seed in (0, 1)), name)
            made[name] = (one, one.step(one.units))
        return made[name]

    return make


@pytest.mark.parametrize("name", ["sigmoid", "ipo", "rpo", "ld", "orpo", "kto"])
@settings(FEW, max_examples=10)
@given(order=st.permutations(range(5)), size=st.integers(1, 5), ranks=st.integers(1, 3), padding=st.integers(0, 9))
def test_a_step_of_the_plain_engine_is_one_step(
    trained: Callable[[str], tuple[Trained, Any]], name: str, order: list[int], size: int, ranks: int, padding: int
) -> None:
    """However many rows a micro-batch has, how many are accumulated, how many ranks take them in turn."""
    one, (values, gradient) = trained(name)
    others, turned = one.step([one.units[index] for index in order], size, ranks, padding)
    assert others == pytest.approx(values, rel=1e-4, abs=1e-5)
    largest = float(gradient.abs().max())
    assert largest > 1e-2
    torch.testing.assert_close(turned, gradient, atol=1e-5 * largest, rtol=1e-4)


@pytest.mark.parametrize("good", [True, False])
def test_a_step_of_one_label_on_the_engine(trained: Callable[[str], tuple[Trained, Any]], good: bool) -> None:
    one, _ = trained("kto")
    values, gradient = one.step([tuple(replace(sample, desirable=good) for sample in unit) for unit in one.units])
    assert all(map(math.isfinite, values.values()))
    assert bool(gradient.isfinite().all())
    assert ("rewards/chosen" in values, "rewards/rejected" in values) == (good, not good)


def test_no_prompt_meets_its_own_answer(tiny_hf: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """KTO's mismatched rows, of steps of any size. TRL #1911: an odd batch reversed leaves its middle row as it is."""
    engine, seen = PlainEngine(spec_of(2), tiny_hf("llama", num_hidden_layers=1)), []
    score = engine.score

    def watched(batch: Batch, **given: Any) -> torch.Tensor:
        seen.extend((int(row[0]) - 10, int(row[2]) - 100) for row in batch.tokens_BT)
        return score(batch, **given)

    monkeypatch.setattr(engine, "score", watched)
    for count in range(2, 10):
        seen.clear()
        units = [(Sample([10 + i, 3, 100 + i, 2], [0, 0, 1, 1], desirable=True),) for i in range(count)]
        loop.fit(engine, objective_of("kto"), units, spec_of(count, steps=1), None)
        turned = sorted((prompt, answer) for prompt, answer in seen if prompt != answer)
        # Once under the reference, once under the policy: each prompt, and each answer.
        assert turned[::2] == turned[1::2]
        assert [prompt for prompt, _ in turned[::2]] == list(range(count))
        assert sorted(answer for _, answer in turned[::2]) == list(range(count))
