"""The one bridge for machines without CUDA: real megatron-core over gloo and CPU tensors.

megatron-core names CUDA in five ways: the current device, ``device="cuda"`` in factories and ``.cuda()``, CUDA random
states, streams and synchronisation, and the type strings by which its optimizers group parameters. ``apply`` answers
each for the CPU, once per process, and does nothing where CUDA is there. Nothing else in mst patches anything.
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


def _device() -> None:
    cpu = torch.device("cpu")
    torch.cuda.current_device = lambda: cpu  # type: ignore[assignment,return-value]
    torch.cuda.set_device = lambda device: None
    torch.cuda.device_count = lambda: 1


def _on_cpu(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        if "cuda" in str(kwargs.get("device", "")):
            kwargs["device"] = "cpu"
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

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None

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


def is_applied() -> bool:
    """Whether this process runs over the bridge."""
    return _applied
