"""What crosses between an algorithm and an engine.

Shapes are in the names: ``B`` sequences of a micro-batch, ``T`` tokens of the longest of them.

Log-probabilities are aligned with the tokens they belong to::

    logp_BT[b, t] = log p(tokens_BT[b, t] | tokens_BT[b, :t])        logp_BT[:, 0] = 0

so ``mask_BT`` (which tokens are learnt) has the same index, and no shifted copy of anything exists.
A reward model has value_BT in its place: the scalar head's value at that token, whose loss reads it at the last one.
Only these cross the seam, never logits: vocabulary-parallel work, pipeline stages and
padding for the engine's own needs stay inside the engine.

An objective returns named terms, each a *sum* and its *weight*; only an engine divides, each term by its
weight summed over the whole global step (all micro-batches, all data-parallel ranks). A weight never depends
on ``logp_BT``: engines read the weights of a step, before its first forward pass, by calling the loss on zeros.
A term whose coefficient is 0 is a metric: reduced and reported like the others, without a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from mst_core.checkpoint import Staging


@dataclass(frozen=True)
class Batch:
    """A micro-batch, padded on the right.

    tokens_BT   int64, padding is any valid id
    mask_BT     float32, 1.0 where the token is learnt; 0.0 on the prompt and on padding
    lengths_B   int64, real tokens of each sequence (its padding starts there)
    extra       further tensors with B (or B/2 for pairs) on axis 0, by name (``ref_logp_B``; ``margin_B``, where a row
                of the batch has one: on the chosen rows)
    packed      None, or of each row the lengths of the samples that stand in it one after another; they sum to
                lengths_B. Python integers: what is made of them (cu_seqlens: 0 and their running sums; positions,
                batches.positions) is made without waiting for a device

    The samples of a packed row do not see one another: each is as if it stood alone, its positions begin at 0, and
    logp_BT is 0 at the first token of every one, where mask_BT is 0 as well. A causal mask alone, or one of ones,
    mixes them; an engine that cannot keep them apart refuses a packed batch. Objectives of pairs get none: with
    --packing an engine lays the samples of any batch into one row itself (batches.in_a_row), and logp_BT back.

    Pairs are interleaved: rows 0, 2, 4 ... are chosen, rows 1, 3, 5 ... the rejected of the row before.
    """

    tokens_BT: Tensor
    mask_BT: Tensor
    lengths_B: Tensor
    extra: Mapping[str, Tensor] = field(default_factory=dict)
    packed: tuple[tuple[int, ...], ...] | None = None


@dataclass(frozen=True)
class Term:
    """One named part of a loss: ``coefficient * sum / weight``, the weight taken over the global step."""

    sum: Tensor
    weight: float
    coefficient: float = 1.0


Loss = Mapping[str, Term]
LossFunction = Callable[[Tensor, Batch], Loss]


@dataclass(frozen=True)
class Objective:
    """What is learnt: a name, whether a reference is needed, how many rows of a batch belong together, a loss.

    loss(logp_BT, batch) is pure, and reads logp_BT only where mask_BT is not 0: an engine may leave the others 0 and
    never make their logits. ``rows`` is 1, or 2 for pairs, which engines and loops never split.

    reference     the batch has ``ref_logp_B``, the reference's log-probability of each row's learnt tokens
    weigh         what each token counts in it, weight_BT of a batch (None: mask_BT)
    divergence    the batch has ``kl_B``, on every row the same estimate (divergence.py)
    """

    name: str
    loss: LossFunction
    reference: bool = False
    rows: int = 1
    weigh: Callable[[Batch], Tensor] | None = None
    divergence: bool = False

    def answers(self, logp_BT: Tensor, batch: Batch) -> Tensor:
        """logp_B, the log-probability of each row's learnt tokens."""
        return (logp_BT * (batch.mask_BT if self.weigh is None else self.weigh(batch))).sum(1)


Create = Callable[[Path], AbstractContextManager[Any]]
"""Opens a new file, which is written from its beginning to its end."""


def create(path: Path) -> AbstractContextManager[Any]:
    """One on the disk."""
    return path.open("wb")


def weights(objective: Objective, batches: Sequence[Batch]) -> dict[str, float]:
    """The weight of every term, summed over ``batches``."""
    total: dict[str, float] = {}
    for batch in batches:
        zeros_BT = torch.zeros(batch.tokens_BT.shape, dtype=torch.float32, device=batch.tokens_BT.device)
        for name, term in objective.loss(zeros_BT, batch).items():
            total[name] = total.get(name, 0.0) + float(term.weight)
    return total


class Engine(Protocol):
    """The few things a trainer asks of an engine. All ranks call every method, in the same order."""

    rank: int
    """This process among all; rank 0 writes files and prints."""
    dp_rank: int
    dp_size: int
    """Data-parallel coordinates: ranks with one dp_rank get the same micro-batches."""

    def step(self, micro_batches: Sequence[Batch], objective: Objective, lr: float) -> dict[str, float]:
        """One optimizer step. Returns each term's global sum / weight (not of terms that weigh nothing), and ``loss``
        and ``grad_norm``, the same on every rank. Raises RunError when the loss or the gradient norm is not finite; the
        weights are then those of before the step."""
        ...

    def score(self, batch: Batch, *, reference: bool = False) -> Tensor:
        """logp_BT (of a reward model value_BT; fp32, CPU, no gradient, dropout off) on every rank of the model-parallel
        group, to be read where mask_BT is not 0.
        ``reference=True`` turns the adapter off."""
        ...

    def total(self, value: float) -> float:
        """``value`` summed over the data parallel ranks."""
        ...

    def agree(self, value: int) -> int:
        """The largest ``value`` of all ranks; waits for all of them."""
        ...

    def save_state(self, directory: Path, create: Create = create) -> None:
        """Write what ``load_state`` needs to go on exactly where the engine is: weights as they are trained, optimizer,
        random state. Every rank writes what it alone holds into ``directory``, which is there, and opens each file by
        ``create``: it may give files in memory, to be written while the training goes on."""
        ...

    def load_state(self, directory: Path) -> None:
        """Go on from what ``save_state`` wrote under any layout of ranks. Raises InputError if the engine cannot
        (something of the state is missing, or is another model's)."""
        ...

    def save(self, staging: Staging | None) -> None:
        """Write the weights (a model, or a PEFT adapter) and their config into ``staging`` on rank 0 (None elsewhere):
        everything a directory of the layout needs but the manifest."""
        ...

    def close(self, *, stay: bool = False) -> None:
        """Leave the process groups. ``stay``: but not the world of ranks, where another engine is made next."""
        ...
