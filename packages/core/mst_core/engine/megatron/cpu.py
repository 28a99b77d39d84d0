"""The one bridge for machines without CUDA: real megatron-core over gloo and CPU tensors.

megatron-core names CUDA in six ways: the current device, ``device="cuda"`` in factories and ``.cuda()``, CUDA random
states, streams and synchronisation, the type strings by which its optimizers group parameters, and the copy of token
counts to the host in its MoE dispatchers. A seventh: parts of unequal sizes, which NCCL gathers and gloo does not.
``apply`` answers each for the CPU, once per process, and does nothing where CUDA is there. Nothing else in mst patches
anything.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch

_applied = False
_FACTORIES = (
    "arange", "empty", "empty_like", "full", "full_like", "ones", "ones_like", "rand", "randint", "randn", "tensor",
    "zeros", "zeros_like",
)  # fmt: skip


def apply() -> None:
    """Answer for CUDA on this machine's CPU. Call it before megatron is imported."""
    global _applied
    if _applied or torch.cuda.is_available():
        return
    _applied = True
    _device()
    _factories()
    _rng()
    _sync()
    _types()
    _experts()
    _unequal_parts()


def _device() -> None:
    cpu = torch.device("cpu")
    torch.cuda.current_device = lambda: cpu  # type: ignore[assignment,return-value]
    torch.cuda.set_device = lambda device: None
    torch.cuda.device_count = lambda: 1
    # With PYTORCH_NVML_BASED_CUDA_CHECK, which deepspeed and accelerate set, it would ask for the count above.
    torch.cuda.is_available = lambda: False


def _on_cpu(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        if "cuda" in str(kwargs.get("device", "")):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        return make(*args, **kwargs)

    return on_cpu


def _factories() -> None:
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    torch.Tensor.new_empty = _on_cpu(torch.Tensor.new_empty)  # type: ignore[method-assign]
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]


def _rng() -> None:
    """Megatron keeps CUDA generator states by name; here they are states of the CPU generator."""
    torch.cuda.get_rng_state = lambda device=None: torch.get_rng_state()
    torch.cuda.set_rng_state = lambda new_state, device=None: torch.set_rng_state(new_state)
    # torch.manual_seed itself calls manual_seed_all, so only the single-device one may call it back.
    torch.cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(seed)  # type: ignore[assignment]
    torch.cuda.manual_seed_all = lambda seed: None

    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda device=None, clone=False, graph_safe=False: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)


class _Nothing:
    """A stream or an event with nothing to wait for."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., _Nothing]:
        return lambda *args, **kwargs: _Nothing()  # record_event answers an event

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc: object) -> None:
        pass


def _sync() -> None:
    for name in ("synchronize", "empty_cache", "nvtx_range_push"):
        setattr(torch.cuda, name, lambda *args, **kwargs: None)
    torch.cuda.Stream = _Nothing  # type: ignore[assignment,misc]
    torch.cuda.Event = _Nothing  # type: ignore[assignment,misc]
    torch.cuda.current_stream = lambda device=None: _Nothing()  # type: ignore[assignment,return-value]
    torch.cuda.default_stream = lambda device=None: _Nothing()  # type: ignore[assignment,return-value]
    torch.cuda.stream = lambda stream: contextlib.nullcontext()  # type: ignore[assignment,return-value]
    torch.cuda.nvtx.range_push = lambda *args: 0
    torch.cuda.nvtx.range_pop = lambda *args: 0
    torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[method-assign,assignment]


def _types() -> None:
    """Megatron's optimizers sort parameters by ``param.type()``, and know only CUDA's names."""
    plain_type = torch.Tensor.type

    def type_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = plain_type(self, *args, **kwargs)
        return answer.replace("torch.", "torch.cuda.", 1) if not args and not kwargs else answer

    torch.Tensor.type = type_name  # type: ignore[method-assign,assignment]


def _experts() -> None:
    """The alltoall dispatcher wants its counts as numpy arrays, and gets them of CUDA tensors only."""
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    def on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    moe_utils.maybe_move_tensor_to_cpu = on_host
    token_dispatcher.maybe_move_tensor_to_cpu = on_host


def _unequal_parts() -> None:
    """Experts under tensor parallelism gather and scatter as many tokens as each rank has; gloo wants equal parts."""
    import torch.distributed as dist
    from megatron.core.tensor_parallel import mappings

    gather, scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def gather_parts(input_: torch.Tensor, group: Any, output_split_sizes: Any = None, *rest: Any) -> torch.Tensor:
        if output_split_sizes is None or group.size() == 1:
            return gather(input_, group, None, *rest)
        sizes = [int(size) for size in output_split_sizes]
        padded = input_.new_zeros(max(sizes), *input_.shape[1:])
        padded[: len(input_)] = input_
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    def scatter_parts(input_: torch.Tensor, group: Any, input_split_sizes: Any = None, *rest: Any) -> torch.Tensor:
        if input_split_sizes is None or group.size() == 1:
            return scatter(input_, group, None, *rest)
        whole = input_.clone()
        dist.all_reduce(whole, group=group)
        return whole.split([int(size) for size in input_split_sizes])[group.rank()].clone()

    mappings._gather_along_first_dim = gather_parts
    mappings._reduce_scatter_along_first_dim = scatter_parts


def is_applied() -> bool:
    """Whether this process runs over the bridge."""
    return _applied
