"""The router with a load balancing loss that sums over micro-batches by their tokens, and can be reported.

Per layer and micro-batch: E * sum over experts of (share of the choices) * (mean probability), over real tokens (Switch
Transformer, arXiv 2101.03961, as Megatron computes it, layer by layer; transformers takes all layers as one).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor


class BalancedRouter(TopKRouter):
    """Megatron's router. ``balance`` adds up loss times tokens, over the micro-batches since it was taken."""

    balance: Tensor | float = 0.0

    def attach_and_log_load_balancing_loss(
        self, activation: Tensor, aux_loss_coeff: float, aux_loss: Tensor, aux_loss_name: str, reduce_group: Any,
        needs_dp_avg: bool = True, valid_token_count: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """``aux_loss`` is this rank's share of the micro-batch's loss, times ``aux_loss_coeff``.

        Megatron would take this rank's tokens times the ranks for the micro-batch's, which is wrong where padding is
        not spread evenly over a row's ranks.
        """
        tokens = torch.as_tensor(valid_token_count, dtype=torch.float32, device=aux_loss.device).clone()
        dist.all_reduce(tokens, group=reduce_group)
        self.balance = self.balance + (aux_loss / aux_loss_coeff * tokens).detach()
        return MoEAuxLossAutoScaler.apply(activation, aux_loss * tokens)


def take_balance(chunks: Iterable[Any], device: torch.device) -> float:
    """The sum over all ranks, layers and micro-batches since the last call. All ranks call it."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, BalancedRouter):
                total += module.balance
                module.balance = 0.0
    dist.all_reduce(total)
    return float(total)
