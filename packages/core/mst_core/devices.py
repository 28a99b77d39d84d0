"""What this machine has. Importing this costs nothing; asking loads torch."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

Device = Literal["cuda", "npu", "cpu"]


def best() -> Device:
    """The accelerator that torch can use here: CUDA, else Ascend's NPU, else the CPU."""
    import torch

    if torch.cuda.is_available():
        return "cuda"
    npu = getattr(torch, "npu", None)
    return "npu" if npu is not None and npu.is_available() else "cpu"


def count(device: Device) -> int:
    """How many devices of a kind there are; a CPU counts as one."""
    import torch

    if device == "cuda":
        return torch.cuda.device_count()
    return int(torch.npu.device_count()) if device == "npu" else 1  # type: ignore[attr-defined]  # torch_npu adds it


def precision() -> Literal["fp32", "bf16"]:
    """What to compute in when nothing is asked: many CPUs are a hundred times slower in bf16 than in fp32."""
    return "fp32" if best() == "cpu" else "bf16"


def collective_backend(device: Device) -> str:
    """The torch.distributed backend of a device."""
    return {"cuda": "nccl", "npu": "hccl", "cpu": "gloo"}[device]


CONTROL_GROUPS = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)
"""Where a container's limit, its use and the part of it that is cache stand (cgroup 2 and 1)."""


def free_memory() -> int:
    """Bytes that a process may still take: what the kernel calls available, or what a container has left, if less."""
    meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(meminfo["MemAvailable"].split()[0]) * 1024
    for names in CONTROL_GROUPS:
        limit, used, stat = (Path("/sys/fs/cgroup", name) for name in names[:3])
        if limit.is_file() and (most := limit.read_text().strip()) != "max":
            cache = dict(line.split() for line in stat.read_text().splitlines())[names[3]]
            free = min(free, int(most) - int(used.read_text()) + int(cache))
    return max(0, free)
