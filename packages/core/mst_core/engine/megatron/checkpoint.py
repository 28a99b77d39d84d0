"""Weights in and out: in by megatron-core's own loader, out tensor by tensor to rank 0 and our one writer.

Megatron's writer puts a random id, and an order that depends on the ranks, into its files. A finished checkpoint of
ours is the same bytes under any layout, so it goes through mst_core.torch_dist.TorchDistWriter.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mst_core import families, megatron_names, tensors, torch_dist
from mst_core.checkpoint import Staging
from mst_core.engine.megatron import groups
from mst_core.errors import InputError


def load(model: Any, model_dir: Path) -> None:
    """Every weight of this rank, with megatron-core's default strictness. Raises InputError with what is missing."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.core import CheckpointingException

    directory = torch_dist.checkpoint_dir(model_dir)
    try:
        state = dist_checkpointing.load({"model": model.sharded_state_dict()}, str(directory))["model"]
    except (CheckpointingException, KeyError, ValueError) as error:
        raise InputError(f"megatron-core cannot load it: {error}", where=directory) from error
    missing, unexpected = model.load_state_dict(state, strict=False)
    unloaded = [name for name in missing if "_extra_state" not in name]
    if unloaded or unexpected:
        raise InputError(f"not loaded: {', '.join([*unloaded, *unexpected])}", where=directory)


@dataclass(frozen=True)
class _Piece:
    """One block of a global tensor on one rank."""

    key: str
    layer: int | None
    rank: int
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    whole: tuple[int, ...]
    dtype: torch.dtype


def gather(model: Any) -> Iterator[tuple[str, int | None, Tensor]]:
    """(torch_dist key, layer, full tensor on the CPU) one after another on rank 0, nothing elsewhere.

    Every rank must exhaust it. Only one full tensor is alive at a time.
    """
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories, is_main_replica

    state = model.sharded_state_dict()
    apply_factories(state)
    mine: dict[_Piece, Tensor] = {}
    for part in nested_values(state):
        if isinstance(part, ShardedTensor) and is_main_replica(part.replica_id):
            axes = part.prepend_axis_num
            layer = part.global_offset[0] if axes else None
            offset, whole = tuple(part.global_offset[axes:]), tuple(part.global_shape[axes:])
            shape, dtype = tuple(part.data.shape), part.data.dtype
            mine[_Piece(part.key, layer, dist.get_rank(), shape, offset, whole, dtype)] = part.data
    everyone: list[list[_Piece]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, list(mine))
    units: dict[tuple[str, int], list[_Piece]] = {}
    for piece in (piece for pieces in everyone for piece in pieces):
        units.setdefault((piece.key, -1 if piece.layer is None else piece.layer), []).append(piece)
    for key, layer in sorted(units):
        pieces = sorted(units[key, layer], key=lambda piece: (piece.offset, piece.rank))
        full = _assemble(pieces, mine)
        if full is not None:
            yield key, None if layer < 0 else layer, full


def _assemble(pieces: list[_Piece], mine: dict[_Piece, Tensor]) -> Tensor | None:
    """The full tensor on rank 0: its own pieces copied, the others' received."""
    rank, device = dist.get_rank(), groups.device()
    if rank:
        for piece in pieces:
            if piece.rank == rank:
                dist.send(mine[piece].detach().contiguous(), 0)
        return None
    full: Tensor | None = None
    for piece in pieces:
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


def save(model: Any, model_dir: Path, staging: Staging | None) -> None:
    """A Megatron directory with the dtypes, the vocabulary padding and the ``hf/`` of ``model_dir``."""
    stored = torch_dist.metadata(torch_dist.checkpoint_dir(model_dir))
    writer = None if staging is None else torch_dist.TorchDistWriter(staging)
    for key, layer, full in gather(model):
        if writer is None:
            continue
        found, _ = torch_dist.find(stored, key, layer)
        shape = found.shape[1:] if layer is not None else found.shape
        # The engine may pad the vocabulary further than the directory it came from: those rows are dropped again.
        kept = full[: shape[0]].to(tensors.torch_dtype(found.dtype)).contiguous()
        lead, at = ((found.shape[0],), (layer,)) if layer is not None else ((), ())
        chunk = torch_dist.Written(
            key, found.dtype, (*lead, *shape), (*at, *(0 for _ in shape)), (*(1 for _ in lead), *shape)
        )
        writer.put(chunk, kept)
    if staging is None or writer is None:
        return
    hf = model_dir / "hf"
    config = json.loads((hf / "config.json").read_text())
    family = families.family_for(config, str(hf))
    rows = stored["embedding.word_embeddings.weight"].shape[0]
    naming = megatron_names.naming(family.model(config), "te", "stacked")
    named = [(task, *naming.key(task)) for task in families.tasks(family.model(config))]
    writer.finish(torch_dist.objects(named, torch_dist.release_state(family, config, rows, hf)))
    torch_dist.write_megatron_sidecar(staging, {path.name: path for path in sorted(hf.iterdir()) if path.is_file()})
