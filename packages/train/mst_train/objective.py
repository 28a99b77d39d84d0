"""The objective of supervised fine-tuning: the negative log-likelihood of the assistant's tokens."""

from __future__ import annotations

from torch import Tensor

from mst_core.engine.seam import Batch, Objective, Term


def nll(logp_BT: Tensor, batch: Batch) -> dict[str, Term]:
    """-sum of log p over the learnt tokens; the weight is their number, so a long answer counts as its tokens do."""
    return {"nll": Term(-(logp_BT * batch.mask_BT).sum(), float(batch.mask_BT.sum()))}


SFT = Objective("sft", nll)
