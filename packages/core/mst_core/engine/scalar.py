"""The head of a reward model: one number from the hidden state of a token, in fp32 whatever the run's precision.

In bf16 two answers of nearly the same worth would get the same score. The head is whole on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


class ScalarHead(torch.nn.Module):
    """(.., hidden) -> (.., 1), fp32."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight)

    def forward(self, hidden: Tensor) -> Tensor:
        """One score a position."""
        with torch.autocast(hidden.device.type, enabled=False):
            return F.linear(hidden.float(), self.weight.float())


def read_at(tokens: Sequence[int], pad: int | None) -> int:
    """Where the score of a conversation is read, as transformers' classes do it: at its last token that is not ``pad``
    (config.json's pad_token_id), which need not be its last one in models whose end of a turn pads too."""
    return next((at for at in range(len(tokens) - 1, 0, -1) if tokens[at] != pad), len(tokens) - 1)


def per_token(model: Any) -> None:
    """Let a transformers sequence classifier of one label give ``logits`` (B, T, 1): the score at every token, where
    its own forward picks one position by the padding that it finds in the tokens."""
    from transformers.modeling_outputs import TokenClassifierOutput

    model.score = ScalarHead(model.score.weight.data)

    def forward(self: Any, **given: Any) -> Any:
        decoder = getattr(self, self.base_model_prefix)
        return TokenClassifierOutput(logits=self.score(decoder(**given).last_hidden_state))

    model.forward = MethodType(forward, model)
