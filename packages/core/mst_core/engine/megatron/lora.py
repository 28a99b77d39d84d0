"""LoRA on Megatron's fused, parallel and expert layers: A and B of their own for q, k, v, gate and up.

Each adapter keeps its Hugging Face name, so a PEFT directory has an exact place here and ours is exact there. The
family's regions say which rows of a fused layer are whose; experts have a pair for each of their matrices, whose gate
and up share an A as PEFT has them.

| layer | A (r, in) | B (out, r) | between A and B |
|---|---|---|---|
| column parallel (qkv, fc1) | whole on each rank | rows of this rank | identity forward, all-reduce backward (SP: gather, reduce-scatter) |
| row parallel (proj, fc2) | columns of this rank | whole on each rank | all-reduce forward (SP: reduce-scatter), identity backward |
| of an expert | as above, over its ranks | | nothing |

What crosses the ranks is r wide. Under sequence parallelism the whole factor sees only this rank's tokens, so its
gradient is summed over the tensor parallel ranks: Megatron does that for ``sequence_parallel`` parameters. Experts get
all tokens of their ranks from the dispatcher, which also sums what they make, and the gradient of what they got; only
the gradient of the whole factor is left, and is summed here.
"""  # noqa: E501  (a table)

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from mst_core.engine.lora import HEAD, PREFIX, file_name, lora_init
from mst_core.engine.megatron import groups
from mst_core.engine.megatron.shards import Spot, Spots
from mst_core.engine.scalar import ScalarHead
from mst_core.families import pack_rows
from mst_core.families.task import Task
from mst_core.lora_sites import Site
from mst_core.runspec import RunSpec

ROW = ("linear_proj", "linear_fc2")
"""Layers that are cut along their input; all others along their output."""


@dataclass(frozen=True)
class Ranks:
    """The ranks that share a layer: which one this is, how many, and their group."""

    rank: int
    size: int
    group: Any

    def columns(self, width: int) -> slice:
        """What of the input a row parallel layer has here."""
        return slice(self.rank * width // self.size, (self.rank + 1) * width // self.size)

    def rows(self, task: Task, height: int, gated: bool) -> Tensor:
        """Which native rows a column parallel layer has here; gate and up are cut apart (MAPPINGS 1.2)."""
        halves = torch.arange(height).chunk(2 if gated and task.native.endswith("linear_fc1.weight") else 1)
        return torch.cat([half.chunk(self.size)[self.rank] for half in halves])


class Adapter(torch.nn.Module):
    """A and B of one site (of one of its experts), this rank's part.

    rows   which rows of B are here (column parallel), or None: all
    cut    which columns of A are here (row parallel)
    """

    def __init__(self, site: Site, expert: int | None, start: Tensor, rows: Tensor | None, ranks: Ranks) -> None:
        super().__init__()
        self.site, self.expert, self.rows, self.ranks = site, expert, rows, ranks
        self.cut = slice(None) if rows is not None else ranks.columns(site.columns)
        self.lora_a = torch.nn.Parameter(start[:, self.cut].clone())
        self.lora_b = torch.nn.Parameter(torch.zeros(site.rows if rows is None else len(rows), start.shape[0]))

    def mark(self, like: Tensor, sp: bool) -> None:
        """Tell Megatron, as ``like`` (the layer's weight) does, over which ranks gradients and norms are summed."""
        split, whole = (self.lora_a, self.lora_b) if self.rows is None else (self.lora_b, self.lora_a)
        alike = {"allreduce": getattr(like, "allreduce", True)}
        _mark(split, tensor_model_parallel=True, **alike)  # counted on each rank in the gradient norm
        _mark(whole, sequence_parallel=sp and self.expert is None, **alike)

    def forward(self, x: Tensor, sp: bool) -> Tensor:
        """x (..., in of this rank) -> (..., out of this rank), not yet scaled."""
        from megatron.core import tensor_parallel as tp

        a, b = self.lora_a.to(x.dtype), self.lora_b.to(x.dtype)
        if self.expert is not None:
            if self.rows is None:
                b = tp.copy_to_tensor_model_parallel_region(b, group=self.ranks.group)
            else:
                a = tp.copy_to_tensor_model_parallel_region(a, group=self.ranks.group)
            return F.linear(F.linear(x, a), b)
        if self.rows is not None:
            cross = tp.gather_from_sequence_parallel_region if sp else tp.copy_to_tensor_model_parallel_region
        else:
            scatter, reduce = tp.reduce_scatter_to_sequence_parallel_region, tp.reduce_from_tensor_model_parallel_region
            cross = scatter if sp else reduce
        return F.linear(cross(F.linear(x, a)), b)

    def place(self, rank: int) -> tuple[Tensor, Tensor]:
        """(which rows of the file's A, which columns of its B) are an expert's: one after the other, side by side."""
        count = self.site.experts or 1
        return torch.arange(rank) + (self.expert or 0) * rank, torch.arange(rank) * count + (self.expert or 0)


def _mark(parameter: torch.nn.Parameter, **marks: bool) -> None:
    for name, value in marks.items():
        setattr(parameter, name, value)


class Adapters(torch.nn.Module):
    """The adapters of one layer; adds what they make to its output while ``on``."""

    order: Tensor | None

    def __init__(self, parts: Sequence[Adapter], order: Tensor, width: int, scale: float, sp: bool) -> None:
        """order   where the parts' outputs, one after the other, go in the layer's output of ``width``"""
        super().__init__()
        self.parts = torch.nn.ModuleList(parts)
        self.scale, self.sp, self.width = scale, sp, width
        straight = len(order) == width and bool((order == torch.arange(width)).all())
        self.register_buffer("order", None if straight else order, persistent=False)
        self.on = True

    def delta(self, x: Tensor) -> Tensor:
        """What to add to the layer's output, (..., out of this rank)."""
        made = [part(x, self.sp) for part in self.parts]
        full = made[0] if len(made) == 1 else torch.cat(made, dim=-1)
        if self.order is not None:
            full = full.new_zeros(*full.shape[:-1], self.width).index_copy(-1, self.order, full)
        return full * self.scale

    def hook(self, module: torch.nn.Module, args: tuple[Any, ...], output: tuple[Tensor, Any]) -> Any:
        """Forward hook of the layer."""
        if not self.on:
            return None
        out, bias = output
        return out + self.delta(args[0]).to(out.dtype), bias


def attach(model: Any, spec: RunSpec, sites: Sequence[Site]) -> list[Adapters]:
    """Freeze the model but a reward model's head, and give each decoder layer of this stage its adapters."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for head in heads(model):
        head.weight = torch.nn.Parameter(head.weight.data.float())  # as the adapters
    made = []
    for layer in model.decoder.layers:
        mine = (site for site in sites if site.task.layer == layer.layer_number - 1)
        for _, group in groupby(mine, key=lambda site: site.task.native):
            found = list(group)
            for expert, linear in _linears(layer, found[0].task):
                adapters = _adapters(linear, found, expert, spec)
                linear.adapters = adapters.to(groups.device())
                linear.register_forward_hook(adapters.hook)
                made.append(adapters)
    return made


def heads(model: Any) -> list[ScalarHead]:
    """The scalar head, if this stage has one."""
    return [module for module in model.modules() if isinstance(module, ScalarHead)]


def _linears(layer: Any, task: Task) -> list[tuple[int | None, Any]]:
    """Megatron's module of a task, or its module of each expert that is here, with the expert's number."""
    from megatron.core import parallel_state

    path = task.native.removeprefix(f"decoder.layers.{task.layer}.").removesuffix(".weight")
    if task.experts is None:
        return [(None, layer.get_submodule(path))]
    here, leaf = layer.mlp.experts.local_experts, path.rpartition(".")[2]
    first = parallel_state.get_expert_model_parallel_rank() * len(here)
    return [(first + number, expert.get_submodule(leaf)) for number, expert in enumerate(here)]


def _adapters(linear: Any, found: Sequence[Site], expert: int | None, spec: RunSpec) -> Adapters:
    """The adapters of ``linear``, some of the sites that it is made of."""
    task, rank = found[0].task, spec.lora_rank or 1
    ranks, height = _ranks(expert is not None), task.shape[-2]
    column = task.native.removesuffix(".weight").rpartition(".")[2] not in ROW
    here = ranks.rows(task, height, linear.config.gated_linear_unit) if column else torch.arange(height)
    starts = [sum(spec.rows for spec in task.hf[:part]) for part in range(len(task.hf))] if expert is None else [0]
    rows_of = [torch.arange(hf.rows) + start for hf, start in zip(task.hf, starts, strict=False)]
    native = torch.arange(height) if expert is not None else pack_rows(task.regions, height, rows_of)
    parts, order = [], []
    for site in found:
        name = site.name if expert is None else f"{site.name}.{expert}"
        own = native[here] - starts[site.part]
        inside = ((own >= 0) & (own < site.rows)).nonzero().flatten()
        start = lora_init(spec.seed, name, rank, site.columns)
        part = Adapter(site, expert, start, own[inside] if column else None, ranks)
        part.mark(linear.weight, spec.sp)
        parts.append(part)
        order.append(inside)
    return Adapters(parts, torch.cat(order), len(here), spec.lora_scale, spec.sp)


def _ranks(expert: bool) -> Ranks:
    from megatron.core import parallel_state as state

    if expert:
        group = state.get_expert_tensor_parallel_group()
    else:
        group = state.get_tensor_model_parallel_group()
    return Ranks(dist.get_rank(group), dist.get_world_size(group), group)


def gather(
    adapters: Sequence[Adapters], sites: Sequence[Site], rank: int, scalars: Sequence[ScalarHead] = ()
) -> dict[str, Tensor]:
    """Every adapter whole, and a reward model's head, by PEFT's names, fp32 on the CPU; on rank 0 only (other ranks get
    an empty dict)."""
    mine: list[tuple[str, tuple[int, int], Tensor, Tensor, Tensor]] = []
    for head in scalars:
        whole, width = head.weight.detach().cpu(), head.weight.shape[1]
        mine.append((f"{PREFIX}{HEAD}.weight", (1, width), torch.arange(1), torch.arange(width), whole))
    for part in (part for group in adapters for part in group.parts):
        if not isinstance(part, Adapter) or not _is_first(part):
            continue
        site, count, (low, high) = part.site, part.site.experts or 1, part.place(rank)
        columns = torch.arange(site.columns)[part.cut]
        rows = torch.arange(site.rows) if part.rows is None else part.rows
        a, b = part.lora_a.detach().cpu(), part.lora_b.detach().cpu()
        mine.append((file_name(site, "A", sites), (rank * count, site.columns), low, columns, a))
        mine.append((file_name(site, "B", sites), (site.rows, rank * count), rows, high, b))
    everyone: list[Any] | None = [[] for _ in range(dist.get_world_size())] if dist.get_rank() == 0 else None
    dist.gather_object(mine, everyone)
    found: dict[str, Tensor] = {}
    for name, shape, rows, columns, value in (piece for pieces in everyone or [] for piece in pieces):
        found.setdefault(name, torch.full(shape, torch.nan))[rows[:, None], columns] = value
    return found


def _is_first(part: Adapter) -> bool:
    """Whether no other rank has this part to give."""
    from megatron.core import parallel_state as state

    if part.expert is not None:
        return int(state.get_expert_data_parallel_rank()) == 0
    return int(state.get_data_parallel_rank()) == 0


def spots(adapters: Sequence[Adapters], scalars: Sequence[ScalarHead] = ()) -> Spots:
    """Where this rank's part of each factor, and of a reward model's head, stands in the whole one."""
    from megatron.core import parallel_state as state

    again, dp = _ranks(False).rank > 0, int(state.get_data_parallel_rank(with_context_parallel=True))
    found: Spots = {
        head.weight: [Spot(HEAD, (1, width), 0, 0, 1, width, 0, again, dp)]
        for head in scalars
        for width in (head.weight.shape[1],)
    }
    for part in (part for group in adapters for part in group.parts):
        if not isinstance(part, Adapter):
            continue
        site, expert = part.site, part.expert
        name, dp = site.name, int(state.get_data_parallel_rank(with_context_parallel=True))
        if expert is not None:
            name, dp = f"{name}.{expert}", int(state.get_expert_data_parallel_rank())
        rank, width = part.lora_a.shape
        column, again = part.rows is not None, part.ranks.rank > 0  # the factor that is whole stands on every rank
        left = part.cut.start or 0
        found[part.lora_a] = [
            Spot(f"{name}.lora_A", (rank, site.columns), 0, left, rank, width, 0, column and again, dp)
        ]
        shape, replica = (site.rows, rank), again and not column
        runs = _runs(range(site.rows) if part.rows is None else part.rows.tolist())
        found[part.lora_b] = [
            Spot(f"{name}.lora_B", shape, row, 0, count, rank, at * rank, replica, dp) for at, row, count in runs
        ]
    return found


def _runs(rows: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(index, value, length) of each stretch of values that follow one another."""
    for _, stretch in groupby(enumerate(rows), key=lambda item: item[1] - item[0]):
        found = list(stretch)
        yield found[0][0], found[0][1], len(found)


def switched_off(adapters: Sequence[Adapters]) -> Iterator[None]:
    """Generator for contextlib.contextmanager: the base alone."""
    for group in adapters:
        group.on = False
    try:
        yield
    finally:
        for group in adapters:
            group.on = True
