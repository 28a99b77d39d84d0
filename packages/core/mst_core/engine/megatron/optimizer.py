"""DDP and optimizer around the model: gradients reduced in fp32, nothing divided by Megatron."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mst_core.engine.megatron.model import dtype_of
from mst_core.runspec import RunSpec

MIN_LOSS_SCALE = 1.0
"""fp16: gradients that overflow even so are an error."""


def wrap(chunks: Sequence[Any], spec: RunSpec) -> tuple[list[Any], Any]:
    """(the chunks in DDP, the optimizer of all)."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import get_megatron_optimizer

    config = chunks[0].config
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=spec.distributed_optimizer,
        overlap_grad_reduce=spec.overlap_grad_reduce,
        overlap_param_gather=spec.overlap_param_gather,
    )
    # As in Megatron's training: later virtual stages are not bucketed, for their turn comes while others compute.
    wrapped = [
        DistributedDataParallel(config, ddp, chunk, disable_bucketing=number > 0) for number, chunk in enumerate(chunks)
    ]
    for chunk in wrapped:
        chunk.broadcast_params()
    optimizer = get_megatron_optimizer(_settings(spec), wrapped, use_gloo_process_groups=torch.cuda.is_available())
    _hooks(config, wrapped, optimizer, spec)
    return wrapped, optimizer


def _settings(spec: RunSpec) -> Any:
    from megatron.core.optimizer import OptimizerConfig

    dtype = dtype_of(spec)
    return OptimizerConfig(
        optimizer="adam",
        lr=spec.lr,
        min_lr=spec.min_lr,
        weight_decay=spec.weight_decay,
        adam_beta1=spec.adam_beta1,
        adam_beta2=spec.adam_beta2,
        adam_eps=spec.adam_eps,
        clip_grad=spec.clip_grad,
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        initial_loss_scale=spec.initial_loss_scale,
        min_loss_scale=MIN_LOSS_SCALE,
        loss_scale_window=spec.loss_scale_window,
        hysteresis=1,
        params_dtype=dtype,
        use_distributed_optimizer=spec.distributed_optimizer,
        overlap_param_gather=spec.overlap_param_gather,
        log_num_zeros_in_grad=False,
    )


def _hooks(config: Any, wrapped: list[Any], optimizer: Any, spec: RunSpec) -> None:
    """What Megatron's schedules call: the loss scale, the end of a step, when to communicate."""
    from megatron.core.distributed import finalize_model_grads

    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = lambda chunks, _tokens=None, **options: finalize_model_grads(
        chunks, None, **{name: value for name, value in options.items() if name == "pg_collection"}
    )
    alone = len(wrapped) == 1
    if spec.overlap_grad_reduce:
        waits = [chunk.no_sync for chunk in wrapped]
        starts = [chunk.start_grad_sync for chunk in wrapped]
        config.no_sync_func = waits[0] if alone else waits
        config.grad_sync_func = starts[0] if alone else starts
    if spec.overlap_param_gather:
        gathers = [chunk.start_param_sync for chunk in wrapped]
        config.param_sync_func = gathers[0] if alone else gathers


def parts(optimizer: Any) -> list[Any]:
    """Megatron chains an optimizer of experts, and one of each virtual stage, to the first."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


class Held(NamedTuple):
    """What an optimizer keeps of a parameter on this rank.

    main      fp32, what is stepped: the parameter itself, or a copy, of its elements from ``start`` on
    inner     torch's optimizer (or a fused one) that steps ``main``
    sharded   each data parallel rank has other elements
    """

    parameter: torch.nn.Parameter
    main: Tensor
    start: int
    inner: Any
    sharded: bool


def held(optimizer: Any) -> Iterator[Held]:
    """Of every parameter that this rank steps, or a part of it."""
    for one in parts(optimizer):
        if one.optimizer is None:
            continue  # nothing to step on this rank
        sharded = hasattr(one, "shard_fp32_groups")
        for parameter, main in _pairs(one, sharded):
            start = one._get_model_param_range_map(parameter)["param"].start if sharded else 0
            yield Held(parameter, main, start, one.optimizer, sharded)


def _pairs(one: Any, sharded: bool) -> Iterator[tuple[torch.nn.Parameter, Tensor]]:
    """(the model's parameter, what is stepped for it)."""
    if sharded:
        tables = [
            (one.model_float16_groups, one.shard_fp32_from_float16_groups),
            (one.model_fp32_groups, one.shard_fp32_groups),
        ]
    elif hasattr(one, "float16_groups"):
        tables = [
            (one.float16_groups, one.fp32_from_float16_groups),
            (one.fp32_from_fp32_groups, one.fp32_from_fp32_groups),
        ]
    else:
        found = [group["params"] for group in one.param_groups]
        tables = [(found, found)]
    for models, mains in tables:
        for model, main in zip(models, mains, strict=True):
            yield from zip(model, main, strict=True)


def scaler_of(optimizer: Any) -> Any:
    """The loss scale of fp16, None otherwise."""
    return next((part.grad_scaler for part in parts(optimizer) if getattr(part, "grad_scaler", None)), None)


def share_loss_scale(optimizer: Any) -> Callable[[bool], None]:
    """fp16: one loss scale for all parts, and the function that updates it once a step, knowing what all parts found.

    Megatron's parts have a scale each, and each lowers its own: once only the experts' gradients overflow, the loss is
    scaled by one scale and their gradients are divided by another.
    """
    scaler = scaler_of(optimizer)
    if scaler is None:
        return lambda overflow: None
    update = scaler.update
    scaler.update = lambda overflow: None
    for part in parts(optimizer):
        part.grad_scaler = scaler
    return update


def finish_gather(wrapped: Sequence[Any], spec: RunSpec) -> None:
    """Whole parameters on every rank, where the next forward pass would have gathered them."""
    if spec.overlap_param_gather:
        for chunk in wrapped:
            chunk.start_param_sync(force_sync=True)
