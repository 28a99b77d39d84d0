"""The world of ranks: joining and leaving it, sums and maxima over it."""

from __future__ import annotations

import datetime
from typing import Any

import torch
import torch.distributed as dist

from mst_core import devices

TIMEOUT = datetime.timedelta(minutes=30)


def join() -> torch.device:
    """Join the world that the launcher made; where this rank computes."""
    kind = devices.best()
    if not dist.is_initialized():
        dist.init_process_group(devices.collective_backend(kind), timeout=TIMEOUT)
    if kind == "cpu":
        return torch.device("cpu")
    device = torch.device(kind, dist.get_rank() % devices.count(kind))
    torch.get_device_module(kind).set_device(device)
    return device


def leave() -> None:
    """Leave the world."""
    if dist.is_initialized():
        dist.destroy_process_group()


def summed(values: dict[str, float], device: torch.device, group: Any = None) -> dict[str, float]:
    """Each value (fp64) summed over all ranks of ``group`` (None: the world), which have the same names."""
    names = sorted(values)
    table = torch.tensor([values[name] for name in names], dtype=torch.float64, device=device)
    dist.all_reduce(table, group=group)
    return dict(zip(names, table.tolist(), strict=True))


def largest(value: int, device: torch.device) -> int:
    """The largest of all ranks' values; waits for all of them."""
    found = torch.tensor([value], device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return int(found)
