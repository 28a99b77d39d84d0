"""Losses of preference pairs, pure functions of log-probabilities.

Shapes: B sequences (chosen at 0, 2, ..., rejected at 1, 3, ...), P = B / 2 pairs, T tokens. All in fp32.

In the formulas a prompt has answers w (chosen) and l (rejected) of |y| learnt tokens, EOS included; log p is summed
over an answer, r = log p - log p_reference, d = r_w - r_l, s the logistic function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from mst_align.methods import Chosen
from mst_core.engine.seam import Batch, Objective, Term


@dataclass(frozen=True)
class Pairs:
    """What a loss reads of each pair, [P, 2]: chosen, rejected."""

    logp_P2: Tensor
    ratio_P2: Tensor
    """r; without a reference log p itself."""
    length_P2: Tensor
    """|y|, at least 1."""

    @property
    def difference_P(self) -> Tensor:
        """d."""
        return self.ratio_P2[:, 0] - self.ratio_P2[:, 1]

    @property
    def mean_P2(self) -> Tensor:
        """r / |y|; without a reference the mean log-probability of a token."""
        return self.ratio_P2 / self.length_P2

    @property
    def mean_difference_P(self) -> Tensor:
        return self.mean_P2[:, 0] - self.mean_P2[:, 1]


PairLoss = Callable[[Pairs, Chosen], Tensor]
"""loss_P of the pairs."""


def sigmoid(pairs: Pairs, chosen: Chosen) -> Tensor:
    """DPO: -log s(beta d). Rafailov et al. 2023, arXiv 2305.18290, eq. 7. With label smoothing e it is cDPO (Mitchell's
    note): -(1 - e) log s(beta d) - e log s(-beta d); TRL 1.16 ignores e here."""
    return _smoothed(chosen.beta * pairs.difference_P, chosen.label_smoothing)


def robust(pairs: Pairs, chosen: Chosen) -> Tensor:
    """[-(1 - e) log s(beta d) + e log s(-beta d)] / (1 - 2e). Chowdhury et al. 2024, arXiv 2403.00409."""
    margin_P, e = chosen.beta * pairs.difference_P, chosen.label_smoothing
    return (-(1 - e) * F.logsigmoid(margin_P) + e * F.logsigmoid(-margin_P)) / (1 - 2 * e)


def ipo(pairs: Pairs, chosen: Chosen) -> Tensor:
    """(r_w/|y_w| - r_l/|y_l| - 1/(2 beta))^2. Azar et al. 2023, arXiv 2310.12036, eq. 17, by length."""
    return (pairs.mean_difference_P - 1 / (2 * chosen.beta)).square()


def hinge(pairs: Pairs, chosen: Chosen) -> Tensor:
    """max(0, 1 - beta d). SLiC: Zhao et al. 2023, arXiv 2305.10425."""
    return F.relu(1 - chosen.beta * pairs.difference_P)


def sigmoid_norm(pairs: Pairs, chosen: Chosen) -> Tensor:
    """-log s(beta (r_w/|y_w| - r_l/|y_l|)): DPO by length, as in Tulu 3 (arXiv 2411.15124)."""
    return -F.logsigmoid(chosen.beta * pairs.mean_difference_P)


def apo_zero(pairs: Pairs, chosen: Chosen) -> Tensor:
    """1 - s(beta r_w) + s(beta r_l). D'Oosterlinck et al. 2024, arXiv 2408.06266, eq. 7."""
    reward_P2 = chosen.beta * pairs.ratio_P2
    return torch.sigmoid(-reward_P2[:, 0]) + torch.sigmoid(reward_P2[:, 1])


def apo_down(pairs: Pairs, chosen: Chosen) -> Tensor:
    """s(beta r_w) + 1 - s(beta d). arXiv 2408.06266, eq. 8."""
    return torch.sigmoid(chosen.beta * pairs.ratio_P2[:, 0]) + torch.sigmoid(-chosen.beta * pairs.difference_P)


def bco(pairs: Pairs, chosen: Chosen) -> Tensor:
    """-log s(beta r_w) - log s(-beta r_l): BCO on pairs, without its shift of the reward (Jung et al. 2024, arXiv
    2404.04656), as TRL's bco_pair."""
    reward_P2 = chosen.beta * pairs.ratio_P2
    return -F.logsigmoid(reward_P2[:, 0]) - F.logsigmoid(-reward_P2[:, 1])


def simpo(pairs: Pairs, chosen: Chosen) -> Tensor:
    """-log s(beta (log p_w/|y_w| - log p_l/|y_l|) - gamma). Meng et al. 2024, arXiv 2405.14734, eq. 6."""
    return -F.logsigmoid(chosen.beta * pairs.mean_difference_P - chosen.gamma)


def cpo(pairs: Pairs, chosen: Chosen) -> Tensor:
    """-log s(beta (log p_w - log p_l)), smoothed as cDPO, beside its SFT term. Xu et al. 2024, arXiv 2401.08417."""
    return _smoothed(chosen.beta * pairs.difference_P, chosen.label_smoothing)


def orpo(pairs: Pairs, chosen: Chosen) -> Tensor:
    """-beta log s(log odds_w - log odds_l), odds of the mean log-probability m of a token: m - log(1 - e^m). Hong et
    al. 2024, arXiv 2403.07691, eq. 6 and 7 (its lambda is beta), beside its SFT term."""
    odds_P2 = pairs.mean_P2 - torch.log(-torch.expm1(pairs.mean_P2.clamp(max=-1e-7)))
    return -chosen.beta * F.logsigmoid(odds_P2[:, 0] - odds_P2[:, 1])


def _smoothed(margin_P: Tensor, e: float) -> Tensor:
    return -(1 - e) * F.logsigmoid(margin_P) - e * F.logsigmoid(-margin_P)


DPO: Mapping[str, PairLoss] = {
    "sigmoid": sigmoid, "robust": robust, "ipo": ipo, "hinge": hinge, "sigmoid-norm": sigmoid_norm,
    "apo-zero": apo_zero, "apo-down": apo_down, "bco": bco,
}  # fmt: skip
"""The losses of ``--method dpo``."""
FREE: Mapping[str, PairLoss] = {"simpo": simpo, "cpo": cpo, "orpo": orpo}
"""Methods without a reference."""


def terms(logp_BT: Tensor, batch: Batch, chosen: Chosen, loss: PairLoss) -> dict[str, Term]:
    """The loss of the pairs, its SFT term, and the metrics. A pair with an empty mask (it fills up a rank) weighs 0.

    Every weight is known from the masks. ``sft`` is -log p of the chosen answers: the mean over all their tokens
    (``--sft-average token``) or over the pairs of each answer's mean (``sequence``).
    """
    length_P2 = batch.mask_BT.sum(1).view(-1, 2)
    learnt_P = length_P2.amin(1).gt(0).to(logp_BT.dtype)
    count = float(learnt_P.sum())
    logp_P2 = (logp_BT * weigh(batch, chosen)).sum(1).view(-1, 2)
    ratio_P2 = logp_P2 - batch.extra["ref_logp_B"].view(-1, 2) if chosen.needs_reference else logp_P2
    pairs = Pairs(logp_P2, ratio_P2, length_P2.clamp(min=1))

    def mean(value_P: Tensor, coefficient: float = 0.0) -> Term:
        return Term((value_P * learnt_P).sum(), count, coefficient)

    found = {chosen.name: mean(loss(pairs, chosen), 1.0)}
    if chosen.sft_weight:
        nll_P = -(logp_BT * batch.mask_BT).sum(1).view(-1, 2)[:, 0]
        if chosen.sft_average == "token":
            tokens = float((length_P2[:, 0] * learnt_P).sum())
            found["sft"] = Term((nll_P * learnt_P).sum(), tokens, chosen.sft_weight)
        else:
            found["sft"] = mean(nll_P / pairs.length_P2[:, 0], chosen.sft_weight)
    reward_P2 = chosen.beta * (pairs.mean_P2 if chosen.by_length else pairs.ratio_P2).detach()
    margin_P = reward_P2[:, 0] - reward_P2[:, 1]
    likelier_P = (logp_P2 / pairs.length_P2 if chosen.by_length else logp_P2).diff(dim=1).squeeze(1).lt(0)
    return found | {
        "rewards/chosen": mean(reward_P2[:, 0]),
        "rewards/rejected": mean(reward_P2[:, 1]),
        "rewards/margin": mean(margin_P),
        "rewards/accuracy": mean(margin_P.gt(0).to(margin_P.dtype)),
        "logps/chosen": mean(logp_P2[:, 0].detach()),
        "logps/rejected": mean(logp_P2[:, 1].detach()),
        "logps/accuracy": mean(likelier_P.to(logp_P2.dtype)),
    }


def weigh(batch: Batch, chosen: Chosen) -> Tensor:
    """weight_BT of the tokens in an answer's log-probability. LD-DPO (Liu et al. 2024, arXiv 2409.06411): tokens beyond
    the shorter answer of a pair count ``ld_alpha``, of the policy and of the reference."""
    if chosen.ld_alpha is None:
        return batch.mask_BT
    shared_P = batch.mask_BT.sum(1).view(-1, 2).amin(1)
    beyond_BT = batch.mask_BT.cumsum(1) > shared_P.repeat_interleave(2).unsqueeze(1)
    return batch.mask_BT * torch.where(beyond_BT, chosen.ld_alpha, 1.0)


def objective(chosen: Chosen) -> Objective:
    """A method of pairs as an objective."""
    loss = DPO[chosen.loss] if chosen.method == "dpo" else FREE[chosen.method]
    return Objective(
        chosen.name,
        partial(terms, chosen=chosen, loss=loss),
        reference=chosen.needs_reference,
        rows=2,
        weigh=None if chosen.ld_alpha is None else partial(weigh, chosen=chosen),
    )
