"""The model as megatron-core's sharded state dict: which block of which global tensor each rank holds."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mst_core.engine.megatron import groups
from mst_core.errors import RunError


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
    from megatron.core.dist_checkpointing.mapping import is_main_replica

    for piece, part in _sharded(chunks, per_layer):
        if not main or is_main_replica(part.replica_id):
            yield piece, part.data


def _sharded(chunks: Sequence[Any], per_layer: bool) -> Iterator[tuple[Piece, Any]]:
    """This rank's blocks, each with its ShardedTensor."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    state = state_of(chunks, per_layer)
    apply_factories(state)
    for part in nested_values(state):
        if isinstance(part, ShardedTensor):
            axes = part.prepend_axis_num
            lead, offset = tuple(part.global_offset[:axes]), tuple(part.global_offset[axes:])
            shape, whole = tuple(part.data.shape), tuple(part.global_shape[axes:])
            yield Piece(part.key, lead, dist.get_rank(), shape, offset, whole, part.data.dtype), part


@dataclass(frozen=True)
class Spot:
    """Where elements of a parameter stand in a whole matrix: ``rows`` x ``columns`` elements of it, from ``start`` on,
    are the block at (``row``, ``column``) of ``name``.

    replica   a rank of the same data parallel rank holds the block too, and comes first
    dp_rank   this rank among those that hold the block for data parallelism, context parallel ranks included
    """

    name: str
    whole: tuple[int, int]
    row: int
    column: int
    rows: int
    columns: int
    start: int
    replica: bool
    dp_rank: int


Spots = dict[torch.nn.Parameter, list[Spot]]


def spots(chunks: Sequence[Any], per_layer: bool) -> Spots:
    """Of every parameter that is trained. RunError for one that Megatron's sharded state leaves out."""
    trained = sorted((p for chunk in chunks for p in chunk.parameters() if p.requires_grad), key=Tensor.data_ptr)
    starts = [p.data_ptr() for p in trained]
    found: Spots = {p: [] for p in trained}
    for piece, part in _sharded(chunks, per_layer):
        at = bisect_right(starts, part.data.data_ptr()) - 1
        start = (part.data.data_ptr() - starts[at]) // part.data.element_size() if at >= 0 else 0
        if at < 0 or start >= trained[at].numel():
            continue  # a buffer
        lead = f"[{','.join(map(str, piece.lead))}]" if piece.lead else ""
        (rows, columns), whole = _matrix(piece.shape), _matrix(piece.whole)
        column = piece.offset[1] if len(piece.shape) > 1 else 0
        *others, dp_rank = part.replica_id
        spot = Spot(piece.key + lead, whole, piece.offset[0], column, rows, columns, start, any(others), dp_rank)
        found[trained[at]].append(spot)
    for parameter, of in found.items():
        if sum(spot.rows * spot.columns for spot in of) != parameter.numel():
            raise RunError(f"a parameter of shape {list(parameter.shape)} has no name in Megatron's checkpoints")
    return found


def _matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    return shape[0], prod(shape[1:])


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
