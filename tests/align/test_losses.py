"""The losses of pairs against numbers worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from mst_align.methods import choose
from mst_align.pairs import objective
from mst_core.engine.seam import Batch, Term, weights


def batch_of(references: list[float], masks: list[list[float]]) -> Batch:
    """A batch of sequences of three tokens with these masks."""
    count = len(masks)
    tokens_BT = torch.zeros((count, 3), dtype=torch.int64)
    lengths_B = torch.full((count,), 3)
    return Batch(tokens_BT, torch.tensor(masks), lengths_B, {"ref_logp_B": torch.tensor(references)})


def dpo(logp_BT: torch.Tensor, batch: Batch, beta: float, method: Any = "dpo", **given: Any) -> dict[str, Term]:
    return dict(objective(choose(method, {"beta": beta, **given})).loss(logp_BT, batch))


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
    assert found["rewards/accuracy"] == found["logps/accuracy"] == 1.0


def test_likelier_by_the_policy_alone() -> None:
    """Sums -3 and -8 whatever the reference; means of a token -3 and -8 / 3 where a loss goes by length."""
    logp_BT, masks = (
        torch.tensor([[0.0, -3.0, 0.0, 0.0], [0.0, -4.0, -3.0, -1.0]]),
        [[0.0, 1.0, 0.0, 0.0], [0.0, *[1.0] * 3]],
    )
    batch = Batch(
        torch.zeros((2, 4), dtype=torch.int64), torch.tensor(masks), torch.tensor([2, 4]),
        {"ref_logp_B": torch.tensor([0.0, -9.0])},
    )  # fmt: skip
    found = {loss: means(dpo(logp_BT, batch, 0.1, loss=loss)) for loss in ("sigmoid", "sigmoid-norm")}
    assert [found[loss]["logps/accuracy"] for loss in found] == [1.0, 0.0]
    assert found["sigmoid"]["rewards/accuracy"] == 0.0


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
    chosen = objective(choose("dpo", {"beta": 0.1}))
    assert (chosen.name, chosen.rows, chosen.reference) == ("dpo", 2, True)
    batches = [batch_of([-5.0, -4.0], MASKS), batch_of([-5.0, -4.0, 0.0, 0.0], [*MASKS, *MASKS])]
    assert weights(chosen, batches)["dpo"] == 3.0


def test_large_margins_stay_finite() -> None:
    logp_BT = torch.tensor([[0.0, -5e4, -5e4], [0.0, -1.0, -1.0]], requires_grad=True)
    term = dpo(logp_BT, batch_of([-1.0, -1.0], MASKS), beta=1.0)["dpo"]
    term.sum.backward()
    assert math.isfinite(float(term.sum))
    assert logp_BT.grad is not None
    assert bool(logp_BT.grad.isfinite().all())


BY_HAND = {
    "sigmoid": 0.437488,  # -log s(0.6)
    "hinge": 0.4,  # 1 - 0.6
    "ipo": (2 / 2 + 4 / 2 - 1 / 0.2) ** 2,  # r / |y|: 1 and -2
    "sigmoid-norm": math.log1p(math.exp(-0.3)),
    "robust": (0.9 * 0.437488 - 0.1 * 1.037488) / 0.8,  # -log s(-0.6) = 1.037488
    "apo-zero": 1 / (1 + math.exp(0.2)) + 1 / (1 + math.exp(0.4)),
    "apo-down": 1 / (1 + math.exp(-0.2)) + 1 / (1 + math.exp(0.6)),
    "bco": math.log1p(math.exp(-0.2)) + math.log1p(math.exp(-0.4)),
}


@pytest.mark.parametrize("loss", BY_HAND)
def test_each_loss_of_dpo_by_hand(loss: str) -> None:
    name = "dpo" if loss == "sigmoid" else f"dpo-{loss}"
    found = means(dpo(torch.tensor(LOGP), batch_of([-5.0, -4.0], MASKS), 0.1, loss=loss))
    assert found[name] == pytest.approx(BY_HAND[loss], abs=2e-6)


def test_cdpo_by_hand() -> None:
    found = means(dpo(torch.tensor(LOGP), batch_of([-5.0, -4.0], MASKS), 0.1, label_smoothing=0.2))
    assert found["dpo"] == pytest.approx(0.8 * 0.437488 + 0.2 * 1.037488, abs=1e-6)


def test_methods_without_a_reference_by_hand() -> None:
    """Means of a token -1.5 and -4: no ref_logp_B is read, none is there."""
    batch = Batch(torch.zeros((2, 3), dtype=torch.int64), torch.tensor(MASKS), torch.full((2,), 3))
    simpo = means(dpo(torch.tensor(LOGP), batch, 2.0, "simpo", gamma=0.5))
    assert simpo["simpo"] == pytest.approx(math.log1p(math.exp(-(2 * 2.5 - 0.5))), abs=1e-6)
    assert simpo["rewards/margin"] == pytest.approx(5.0)
    cpo = means(dpo(torch.tensor(LOGP), batch, 0.1, "cpo"))
    assert cpo["cpo"] == pytest.approx(math.log1p(math.exp(-0.5)), abs=1e-6)
    assert cpo["sft"] == pytest.approx(1.5)
    odds = [m - math.log(1 - math.exp(m)) for m in (-1.5, -4.0)]
    orpo = means(dpo(torch.tensor(LOGP), batch, 0.2, "orpo"))
    assert orpo["orpo"] == pytest.approx(0.2 * math.log1p(math.exp(odds[1] - odds[0])), abs=1e-6)


def test_the_sft_term_has_two_means() -> None:
    """Chosen answers of two tokens (-2, -1) and of one (-6): by token 9 / 3, by answer (1.5 + 6) / 2."""
    logp_BT = torch.tensor([*LOGP, [0.0, 0.0, -6.0], [0.0, -4.0, -4.0]])
    batch = batch_of([0.0] * 4, [*MASKS, [0.0, 0.0, 1.0], [0.0, 1.0, 1.0]])
    for average, expected in (("token", 3.0), ("sequence", 3.75)):
        terms = dpo(logp_BT, batch, 0.1, sft_weight=0.5, sft_average=average)
        assert float(terms["sft"].sum) / terms["sft"].weight == pytest.approx(expected)
        assert terms["sft"].coefficient == 0.5


def test_ld_dpo_weighs_what_lies_beyond_the_shorter_answer_of_both_models() -> None:
    masks = [[0.0, 1.0, 1.0, 1.0], [0.0, 1.0, 0.0, 0.0]]
    logp_BT = torch.tensor([[0.0, -1.0, -2.0, -4.0], [0.0, -3.0, -9.0, -9.0]])
    batch = Batch(
        torch.zeros((2, 4), dtype=torch.int64), torch.tensor(masks), torch.tensor([4, 2]),
        {"ref_logp_B": torch.tensor([-2.0, -1.0])},
    )  # fmt: skip
    chosen = objective(choose("dpo", {"ld_alpha": 0.5}))
    assert chosen.answers(logp_BT, batch).tolist() == [-4.0, -3.0]
    # r: -4 + 2 = -2 and -3 + 1 = -2
    assert means(dict(chosen.loss(logp_BT, batch)))["dpo"] == pytest.approx(math.log(2), abs=1e-6)


@pytest.mark.parametrize("method", ["dpo", "simpo", "orpo", "cpo"])
def test_the_order_of_pairs_changes_nothing(method: str) -> None:
    torch.manual_seed(0)
    logp_BT, masks = -torch.rand(8, 5), [[0.0, *([1.0] * n), *([0.0] * (4 - n))] for n in (1, 2, 3, 4, 4, 3, 2, 1)]
    order = [6, 7, 2, 3, 0, 1, 4, 5]
    references = (-torch.rand(8)).tolist()
    ours, theirs = (
        dpo(logp_BT[rows], batch_of_five([masks[i] for i in rows], [references[i] for i in rows]), 0.3, method)
        for rows in (list(range(8)), order)
    )
    for name, term in ours.items():
        assert float(term.sum) == pytest.approx(float(theirs[name].sum), abs=1e-6), name
        assert term.weight == theirs[name].weight


def batch_of_five(masks: list[list[float]], references: list[float]) -> Batch:
    tokens_BT = torch.zeros((len(masks), 5), dtype=torch.int64)
    return Batch(tokens_BT, torch.tensor(masks), torch.full((len(masks),), 5), {"ref_logp_B": torch.tensor(references)})


@pytest.mark.parametrize(
    ("method", "given", "said"),
    [
        ("kto", {"loss": "ipo"}, "--loss means nothing to --method kto"),
        ("simpo", {"ld_alpha": 0.5}, "--ld-alpha means nothing to --method simpo"),
        ("dpo", {"loss": "ipo", "label_smoothing": 0.1}, "--label-smoothing means nothing to --method dpo --loss ipo"),
        ("dpo", {"gamma": 1.0}, "--gamma means nothing to --method dpo"),
        ("orpo", {"label_smoothing": 0.1}, "--label-smoothing means nothing to --method orpo"),
        ("dpo", {"sft_average": "sequence"}, "--sft-average needs --sft-weight"),
        ("dpo", {"sft_average": "token"}, "--sft-average needs --sft-weight"),
    ],
)
def test_a_setting_that_a_method_does_not_read_is_refused(method: Any, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        choose(method, given)
