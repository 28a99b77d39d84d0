"""The training state of Megatron ranks by the names of its whole matrices: any layout goes on from any other.

Tensor, pipeline, expert and data parallel ranks, with or without the distributed optimizer and whatever the precision:
each knows which block of which matrix its parameters are (shards.Spot), and which of their elements it steps
(optimizer.Held). state_files has the format.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mst_core.engine import state_files
from mst_core.engine.megatron.optimizer import Held, held, scaler_of
from mst_core.engine.megatron.shards import Spot, Spots
from mst_core.engine.seam import Create, create
from mst_core.engine.state_files import Part

PADDED = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Their rows are rounded up to a multiple of the tensor parallel size; those beyond the vocabulary are never learnt."""


def save(directory: Path, spots: Spots, optimizer: Any, steps: int, create: Create = create) -> None:
    """What no rank before this one has."""
    parts: list[Part] = []
    for one in held(optimizer):
        kinds = {"weight": one.main, **state_files.moments(one.inner, one.main)}
        count = state_files.updates(one.inner, one.main)
        for spot in spots[one.parameter]:
            if not spot.replica and (one.sharded or spot.dp_rank == 0):
                parts += _cut(spot, one.start, kinds, count)
    facts = {"steps": steps, "scale": _scale(scaler_of(optimizer))}
    state_files.save(directory, dist.get_rank(), dist.get_world_size(), parts, facts, create)


@torch.no_grad()
def load(directory: Path, spots: Spots, optimizer: Any) -> int:
    """Weights and optimizer of this rank from what any layout saved; the steps done. InputError: see state_files."""
    mine = list(held(optimizer))
    parts = [part for p, found in spots.items() for spot in found for part in _cut(spot, 0, {"weight": p})]
    for one in mine:
        kinds = {"weight": one.main} if _is_copy(one) else {}
        kinds |= state_files.moments(one.inner, one.main)
        parts += [part for spot in spots[one.parameter] for part in _cut(spot, one.start, kinds)]
    found = state_files.load(directory, dist.get_rank(), dist.get_world_size(), parts, PADDED)
    for one in mine:
        state_files.count(one.inner, one.main, found.updates[spots[one.parameter][0].name])
    if (scaler := scaler_of(optimizer)) is not None:
        scale = found.facts["scale"]
        scaler.load_state_dict({**scale, "scale": torch.tensor([scale["scale"]], dtype=torch.float32)})
    return int(found.facts["steps"])


def _cut(spot: Spot, start: int, kinds: Mapping[str, Tensor], count: float = 0.0) -> Iterator[Part]:
    """The part of a spot in ``kinds``: elements of the parameter from ``start`` on."""
    flat = {kind: value.detach().view(-1) for kind, value in kinds.items()}
    first = max(spot.start, start)
    last = min(spot.start + spot.rows * spot.columns, start + next(iter(flat.values())).numel())
    if first < last:
        inside = {kind: value[first - start : last - start] for kind, value in flat.items()}
        at = (spot.row, spot.column)
        yield from state_files.cut(spot.name, spot.whole, at, spot.columns, first - spot.start, inside, count)


def _is_copy(one: Held) -> bool:
    """Whether what is stepped has memory of its own: filling the parameter does not fill it."""
    inside = one.start * one.parameter.element_size()
    return one.main.data_ptr() != one.parameter.data_ptr() + inside


def _scale(scaler: Any) -> dict[str, Any] | None:
    """The loss scale of fp16, as JSON has it."""
    return None if scaler is None else {**scaler.state_dict(), "scale": float(scaler.state_dict()["scale"])}
