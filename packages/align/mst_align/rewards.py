"""The loss of reward models, a pure function of the scores of both answers.

Shapes: B sequences (chosen at 0, 2, ..., rejected at 1, 3, ...), P = B / 2 pairs, T tokens. All in fp32. A score is the
scalar head's value at the last token of the whole conversation, where transformers' sequence classifiers read it
(scalar.read_at).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import overload

import torch
from torch import Tensor
from torch.nn import functional as F

from mst_align.methods import Chosen
from mst_core.data.render import Sample
from mst_core.engine import scalar
from mst_core.engine.seam import Batch, Objective, Term


def terms(value_BT: Tensor, batch: Batch, chosen: Chosen) -> dict[str, Term]:
    """Bradley-Terry: -log s(r_w - r_l - m), m the pair's margin (Llama 2, arXiv 2307.09288, eq. 2; 0 where a row names
    none), beside c (r_w + r_l)^2, which centres the scores (Eisenstein et al. 2023, arXiv 2312.09244). Means over the
    pairs of the step; a pair with an empty mask (it fills up a rank) weighs 0."""
    learnt_P = batch.mask_BT.sum(1).view(-1, 2).amin(1)
    count = float(learnt_P.sum())
    reward_P2 = (value_BT * batch.mask_BT).sum(1).view(-1, 2)
    difference_P = reward_P2[:, 0] - reward_P2[:, 1]
    asked_P = batch.extra["margin_B"].view(-1, 2)[:, 0] if "margin_B" in batch.extra else torch.zeros_like(difference_P)

    def mean(value_P: Tensor, coefficient: float = 0.0) -> Term:
        return Term((value_P * learnt_P).sum(), count, coefficient)

    found = {chosen.name: mean(-F.logsigmoid(difference_P - asked_P), 1.0)}
    if chosen.center_rewards_coefficient:
        found["center"] = mean(reward_P2.sum(1).square(), chosen.center_rewards_coefficient)
    reward_P2, margin_P = reward_P2.detach(), difference_P.detach()
    return found | {
        "rewards/chosen": mean(reward_P2[:, 0]),
        "rewards/rejected": mean(reward_P2[:, 1]),
        "rewards/margin": mean(margin_P),
        "rewards/accuracy": mean(margin_P.gt(0).to(margin_P.dtype)),
    }


@dataclass(frozen=True)
class LastTokens(Sequence[tuple[Sample, ...]]):
    """Pairs whose mask is 1 only where the score is read; made when they are asked for. ``pad``: the model's."""

    pairs: Sequence[tuple[Sample, ...]]
    pad: int | None

    def __len__(self) -> int:
        return len(self.pairs)

    @overload
    def __getitem__(self, index: int) -> tuple[Sample, ...]: ...

    @overload
    def __getitem__(self, index: slice) -> LastTokens: ...

    def __getitem__(self, index: int | slice) -> tuple[Sample, ...] | LastTokens:
        if isinstance(index, slice):
            return LastTokens(self.pairs[index], self.pad)
        return tuple(replace(sample, mask=self._mask(sample.tokens)) for sample in self.pairs[index])

    def _mask(self, tokens: list[int]) -> list[int]:
        mask = [0] * len(tokens)
        mask[scalar.read_at(tokens, self.pad)] = 1
        return mask


def objective(chosen: Chosen) -> Objective:
    """Of a reward model."""
    return Objective(chosen.name, partial(terms, chosen=chosen), rows=2)
