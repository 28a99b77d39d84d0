"""The fsdp engine: torch's fully_shard on a transformers model, over gloo on CPUs and nccl on CUDA.

Each decoder layer and the root (embedding, last norm, head) is a group of its own: fp32 parameters, sharded, gathered
for its forward and backward pass; gradients are summed, never divided (the seam's terms have their global weights).
transformers' Trainer turns FSDP into DDP on a CPU without a word; here what was sharded is counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from mst_core.engine import ranks
from mst_core.engine.hf import HFEngine
from mst_core.engine.seam import Batch
from mst_core.errors import InputError, RunError
from mst_core.runspec import RunSpec

MOMENTS = ("exp_avg", "exp_avg_sq")


class FsdpEngine(HFEngine):
    """One rank of the run. See seam.Engine for the methods."""

    def __init__(self, spec: RunSpec, model_dir: Path) -> None:
        super().__init__(spec, model_dir)
        self.device = ranks.join(spec.timeout)
        self.rank = self.dp_rank = dist.get_rank()
        self.dp_size = dist.get_world_size()
        mesh = init_device_mesh(self.device.type, (self.dp_size,))
        for module in (*self.layers, self.model):
            wrapped = fully_shard(module, mesh=mesh)
            wrapped.set_gradient_divide_factor(1.0)
            wrapped.set_force_sum_reduction_for_comms(True)
        _check_sharded(self.model)
        self.model.to(self.device)  # buffers
        self.optimizer = self._adamw()

    def score(self, batch: Batch, *, reference: bool = False) -> Tensor:
        """logp_BT, fp32 on the CPU. Every rank scores as many batches."""
        logp_BT = super().score(batch, reference=reference)
        self.model.reshard()  # the root's own parameters wait for a backward pass
        return logp_BT

    def agree(self, value: int) -> int:
        """The largest of all ranks'."""
        return ranks.largest(value, self.device)

    def save_state(self, directory: Path) -> None:
        """This rank's rows of the weights that are trained and of AdamW's moments: rank-00000.pt and so on."""
        state: dict[str, Any] = {"ranks": self.dp_size, "steps": self.steps, "weights": {}, "moments": {}}
        for name, parameter in self.trained:
            held = self.optimizer.state[parameter]
            state["weights"][name] = self._local(parameter.detach())
            state["moments"][name] = {kind: self._local(held[kind]) for kind in MOMENTS} | {"step": held["step"]}
        torch.save({**state, "random": torch.get_rng_state()}, directory / _file(self.rank))

    def load_state(self, directory: Path) -> None:
        """What ``save_state`` wrote on any number of ranks: rows are cut anew."""
        first = _read(directory / _file(0))
        files = [_read(directory / _file(rank)) for rank in range(first["ranks"])]

        def rows(parameter: Tensor, parts: Sequence[Tensor]) -> Tensor:
            """This rank's rows of a tensor that is cut along axis 0 into ``parts``."""
            size = math.ceil(parameter.shape[0] / self.dp_size)
            held = self._local(parameter).shape[0]
            return torch.cat(list(parts)).narrow_copy(0, min(self.rank * size, parameter.shape[0]), held)

        with torch.no_grad():
            for name, parameter in self.trained:
                self._local(parameter).copy_(rows(parameter, [file["weights"][name] for file in files]))
                held = self.optimizer.state[parameter]
                held["step"] = first["moments"][name]["step"].clone()
                for kind in MOMENTS:
                    held[kind] = torch.zeros_like(parameter)
                    self._local(held[kind]).copy_(rows(parameter, [file["moments"][name][kind] for file in files]))
        self.steps = first["steps"]
        torch.set_rng_state(first["random"])

    def close(self) -> None:
        """Leave the world."""
        ranks.leave()

    def _sum(self, values: dict[str, float]) -> dict[str, float]:
        return ranks.summed(values, self.device)

    def _whole(self, parameter: Tensor) -> Tensor:
        return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter

    def _local(self, tensor: Tensor) -> Tensor:
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def _norm(self, grads: list[Tensor]) -> float:
        return math.sqrt(self._sum({"squares": super()._norm(grads) ** 2})["squares"])


def _check_sharded(model: torch.nn.Module) -> None:
    """Raises RunError unless decoder layers are groups of their own and no parameter is whole."""
    whole = [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]
    layers = sum(isinstance(module, FSDPModule) for module in model.modules()) - 1
    if layers < 1 or whole:
        what = f"fully_shard wrapped {layers} decoder layers and left {len(whole)} parameters whole"
        raise RunError(what, hint="this architecture is not known to the fsdp engine; take --engine plain or deepspeed")


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise InputError("is not there: the state of a rank is missing", where=path)
    found: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    return found


def _file(rank: int) -> str:
    return f"rank-{rank:05d}.pt"
