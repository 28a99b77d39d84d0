"""LoRA on Megatron's fused, parallel layers: A and B of their own for q, k, v, gate and up.

Each adapter keeps its Hugging Face name, so a PEFT directory has an exact place here and ours is exact there.

| layer | A (r, in) | B (out, r) | between A and B |
|---|---|---|---|
| column parallel (qkv, fc1) | whole on each rank | rows of this rank's heads or neurons | identity forward, all-reduce backward (SP: gather, reduce-scatter) |
| row parallel (proj, fc2) | columns of this rank | whole on each rank | all-reduce forward (SP: reduce-scatter), identity backward |

What crosses the ranks is r wide. Under sequence parallelism the whole factor sees only this rank's tokens, so its
gradient is summed over the tensor parallel ranks: Megatron does that for ``sequence_parallel`` parameters.
"""  # noqa: E501  (a table)

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from mst_core.engine.lora import lora_init
from mst_core.engine.megatron import groups
from mst_core.engine.megatron.shards import Spot, Spots
from mst_core.families.rules import Dims
from mst_core.runspec import RunSpec

PARTS = {
    "self_attention.linear_qkv": ("self_attn", ("q_proj", "k_proj", "v_proj")),
    "self_attention.linear_proj": ("self_attn", ("o_proj",)),
    "mlp.linear_fc1": ("mlp", ("gate_proj", "up_proj")),
    "mlp.linear_fc2": ("mlp", ("down_proj",)),
}
"""Megatron's layer -> the Hugging Face block and the projections it holds."""
COLUMN = ("self_attention.linear_qkv", "mlp.linear_fc1")


def widths(dims: Dims, name: str) -> tuple[int, int]:
    """(in, out) features of a projection, whole."""
    q, k = dims.heads * dims.head_dim, dims.groups * dims.head_dim
    return {
        "q_proj": (dims.hidden, q),
        "k_proj": (dims.hidden, k),
        "v_proj": (dims.hidden, k),
        "o_proj": (q, dims.hidden),
        "gate_proj": (dims.hidden, dims.ffn),
        "up_proj": (dims.hidden, dims.ffn),
        "down_proj": (dims.ffn, dims.hidden),
    }[name]


class Adapter(torch.nn.Module):
    """A and B of one projection, this rank's part. ``module`` is its Hugging Face name."""

    def __init__(self, module: str, start: Tensor, out: int, column: bool, sp: bool, tp: tuple[int, int]) -> None:
        super().__init__()
        self.module, self.column, self.sp = module, column, sp
        rank, size = tp
        whole_in = start.shape[1] if column else start.shape[1] // size
        a = start if column else start[:, rank * whole_in : (rank + 1) * whole_in]
        self.lora_a = torch.nn.Parameter(a.clone())
        self.lora_b = torch.nn.Parameter(torch.zeros(out // size if column else out, start.shape[0]))
        split, whole = (self.lora_b, self.lora_a) if column else (self.lora_a, self.lora_b)
        split.tensor_model_parallel = True  # type: ignore[attr-defined]  # counted on each rank in the gradient norm
        whole.sequence_parallel = sp  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """x (S, B, in of this rank) -> (S, B, out of this rank), not yet scaled."""
        from megatron.core import tensor_parallel as tp

        low = F.linear(x, self.lora_a.to(x.dtype))
        if self.column:
            cross = tp.gather_from_sequence_parallel_region if self.sp else tp.copy_to_tensor_model_parallel_region
        else:
            scatter, reduce = tp.reduce_scatter_to_sequence_parallel_region, tp.reduce_from_tensor_model_parallel_region
            cross = scatter if self.sp else reduce
        return F.linear(cross(low), self.lora_b.to(x.dtype))


class Adapters(torch.nn.Module):
    """The adapters of one fused layer; adds their sum to its output while ``on``."""

    def __init__(self, parts: Mapping[str, Adapter], order: Sequence[str], dims: Dims, scale: float, tp: int) -> None:
        super().__init__()
        self.parts = torch.nn.ModuleDict(parts)
        self.order, self.dims, self.scale, self.tp = list(order), dims, scale, tp
        self.on = True

    def delta(self, x: Tensor) -> Tensor:
        """What to add to the layer's output, (S, B, out of this rank)."""
        found: list[Tensor | None] = [self.parts[name](x) if name in self.parts else None for name in self.order]
        sizes = [widths(self.dims, name)[1] // self.tp for name in self.order]
        like = next(part for part in found if part is not None)
        full = [
            like.new_zeros(*like.shape[:-1], size) if part is None else part
            for part, size in zip(found, sizes, strict=True)
        ]
        if len(full) == 1:
            return full[0] * self.scale
        if self.order[0] == "q_proj":
            # Megatron's rows stand by group: its queries, its key, its value (MAPPINGS 1.1).
            by_group = [part.unflatten(-1, (self.dims.groups // self.tp, -1)) for part in full]
            return torch.cat(by_group, dim=-1).flatten(-2) * self.scale
        return torch.cat(full, dim=-1) * self.scale

    def hook(self, module: torch.nn.Module, args: tuple[Any, ...], output: tuple[Tensor, Any]) -> Any:
        """Forward hook of the layer."""
        if not self.on:
            return None
        out, bias = output
        return out + self.delta(args[0]).to(out.dtype), bias


def attach(model: Any, spec: RunSpec, dims: Dims, names: Sequence[str]) -> list[Adapters]:
    """Freeze the model and give each decoder layer of this stage its adapters."""
    from megatron.core import parallel_state

    tp = (parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size())
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    rank, made = spec.lora_rank or 1, []
    for layer in model.decoder.layers:
        for path, (block, projections) in PARTS.items():
            wanted = [name for name in projections if name in names]
            if not wanted:
                continue
            linear = layer.get_submodule(path)
            parts = {}
            for name in wanted:
                module = f"model.layers.{layer.layer_number - 1}.{block}.{name}"
                features, out = widths(dims, name)
                start = lora_init(spec.seed, module, rank, features)
                parts[name] = Adapter(module, start, out, path in COLUMN, spec.sp, tp)
            adapters = Adapters(parts, projections, dims, spec.alpha / rank, tp[1])
            linear.adapters = adapters.to(groups.device())
            linear.register_forward_hook(adapters.hook)
            made.append(adapters)
    return made


def gather(adapters: Sequence[Adapters]) -> dict[str, Tensor]:
    """Every adapter whole, by PEFT's names, fp32 on the CPU; on rank 0 only (other ranks get an empty dict)."""
    from megatron.core import parallel_state

    mine: dict[str, Tensor] = {}
    for adapter in (part for group in adapters for part in group.parts.values()):
        if not isinstance(adapter, Adapter):
            continue
        for letter, parameter in (("A", adapter.lora_a), ("B", adapter.lora_b)):
            value = parameter.detach()
            if getattr(parameter, "tensor_model_parallel", False):
                value = torch.cat(_all_gather(value), dim=0 if adapter.column else 1)
            mine[f"base_model.model.{adapter.module}.lora_{letter}.weight"] = value.cpu()
    first = parallel_state.get_tensor_model_parallel_rank() == 0 and parallel_state.get_data_parallel_rank() == 0
    everyone: list[dict[str, Tensor]] | None = (
        [{} for _ in range(dist.get_world_size())] if dist.get_rank() == 0 else None
    )
    dist.gather_object(mine if first else {}, everyone)
    return {name: value for part in everyone or [] for name, value in part.items()}


def spots(adapters: Sequence[Adapters]) -> Spots:
    """Where this rank's part of each factor stands in the whole one."""
    from megatron.core import parallel_state

    tp = parallel_state.get_tensor_model_parallel_rank()
    dp = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    found: Spots = {}
    for adapter in (part for group in adapters for part in group.parts.values()):
        if not isinstance(adapter, Adapter):
            continue
        for letter, parameter, axis in (("A", adapter.lora_a, 1), ("B", adapter.lora_b, 0)):
            split = bool(getattr(parameter, "tensor_model_parallel", False))
            rows, columns = parameter.shape
            at = [tp * size if split and number == axis else 0 for number, size in enumerate(parameter.shape)]
            size = parallel_state.get_tensor_model_parallel_world_size() if split else 1
            whole = (rows * size, columns) if axis == 0 else (rows, columns * size)
            name = f"{adapter.module}.lora_{letter}"
            found[parameter] = [Spot(name, whole, at[0], at[1], rows, columns, 0, not split and tp > 0, dp)]
    return found


def _all_gather(value: Tensor) -> list[Tensor]:
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    found = [torch.empty_like(value) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, value.contiguous(), group=group)
    return found


def switched_off(adapters: Sequence[Adapters]) -> Iterator[None]:
    """Generator for contextlib.contextmanager: the base alone."""
    for group in adapters:
        group.on = False
    try:
        yield
    finally:
        for group in adapters:
            group.on = True
