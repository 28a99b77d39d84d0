"""What a rank holds of weights and AdamW's state under DeepSpeed's ZeRO, whatever the stage, and back.

| stage | a rank holds |
|---|---|
| 0 | all of every parameter |
| 1, 2 | an equal share of all parameters laid end to end, group by group: whole parameters, and a part of two |
| 3 | an equal share of every parameter, the last one padded |

Either is a range of a parameter's elements, so a state that one stage wrote on some number of ranks (state_files) is
read by any stage on any other number. What is offloaded to CPU memory is held like what is not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mst_core.engine import state_files
from mst_core.engine.seam import Create, create
from mst_core.engine.state_files import Part


class Share(NamedTuple):
    """Elements of a parameter, from ``start`` on: ``weight`` (fp32, flat) are those of ``flat`` from ``at`` on, which
    is what ``inner`` steps."""

    name: str
    numel: int
    start: int
    weight: Tensor
    inner: Any
    flat: Tensor
    at: int

    def part(self) -> Part:
        """With the moments. ZeRO's parameters are rows of one line here."""
        size = self.weight.numel()
        moments = state_files.moments(self.inner, self.flat)
        self.inner.state[self.flat].setdefault("step", 0)  # DeepSpeedCPUAdam's is a number
        held = {kind: value.view(-1)[self.at : self.at + size].view(1, size) for kind, value in moments.items()}
        whole, updates = (1, self.numel), state_files.updates(self.inner, self.flat)
        return Part(self.name, whole, 0, self.start, {"weight": self.weight.view(1, size), **held}, updates)


def shares(optimizer: Any, stage: int, trained: Mapping[torch.nn.Parameter, str]) -> Iterator[Share]:
    """What this rank holds. ``trained``: the parameters and their names."""
    if stage == 0:
        for parameter, name in trained.items():
            flat = parameter.detach().view(-1)
            yield Share(name, flat.numel(), 0, flat, optimizer, parameter, 0)
    elif stage < 3:
        for group, flat in zip(optimizer.bit16_groups, optimizer.single_partition_of_fp32_groups, strict=True):
            for parameter in group:
                if (held := parameter._hp_mapping) is not None:
                    at, start = held.hp_fragment_address.start, held.lp_fragment_address.start
                    weight = held.hp_fragment.detach()
                    yield Share(trained[parameter], parameter.numel(), start, weight, optimizer.optimizer, flat, at)
    else:
        groups = zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True)
        for number, (group, flat) in enumerate(groups):
            at, inner = 0, _steps(optimizer, number)
            for parameter in group:
                size = parameter.partition_numel()
                start = size * dist.get_rank(optimizer.dp_process_group)
                if (real := min(size, parameter.ds_numel - start)) > 0:
                    weight = flat.detach()[at : at + real]
                    yield Share(trained[parameter], parameter.ds_numel, start, weight, inner, flat, at)
                at += size


def _steps(optimizer: Any, number: int) -> Any:
    """The optimizer that steps a sub-group of ZeRO 3: of what is offloaded in part, another one steps the rest."""
    if optimizer.offload_optimizer and optimizer.subgroup_to_device[number] != "cpu":
        return optimizer.backup_optimizer
    return optimizer.optimizer


def save(directory: Path, held: list[Share], stage: int, facts: Mapping[str, Any], create: Create = create) -> None:
    """What this rank alone holds."""
    rank = dist.get_rank()
    parts = [share.part() for share in held] if stage or not rank else []
    state_files.save(directory, rank, dist.get_world_size(), parts, facts, create)


@torch.no_grad()
def load(directory: Path, held: list[Share], optimizer: Any, stage: int) -> Mapping[str, Any]:
    """What any stage saved on any number of ranks; its facts. Every rank calls it."""
    parts = [share.part() for share in held]
    found = state_files.load(directory, dist.get_rank(), dist.get_world_size(), parts)
    for share in held:
        state_files.count(share.inner, share.flat, found.updates[share.name])
    if stage in (1, 2):
        optimizer.update_lp_params()
    elif stage == 3:
        optimizer.checkpoint_event_prologue()  # parameters that stay gathered are let go, and gathered again below
        for number in range(len(optimizer.fp16_groups)):
            optimizer._reassign_or_swap_out_partitioned_parameters(number)
        optimizer.checkpoint_event_epilogue()
    return found.facts
