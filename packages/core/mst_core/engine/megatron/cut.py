"""How a micro-batch is cut for this run: padded for its layout, and shared among context parallel ranks.

Context parallelism cuts a row of S tokens into 2 x cp equal parts; rank r has parts r and 2 x cp - 1 - r, so that every
rank has as much causal attention to compute. This is Megatron's own order (get_batch_on_this_cp_rank).

Shapes: B sequences, T tokens of the batch, S = T padded, C = S / cp tokens of this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from mst_core.engine.megatron import groups
from mst_core.engine.megatron.attention import positions
from mst_core.engine.megatron.model import same_shapes
from mst_core.engine.seam import Batch
from mst_core.runspec import RunSpec


@dataclass(frozen=True)
class Cut:
    """What a run's layout asks of its micro-batches.

    multiple   S is a multiple of this
    cp         context parallel size
    group      of how many micro-batches a step must be a multiple (interleaved pipelines)
    same       all micro-batches of a step have one shape, on all ranks
    learnt     logits are made for learnt tokens only (under sequence parallelism each rank holds other tokens)
    flat       all samples of a micro-batch stand in one row, without padding
    balance    routers are told which tokens are padding, for their load balancing loss
    scores     the last stage gives the score at each token, of a reward model, in the place of log-probabilities
    """

    multiple: int
    cp: int
    group: int
    same: bool
    learnt: bool
    flat: bool
    balance: bool
    scores: bool = False

    @classmethod
    def of(cls, spec: RunSpec, scores: bool = False) -> Cut:
        multiple = (spec.tp if spec.sp else 1) * (2 * spec.cp if spec.cp > 1 else 1)
        group = spec.pp if spec.vp > 1 else 1
        balance = spec.moe_aux_loss_coeff > 0
        return cls(multiple, spec.cp, group, same_shapes(spec), not spec.sp, spec.packing, balance, scores)

    def shape(self, batches: Sequence[Batch]) -> tuple[int, int] | None:
        """(B, S) of all micro-batches of this step, on all data parallel ranks; None where each may have its own."""
        if not self.same:
            return None
        from megatron.core import parallel_state

        most = [max(batch.tokens_BT.shape[axis] for batch in batches) for axis in (0, 1)]
        found = torch.tensor(most, device=groups.device())
        dist.all_reduce(found, dist.ReduceOp.MAX, group=parallel_state.get_data_parallel_group())
        rows, length = found.tolist()
        return rows, length + -length % self.multiple

    def pad(self, value_BT: Tensor, shape: tuple[int, int] | None) -> Tensor:
        """(B, S), zeros added; to ``shape`` where all micro-batches share one."""
        rows, length = value_BT.shape
        return F.pad(value_BT, (0, self.width(length, shape) - length, 0, (shape or (rows,))[0] - rows))

    def width(self, length: int, shape: tuple[int, int] | None) -> int:
        """S of a batch of T tokens."""
        return shape[1] if shape else length + -length % self.multiple

    def mine(self, value_BS: Tensor) -> Tensor:
        """(B, C): the tokens of this context parallel rank."""
        if self.cp == 1:
            return value_BS
        from megatron.core import parallel_state

        rank = parallel_state.get_context_parallel_rank()
        return value_BS[:, positions(rank, self.cp, value_BS.shape[1] // self.cp, value_BS.device)]

    def whole(self, value_BC: Tensor) -> Tensor:
        """(B, S) on every context parallel rank. The gradient of each rank goes to its own tokens only: every rank
        computes the same loss, and DDP adds up what the ranks found for their parts of the row."""
        if self.cp == 1:
            return value_BC
        from megatron.core import parallel_state

        group, length = parallel_state.get_context_parallel_group(), value_BC.shape[1]
        parts = [torch.empty_like(value_BC) for _ in range(self.cp)]
        dist.all_gather(parts, value_BC.detach().contiguous(), group=group)
        found = value_BC.new_empty(value_BC.shape[0], length * self.cp)
        for rank, part in enumerate(parts):
            found[:, positions(rank, self.cp, length, found.device)] = part
        own = positions(parallel_state.get_context_parallel_rank(), self.cp, length, found.device)
        return found.index_copy(1, own, value_BC)
