"""One native tensor and all that is needed to make it, or to take it apart: a Rule at a place of one model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from mst_core.families.ops import OPS, Region, check_regions, pack_rows, unpack_rows

if TYPE_CHECKING:
    from torch import Tensor

    from mst_core.families.rules import Dims, Rule

EXPERT = ".{e}"


@dataclass(frozen=True)
class TensorSpec:
    """A tensor by name and shape; its matrix has ``rows`` of ``columns`` elements (see Task)."""

    name: str
    shape: tuple[int, ...]
    rows: int

    @property
    def columns(self) -> int:
        return prod(self.shape) // self.rows if self.rows else 0


@dataclass(frozen=True)
class Task:
    """One native tensor and all that is needed to make it, or to take it apart.

    Regions speak of rows: a tensor is seen as a matrix whose rows are its first axis, or expert and first axis of an
    expert's tensor together; of a transposed source, after the last two axes are swapped back.

    native   its name, "decoder.layers.3.mlp.linear_fc1.weight"; of experts without their number
    key      the name without the layer's number, "decoder.layers.mlp.linear_fc1.weight"
    layer    the number of the decoder layer, or None; ``layers`` is how many there are
    experts  the length of the leading expert axis, or None
    hf       the Hugging Face tensors, in the order of the regions' source numbers
    shape    of the native tensor (with the expert axis, without a layer axis, with the vocabulary's padding)
    """

    native: str
    key: str
    layer: int | None
    layers: int
    experts: int | None
    hf: tuple[TensorSpec, ...]
    shape: tuple[int, ...]
    regions: tuple[Region, ...]
    op: str
    transposed: bool

    @property
    def rows(self) -> int:
        return self.shape[0] if self.experts is None else self.shape[0] * self.shape[1]

    @property
    def columns(self) -> int:
        return prod(self.shape) // self.rows

    @property
    def padding(self) -> int:
        """Rows of the native tensor that no Hugging Face row fills."""
        return self.rows - sum(spec.rows for spec in self.hf)


def padded_vocab(vocab: int, divisor: int) -> int:
    """The vocabulary rounded up to a multiple of ``divisor`` (MAPPINGS.md 1.4)."""
    return -(-vocab // divisor) * divisor


def task_of(rule: Rule, dims: Dims, at: dict[str, int], vocab_padding: int) -> Task:
    """The task of a rule; ``at``: the numbers of layer and MTP layer in its names."""
    experts = dims.more["experts"] if EXPERT in rule.native else None
    stacked = experts is not None and not any("{e}" in text for text in rule.hf)
    numbers = range(1 if experts is None or stacked else experts)
    specs = [_source(dims, text, {**at, "e": e}, stacked, rule.transposed) for e in numbers for text in rule.hf]
    # One expert's sources: the first ones, or its share of each stacked one.
    count = len(rule.hf)
    source_rows = [spec.rows // (experts or 1) if stacked else spec.rows for spec in specs[:count]]
    rows = sum(source_rows)
    if rule.hf[0].partition(" [")[2].startswith("v,"):
        rows = padded_vocab(rows, vocab_padding)
    regions = OPS[rule.op](dims, source_rows)
    check_regions(regions, source_rows, rows, rule.native)
    if stacked:
        regions = tuple(
            r._replace(start=r.start + e * rows, source_start=r.source_start + e * source_rows[r.source])
            for e in range(experts or 1)
            for r in regions
        )
    elif experts is not None:
        regions = tuple(
            r._replace(start=r.start + e * rows, source=r.source + e * count) for e in numbers for r in regions
        )
    matrix = len(specs[0].shape) - stacked > 1
    native = rule.native.replace(EXPERT, "")
    return Task(
        native=native.format(**at),
        key=native.replace(".{i}.", ".").format(**at),
        layer=at.get("i"),
        layers=dims.layers,
        experts=experts,
        hf=tuple(specs),
        shape=(*(() if experts is None else (experts,)), rows, *((specs[0].columns,) if matrix else ())),
        regions=regions,
        op=rule.op,
        transposed=rule.transposed,
    )


def _source(dims: Dims, text: str, at: dict[str, int], stacked: bool, transposed: bool) -> TensorSpec:
    name, symbols = text.rstrip("]").split(" [")
    shape = tuple(dims.size(symbol) for symbol in symbols.split(","))
    experts = shape[0] if stacked else 1
    return TensorSpec(name.format(**at), shape, experts * (shape[-1] if transposed else shape[int(stacked)]))


def pack(task: Task, sources: Sequence[Tensor]) -> Tensor:
    """The native tensor of ``task`` from its Hugging Face tensors (or anything with the same rows: bias, LoRA B)."""
    if task.transposed:
        sources = [source.transpose(-1, -2) for source in sources]
    if task.experts is None:
        return pack_rows(task.regions, task.rows, sources)
    flat = [source.reshape(spec.rows, -1) for source, spec in zip(sources, task.hf, strict=True)]
    return pack_rows(task.regions, task.rows, flat).reshape(task.shape)


def unpack(task: Task, native: Tensor) -> list[Tensor]:
    """The Hugging Face tensors of ``task`` from its native tensor; padding rows are dropped."""
    if task.experts is None:
        parts = unpack_rows(task.regions, native)
    else:
        parts = unpack_rows(task.regions, native.reshape(native.shape[0] * native.shape[1], -1))
    if task.transposed:
        swapped = [(*spec.shape[:-2], spec.shape[-1], spec.shape[-2]) for spec in task.hf]
        return [part.reshape(shape).transpose(-1, -2).contiguous() for part, shape in zip(parts, swapped, strict=True)]
    if task.experts is None:
        return parts
    return [part.reshape(spec.shape) for part, spec in zip(parts, task.hf, strict=True)]
