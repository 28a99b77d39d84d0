"""The fsdp engine: torch's fully_shard on a transformers model, over gloo on CPUs and nccl on CUDA.

Each decoder layer and the root (embedding, last norm, head) is a group of its own: fp32 parameters, sharded, gathered
for its forward and backward pass; gradients are summed, never divided (the seam's terms have their global weights).
transformers' Trainer turns FSDP into DDP on a CPU without a word; here what was sharded is counted.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from mst_core.engine import ranks, state_files
from mst_core.engine.hf import HFEngine
from mst_core.engine.seam import Create, create
from mst_core.errors import RunError
from mst_core.runspec import RunSpec


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

    def agree(self, value: int) -> int:
        """The largest of all ranks'."""
        return ranks.largest(value, self.device)

    def save_state(self, directory: Path, create: Create = create) -> None:
        """This rank's rows of the weights that are trained and of AdamW's moments."""
        facts = {"steps": self.steps}
        state_files.save(directory, self.rank, self.dp_size, self._parts(), facts, create)

    def load_state(self, directory: Path) -> None:
        """What ``save_state`` wrote on any number of ranks."""
        with torch.no_grad():
            found = state_files.load(directory, self.rank, self.dp_size, self._parts())
        for name, parameter in self.trained:
            if name in found.updates:  # of which this rank has rows
                state_files.count(self.optimizer, parameter, found.updates[name])
        self.steps = found.facts["steps"]

    def _parts(self) -> list[state_files.Part]:
        """The rows that this rank holds: fully_shard gives every rank as many, the last ones fewer or none."""
        parts = []
        for name, parameter in self.trained:
            held = {"weight": parameter.detach(), **state_files.moments(self.optimizer, parameter)}
            rows, columns = parameter.shape[0], math.prod(parameter.shape[1:])
            first = self.rank * math.ceil(rows / self.dp_size)
            if first < rows:
                local = {kind: self._local(value).view(-1, columns) for kind, value in held.items()}
                updates = state_files.updates(self.optimizer, parameter)
                parts.append(state_files.Part(name, (rows, columns), first, 0, local, updates))
        return parts

    def close(self, *, stay: bool = False) -> None:
        """Leave the world."""
        if not stay:
            ranks.leave()

    def _logits(self, tokens_BT: Tensor, positions_BT: Tensor | None = None) -> Tensor:
        """Every rank makes as many."""
        logits_BTV = super()._logits(tokens_BT, positions_BT)
        if not torch.is_grad_enabled():
            # The root's own parameters wait whole for a backward pass; PEFT would turn those on again after a
            # reference's pass, and not the parts that are trained.
            self.model.reshard()
        return logits_BTV

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
