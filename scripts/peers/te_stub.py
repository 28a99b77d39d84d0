"""TransformerEngine on a machine without CUDA, as far as two peers need it to build a model and to move its weights.

TransformerEngine has no CPU build; Megatron-Bridge and mcore-bridge import it, and their models are made of its layers.
``install()`` puts a package of that name into ``sys.modules``. The layers of ``BUILT`` hold the parameters of the real
ones, under the same names and in the same shapes, uninitialised (which favours the peer), and have no forward. The
names of ``NAMED`` are only there to be imported: whoever builds one is refused.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import sys
import types
from typing import Any

import torch

VERSION = "1.12.0"  # the lowest that megatron-core 0.19 and both peers take needs the fewest names


class Layer(torch.nn.Module):
    """What all layers share: parameters of the dtype that is asked for, and an empty extra state."""

    def __init__(self, **said: Any) -> None:
        super().__init__()
        self.tp_size = said.get("tp_size", 1)
        self.parallel_mode = said.get("parallel_mode")
        self.dtype = said.get("params_dtype", torch.get_default_dtype())

    def parameter(self, *shape: int) -> torch.nn.Parameter:
        """An uninitialised parameter on the CPU."""
        return torch.nn.Parameter(torch.empty(shape, dtype=self.dtype, device="cpu"))

    def get_extra_state(self) -> torch.Tensor:
        """Empty, as without FP8."""
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        """Nothing to set."""


class Linear(Layer):
    """``weight`` [out / tp, in] or [out, in / tp], and ``bias``."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True, **said: Any) -> None:
        super().__init__(**said)
        columns, rows = (self.tp_size if self.parallel_mode == mode else 1 for mode in ("row", "column"))
        self.in_features, self.out_features, self.use_bias = in_features // columns, out_features // rows, bias
        self.weight = self.parameter(self.out_features, self.in_features)
        self.bias = self.parameter(self.out_features) if bias else None


class LayerNormLinear(Linear):
    """Linear with ``layer_norm_weight`` [in] before it."""

    def __init__(self, in_features: int, out_features: int, **said: Any) -> None:
        super().__init__(in_features, out_features, **said)
        self.layer_norm_weight = self.parameter(in_features)


class RMSNorm(Layer):
    """``weight`` [hidden]."""

    def __init__(self, normalized_shape: int, **said: Any) -> None:
        super().__init__(**said)
        self.weight = self.parameter(normalized_shape)


class DotProductAttention(Layer):
    """No parameters."""


class FP8GlobalStateManager:
    """FP8 is off."""

    @staticmethod
    def is_fp8_enabled() -> bool:
        """Never."""
        return False


def no_fp8(*_: Any, **__: Any) -> contextlib.nullcontext[None]:
    """``fp8_autocast`` and ``fp8_model_init``."""
    return contextlib.nullcontext()


def named(name: str) -> type:
    """A class to be imported and inherited from, never built."""

    def refuse(self: Any, *_: Any, **__: Any) -> None:
        raise NotImplementedError(f"the stub of TransformerEngine has no {name}")

    return type(name, (torch.nn.Module,), {"__init__": refuse})


BUILT = {layer.__name__: layer for layer in (Linear, LayerNormLinear, RMSNorm, DotProductAttention)}
FP8 = {"FP8GlobalStateManager": FP8GlobalStateManager, "fp8_autocast": no_fp8, "fp8_model_init": no_fp8}
NAMED = {
    ".common": (),
    ".common.recipe": ("DelayedScaling",),
    ".pytorch": ("GroupedLinear", "LayerNorm", "Fp8Padding", "Fp8Unpadding"),
    ".pytorch.attention": ("apply_rotary_pos_emb", "_SplitAlongDim"),
    ".pytorch.cpp_extensions": ("cast_to_fp8",),
    ".pytorch.distributed": ("CudaRNGStatesTracker", "activation_recompute_forward", "checkpoint"),
    ".pytorch.float8_tensor": ("Float8Tensor",),
    ".pytorch.fp8": (),
    ".pytorch.ops": ("Sequential",),
}


def install() -> None:
    """Make ``import transformer_engine`` find the stub."""
    real: dict[str, dict[str, Any]] = {".pytorch": {**BUILT, **FP8}, ".pytorch.fp8": FP8}
    for suffix in ("", *NAMED):
        full = "transformer_engine" + suffix
        module = types.ModuleType(full)
        module.__spec__ = importlib.machinery.ModuleSpec(full, None, is_package=True)
        module.__path__ = []
        vars(module).update({name: named(name) for name in NAMED.get(suffix, ())} | real.get(suffix, {}))
        sys.modules[full] = module
        parent, _, child = full.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    vars(sys.modules["transformer_engine"])["__version__"] = VERSION
