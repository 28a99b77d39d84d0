"""The router with a load balancing loss that sums over micro-batches by their tokens, and can be reported.

Per layer and micro-batch: E * sum over experts of (share of the choices) * (mean probability), over real tokens (Switch
Transformer, arXiv 2101.03961, as Megatron computes it, layer by layer; transformers takes all layers as one).
A micro-batch that the trainer repeats, where they do not divide among ranks, counts once more.
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

    def _apply_aux_loss(
        self, probs: Tensor, scores_for_aux_loss: Tensor, routing_map: Tensor, with_padding_mask: bool = False
    ) -> Tensor:
        """Attach coefficient * tokens * loss, this rank's share of it, to ``probs``. Shapes: (tokens, experts).

        Megatron 0.19.2 multiplies by the row's ranks as well, once padding is told: it adds up the tokens of all ranks
        in place, and takes them for this rank's.
        """
        chosen_E = routing_map.sum(dim=0).float()
        dist.all_reduce(chosen_E, group=self.tp_cp_group)
        total = chosen_E.sum().clamp(min=1.0)  # tokens * topk; none at all where a micro-batch only fills a group
        loss = chosen_E.numel() * (chosen_E / total * scores_for_aux_loss.sum(dim=0)).sum()
        self.balance = self.balance + loss.detach()
        return MoEAuxLossAutoScaler.apply(probs, self.get_aux_loss_coeff("aux_loss") * loss)


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
