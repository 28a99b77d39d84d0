"""What a step's time and memory say: tokens/s, MFU, waiting for data, peak memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from mst_core import devices, families, flops, tensors
from mst_core.flops import Cost
from mst_core.runspec import RunSpec


class Meter:
    """Of one run. MFU is left out where the device's peak, or what a token costs, is not known."""

    def __init__(self, spec: RunSpec, cost: Cost | None = None) -> None:
        self.ranks, self.cost = spec.ranks, cost
        self.device = devices.best()
        name = torch.cuda.get_device_name() if self.device == "cuda" else self.device
        self.peak = spec.peak_tflops or flops.peak(name, spec.precision)

    @classmethod
    def of(cls, spec: RunSpec, model_dir: Path) -> Meter:
        """For the model in ``model_dir``."""
        hf = model_dir / "hf" if (model_dir / "hf" / "config.json").is_file() else model_dir
        config = tensors.config(hf)
        model = families.family_for(config, hf).model(config, hf)
        return cls(spec, flops.cost(model, config, spec))

    def measure(self, lengths: Sequence[int], wait: float, seconds: float) -> dict[str, float]:
        """Of a step over sequences of so many tokens (padding apart): ``wait`` seconds for its tensors, then
        ``seconds``."""
        rate = sum(lengths) / (wait + seconds)
        found = {"tokens_per_s": rate, "tokens_per_s_per_gpu": rate / self.ranks, "data_wait_s": wait}
        if self.cost is not None and self.peak is not None:
            found["mfu"] = self.cost.step(lengths) / (wait + seconds) / (self.ranks * self.peak * 1e12)
        return found

    def memory(self) -> int:
        """The most bytes so far: of the device's memory that torch had in use, on a CPU of this process."""
        if self.device != "cpu":
            return int(torch.get_device_module(self.device).max_memory_allocated())
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024
