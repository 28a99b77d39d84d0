"""The objectives of training: the negative log-likelihood of the learnt tokens.

SFT learns the assistant's, CPT every token of a document but its first: the rows' mask says which.
"""

from __future__ import annotations

from torch import Tensor

from mst_core.engine.seam import Batch, Objective, Term


def nll(logp_BT: Tensor, batch: Batch) -> dict[str, Term]:
    """-sum of log p over the learnt tokens; the weight is their number, so a long answer counts as its tokens do."""
    return {"nll": Term(-(logp_BT * batch.mask_BT).sum(), float(batch.mask_BT.sum()))}


SFT = Objective("sft", nll)
CPT = Objective("cpt", nll)
STAGES = {"sft": SFT, "cpt": CPT}
