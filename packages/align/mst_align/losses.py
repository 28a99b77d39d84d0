"""Preference losses, pure functions of log-probabilities.

Shapes: B sequences (chosen at 0, 2, ..., rejected at 1, 3, ...), P = B / 2 pairs, T tokens.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor
from torch.nn import functional as F

from mst_core.engine.seam import Batch, Objective, Term


def dpo(logp_BT: Tensor, batch: Batch, beta: float) -> dict[str, Term]:
    """-log sigmoid(beta * (r_chosen - r_rejected)), r = log p - log p_reference over the answer (EOS included).

    Rafailov et al. 2023, arXiv 2305.18290, eq. 7. The weight is the number of pairs. The rewards beta * r, their
    margin and accuracy are metrics. A pair with an empty mask (filling up a rank) has weight 0.
    """
    learnt_P = batch.mask_BT.sum(1).view(-1, 2).amin(1).gt(0).to(logp_BT.dtype)
    pairs = float(learnt_P.sum())
    reward_P2 = beta * ((logp_BT * batch.mask_BT).sum(1) - batch.extra["ref_logp_B"]).view(-1, 2)
    margin_P = reward_P2[:, 0] - reward_P2[:, 1]
    return {
        "dpo": Term((-F.logsigmoid(margin_P) * learnt_P).sum(), pairs),
        "rewards/chosen": Term((reward_P2[:, 0] * learnt_P).sum(), pairs, 0.0),
        "rewards/rejected": Term((reward_P2[:, 1] * learnt_P).sum(), pairs, 0.0),
        "rewards/margin": Term((margin_P * learnt_P).sum(), pairs, 0.0),
        "rewards/accuracy": Term((margin_P.gt(0).to(margin_P.dtype) * learnt_P).sum(), pairs, 0.0),
    }


def dpo_objective(beta: float) -> Objective:
    """DPO as an objective: pairs, with a reference."""
    return Objective("dpo", partial(dpo, beta=beta), reference=True, rows=2)
