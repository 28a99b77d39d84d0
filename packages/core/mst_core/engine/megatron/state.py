"""The training state of a rank: what it trains, the optimizer's own copies and moments, the random state.

Each rank writes what it holds, so going on is exact whatever the optimizer is (fp32, mixed precision, distributed), and
bound to the layout of ranks that wrote it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mst_core.engine.megatron.optimizer import parts, scaler_of
from mst_core.engine.seam import Create, create
from mst_core.errors import InputError
from mst_core.runspec import RunSpec

LAYOUT = (
    "tp", "pp", "vp", "cp", "ep", "expert_tp", "dp", "sp", "distributed_optimizer", "precision",
    "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers",
)  # fmt: skip


def save(
    directory: Path, spec: RunSpec, chunks: Sequence[Any], optimizer: Any, steps: int, create: Create = create
) -> None:
    """rank-00000.pt and so on."""
    state = {
        "layout": {name: getattr(spec, name) for name in LAYOUT},
        "steps": steps,
        "weights": {name: p.detach() for name, p in _trained(chunks)},
        "optimizers": [
            {"copies": _copies(one), "state": one.optimizer.state_dict()} for one in parts(optimizer) if one.optimizer
        ],
        "scale": scaler.state_dict() if (scaler := scaler_of(optimizer)) else None,
        "random": torch.get_rng_state(),
    }
    with create(directory / _name()) as file:
        torch.save(state, file)


def load(directory: Path, spec: RunSpec, chunks: Sequence[Any], optimizer: Any) -> int:
    """What ``save`` wrote on this rank; the steps done. Raises InputError for another layout of ranks."""
    path = directory / _name()
    if not path.is_file():
        raise InputError("the run that is resumed had fewer ranks", where=path, hint="give its layout of ranks")
    state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    layout = {name: getattr(spec, name) for name in LAYOUT}
    differ = [f"{name} was {was}, is {layout[name]}" for name, was in state["layout"].items() if was != layout[name]]
    if differ:
        raise InputError(f"is of another layout of ranks: {', '.join(differ)}", where=path, hint="give the old one")
    with torch.no_grad():
        for name, weight in _trained(chunks):
            weight.copy_(state["weights"][name])
        for one, kept in zip((one for one in parts(optimizer) if one.optimizer), state["optimizers"], strict=True):
            for parameter, copy in zip(_copies(one), kept["copies"], strict=True):
                parameter.copy_(copy)
            one.optimizer.load_state_dict(kept["state"])
    if (scaler := scaler_of(optimizer)) is not None:
        scaler.load_state_dict(state["scale"])
    torch.set_rng_state(state["random"])
    return int(state["steps"])


def _trained(chunks: Sequence[Any]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """What is trained, by chunk and name."""
    for number, chunk in enumerate(chunks):
        yield from ((f"{number}.{name}", p) for name, p in chunk.named_parameters() if p.requires_grad)


def _copies(one: Any) -> list[torch.Tensor]:
    """What the inner optimizer steps: the weights, or fp32 copies (of this rank's shard)."""
    return [p.detach() for group in one.optimizer.param_groups for p in group["params"]]


def _name() -> str:
    return f"rank-{dist.get_rank():05d}.pt"
