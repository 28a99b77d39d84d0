"""Losses of single answers that are good (desirable) or bad, pure functions of log-probabilities.

Shapes: B sequences, T tokens. r = log p - log p_reference, summed over an answer, EOS included; s the logistic
function.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from mst_align.methods import Chosen
from mst_core.engine.seam import Batch, Objective, Term


def terms(logp_BT: Tensor, batch: Batch, chosen: Chosen) -> dict[str, Term]:
    """KTO (Ethayarajh et al. 2024, arXiv 2402.01306, eq. 8): w_d (1 - s(beta (r - z))) of a desirable answer,
    w_u (1 - s(beta (z - r))) of another; the mean over all answers of the step. Bounded, no logarithm.

    z = max(0, the mean over the step of log p - log p_reference of each prompt with the next row's answer), without a
    gradient (engine/divergence.py). APO-zero-unpaired (arXiv 2408.06266) is the same with z = 0. A row with an empty
    mask (it fills up a rank) weighs 0. Metrics are means over the answers of their kind.
    """
    learnt_B = batch.mask_BT.sum(1).gt(0).to(logp_BT.dtype)
    good_B = learnt_B * batch.extra["desirable_B"]
    bad_B = learnt_B - good_B
    logp_B = (logp_BT * batch.mask_BT).sum(1)
    ratio_B = logp_B - batch.extra["ref_logp_B"]
    z_B = batch.extra["kl_B"] if chosen.method == "kto" else torch.zeros_like(ratio_B)
    sign_B = 2 * batch.extra["desirable_B"] - 1
    weight_B = chosen.desirable_weight * good_B + chosen.undesirable_weight * bad_B
    loss_B = weight_B * torch.sigmoid(-sign_B * chosen.beta * (ratio_B - z_B))
    rows, good, bad = (float(which_B.sum()) for which_B in (learnt_B, good_B, bad_B))
    reward_B = chosen.beta * ratio_B.detach()
    found = {
        chosen.name: Term(loss_B.sum(), rows),
        "rewards/chosen": Term((reward_B * good_B).sum(), good, 0.0),
        "rewards/rejected": Term((reward_B * bad_B).sum(), bad, 0.0),
        "logps/chosen": Term((logp_B.detach() * good_B).sum(), good, 0.0),
        "logps/rejected": Term((logp_B.detach() * bad_B).sum(), bad, 0.0),
    }
    if chosen.method == "kto":
        found["kl"] = Term((z_B * learnt_B).sum(), rows, 0.0)
    return found


def objective(chosen: Chosen) -> Objective:
    """A method of single answers as an objective."""
    return Objective(
        chosen.name, partial(terms, chosen=chosen), reference=True, rows=1, divergence=chosen.method == "kto"
    )
