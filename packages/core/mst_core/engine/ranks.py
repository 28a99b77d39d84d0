"""The world of ranks: joining and leaving it, sums and maxima over it."""

from __future__ import annotations

import datetime
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mst_core import cluster, devices


def join(timeout: float = 1800.0) -> torch.device:
    """Join the world that the launcher made, for whose ranks this one waits ``timeout`` seconds; where it computes."""
    kind = devices.best()
    if not dist.is_initialized():
        wait = datetime.timedelta(seconds=timeout)
        dist.init_process_group(devices.collective_backend(kind), timeout=wait)
    if kind == "cpu":
        return torch.device("cpu")
    device = torch.device(kind, cluster.local_rank() % devices.count(kind))
    torch.get_device_module(kind).set_device(device)
    return device


def limit(timeout: float) -> None:
    """From now on the collectives of every group wait so many seconds. Groups that libraries made have their own."""
    if dist.is_initialized():
        for group in list(dist.distributed_c10d._world.pg_map):
            dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=timeout), group)


def first_to_speak() -> bool:
    """Whether no other rank has an error that it says. Where ranks cannot tell, every one speaks."""
    if not dist.is_initialized():
        return True
    try:
        store = dist.distributed_c10d._get_default_store()
        first = store.add("mst/spoke", 1) == 1
        end = time.monotonic() + 2.0
        # The store may end with rank 0.
        while not dist.get_rank() and store.add("mst/spoke", 0) < dist.get_world_size() and time.monotonic() < end:
            time.sleep(0.1)
    except RuntimeError:
        return True
    return first


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


def merged(table: Tensor) -> Tensor:
    """The largest of all ranks' values at each place, on the CPU; one process alone has them all."""
    if not dist.is_initialized():
        return table
    found = table.to(join())
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.cpu()
