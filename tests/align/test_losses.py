"""DPO against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from mst_align.losses import dpo, dpo_objective
from mst_core.engine.seam import Batch, Term, weights


def batch_of(references: list[float], masks: list[list[float]]) -> Batch:
    """A batch of sequences of three tokens with these masks."""
    count = len(masks)
    tokens_BT = torch.zeros((count, 3), dtype=torch.int64)
    lengths_B = torch.full((count,), 3)
    return Batch(tokens_BT, torch.tensor(masks), lengths_B, {"ref_logp_B": torch.tensor(references)})


def means(terms: dict[str, Term]) -> dict[str, float]:
    return {name: float(term.sum) / term.weight for name, term in terms.items()}


# chosen: log p -2 + -1 = -3, reference -5, so r = 2; rejected: -4 + -4 = -8, reference -4, so r = -4; r_c - r_r = 6
LOGP = [[0.0, -2.0, -1.0], [0.0, -4.0, -4.0]]
MASKS = [[0.0, 1.0, 1.0], [0.0, 1.0, 1.0]]


def test_a_pair_by_hand() -> None:
    found = means(dpo(torch.tensor(LOGP), batch_of([-5.0, -4.0], MASKS), beta=0.1))
    assert found["dpo"] == pytest.approx(0.437488, abs=1e-6)  # -log sigmoid(0.1 * 6)
    assert found["rewards/chosen"] == pytest.approx(0.2)
    assert found["rewards/rejected"] == pytest.approx(-0.4)
    assert found["rewards/margin"] == pytest.approx(0.6)
    assert found["rewards/accuracy"] == 1.0


@pytest.mark.parametrize(("beta", "loss"), [(0.1, 0.437488), (0.5, 0.0485874), (1.0, 0.00247569)])
def test_beta_scales_the_margin(beta: float, loss: float) -> None:
    assert means(dpo(torch.tensor(LOGP), batch_of([-5.0, -4.0], MASKS), beta))["dpo"] == pytest.approx(loss, rel=1e-5)


def test_the_reference_itself_loses_ln_2() -> None:
    found = means(dpo(torch.tensor(LOGP), batch_of([-3.0, -8.0], MASKS), beta=0.1))
    assert found["dpo"] == pytest.approx(math.log(2), abs=1e-7)
    assert found["rewards/accuracy"] == 0.0  # a tie is not won
    assert found["rewards/margin"] == 0.0


def test_prompts_do_not_count() -> None:
    logp_BT = torch.tensor([[-9.0, -2.0, -1.0], [-7.0, -4.0, -4.0]])
    assert means(dpo(logp_BT, batch_of([-5.0, -4.0], MASKS), 0.1))["dpo"] == pytest.approx(0.437488, abs=1e-6)


def test_a_pair_without_anything_to_learn_weighs_nothing() -> None:
    """What fills up a data parallel rank: neither its loss nor its metrics may count."""
    whole = batch_of([-5.0, -4.0, -1.0, -2.0], [*MASKS, [0.0] * 3, [0.0] * 3])
    terms = dpo(torch.tensor([*LOGP, *LOGP]), whole, beta=0.1)
    alone = dpo(torch.tensor(LOGP), batch_of([-5.0, -4.0], MASKS), beta=0.1)
    for name, term in alone.items():
        assert terms[name].weight == term.weight == 1.0
        assert float(terms[name].sum) == pytest.approx(float(term.sum)), name


def test_gradients_by_hand() -> None:
    """d loss / d log p = -beta * sigmoid(-beta * margin) on chosen tokens, + on rejected ones, 0 elsewhere."""
    logp_BT = torch.tensor(LOGP, requires_grad=True)
    terms = dpo(logp_BT, batch_of([-5.0, -4.0], MASKS), beta=0.1)
    torch.stack([term.coefficient * term.sum for term in terms.values()]).sum().backward()
    slope = 0.1 / (1 + math.exp(0.6))
    expected_BT = torch.tensor([[0.0, -slope, -slope], [0.0, slope, slope]])
    torch.testing.assert_close(logp_BT.grad, expected_BT)


def test_the_objective_is_of_pairs_and_its_weights_need_no_forward_pass() -> None:
    objective = dpo_objective(0.1)
    assert (objective.name, objective.rows, objective.reference) == ("dpo", 2, True)
    batches = [batch_of([-5.0, -4.0], MASKS), batch_of([-5.0, -4.0, 0.0, 0.0], [*MASKS, *MASKS])]
    assert weights(objective, batches)["dpo"] == 3.0


def test_large_margins_stay_finite() -> None:
    logp_BT = torch.tensor([[0.0, -5e4, -5e4], [0.0, -1.0, -1.0]], requires_grad=True)
    term = dpo(logp_BT, batch_of([-1.0, -1.0], MASKS), beta=1.0)["dpo"]
    term.sum.backward()
    assert math.isfinite(float(term.sum))
    assert logp_BT.grad is not None
    assert bool(logp_BT.grad.isfinite().all())
