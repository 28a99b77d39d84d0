"""Process groups and seeds of a rank. The launcher's variables tell torch who we are (torchrun's convention)."""

from __future__ import annotations

import gc

import torch
import torch.distributed as dist

from mst_core.engine import ranks
from mst_core.engine.megatron import cpu


def start(
    tp: int,
    pp: int,
    seed: int,
    *,
    vp: int = 1,
    cp: int = 1,
    ep: int = 1,
    etp: int | None = None,
    timeout: float = 1800.0,
) -> None:
    """Join the world and make Megatron's groups: tensor parallel ranks adjacent, then context, data, pipeline."""
    cpu.apply()
    from megatron.core import parallel_state, tensor_parallel

    place = ranks.join(timeout)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vp if vp > 1 else None,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        create_gloo_process_groups=place.type != "cpu",
        distributed_timeout_minutes=timeout / 60,  # gloo's point to point takes that of a group's making
    )
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def stop() -> None:
    """Leave the groups and the world."""
    leave()
    ranks.leave()


def leave() -> None:
    """Leave Megatron's groups but not the world, so that a process can build another layout.

    megatron-core only forgets its groups. Each gloo group is a thread that wakes a hundred times a second, so dozens
    of forgotten layouts would eat the machine.
    """
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    for group in list(dist.distributed_c10d._world.pg_map):
        if group != dist.group.WORLD:
            dist.destroy_process_group(group)
    gc.collect()


def device() -> torch.device:
    """Where this rank computes."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
