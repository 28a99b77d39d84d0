"""The model as megatron-core's sharded state dict: which block of which global tensor each rank holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mst_core.engine.megatron import groups


def state_of(chunks: Sequence[Any], per_layer: bool) -> dict[str, Any]:
    """The sharded state of this rank's chunks, by "model0", "model1", ...

    per_layer   layers have keys of their own, instead of one key and a leading layer axis
    """
    form = {"non_homogeneous_layers": per_layer}
    return {f"model{n}": chunk.sharded_state_dict(metadata=dict(form)) for n, chunk in enumerate(chunks)}


@dataclass(frozen=True)
class Piece:
    """One block of a global tensor on one rank.

    lead     index along the leading axes (layer, expert), of which a block has one entry each
    offset   where the block begins in the rest, which is ``whole``
    """

    key: str
    lead: tuple[int, ...]
    rank: int
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    whole: tuple[int, ...]
    dtype: torch.dtype


def pieces(chunks: Sequence[Any], per_layer: bool, *, main: bool) -> Iterator[tuple[Piece, Tensor]]:
    """This rank's blocks, each with its tensor (a view of the parameter); ``main``: only those that no rank before it
    holds too."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories, is_main_replica

    state = state_of(chunks, per_layer)
    apply_factories(state)
    for part in nested_values(state):
        if isinstance(part, ShardedTensor) and (not main or is_main_replica(part.replica_id)):
            axes = part.prepend_axis_num
            lead, offset = tuple(part.global_offset[:axes]), tuple(part.global_offset[axes:])
            shape, whole = tuple(part.data.shape), tuple(part.global_shape[axes:])
            yield Piece(part.key, lead, dist.get_rank(), shape, offset, whole, part.data.dtype), part.data


def gather(chunks: Sequence[Any], per_layer: bool) -> Iterator[tuple[str, tuple[int, ...], Tensor | None]]:
    """(key, lead, whole tensor on the CPU) of every weight, on rank 0 one at a time; None on the other ranks.

    All ranks iterate. The order (by key, then lead) is that of any layout.
    """
    mine = dict(pieces(chunks, per_layer, main=True))
    everyone: list[list[Piece]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, list(mine))
    units: dict[tuple[str, tuple[int, ...]], list[Piece]] = {}
    for piece in (piece for found in everyone for piece in found):
        units.setdefault((piece.key, piece.lead), []).append(piece)
    for key, lead in sorted(units):
        found = sorted(units[key, lead], key=lambda piece: (piece.offset, piece.rank))
        yield key, lead, _assemble(found, mine)


def _assemble(found: list[Piece], mine: dict[Piece, Tensor]) -> Tensor | None:
    """The whole tensor on rank 0: its own pieces copied, the others' received."""
    rank, device = dist.get_rank(), groups.device()
    if rank:
        for piece in found:
            if piece.rank == rank:
                dist.send(mine[piece].detach().contiguous(), 0)
        return None
    full: Tensor | None = None
    for piece in found:
        if piece.rank == 0:
            block = mine[piece].detach().cpu()
        else:
            received = torch.empty(piece.shape, dtype=piece.dtype, device=device)
            dist.recv(received, piece.rank)
            block = received.cpu()
        if full is None:
            full = torch.zeros(piece.whole, dtype=block.dtype)
        full[tuple(slice(start, start + size) for start, size in zip(piece.offset, piece.shape, strict=True))] = block
    return full
