"""What a family is: rows (Rule), sizes (Dims), facts, and the tasks that follow from them.

A rule names one native (Megatron, TransformerEngine-style torch_dist) tensor and the Hugging Face tensors it is
made of, with their shapes in symbols: v vocabulary, h hidden, f ffn, d head, q = heads*d, k = groups*d.
``{i}`` is the layer. ``when`` is one fact of the model; a rule without it always applies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mst_core.families.ops import OPS, Region, check_regions, pack_rows, unpack_rows

if TYPE_CHECKING:
    from torch import Tensor

    from mst_core.manifest import ModelInfo

Config = Mapping[str, Any]
Where = str | Path


@dataclass(frozen=True)
class Rule:
    """``native`` is made of ``hf`` ("name [shape]") by ``op`` (of ops.OPS), if the model has the fact ``when``."""

    native: str
    hf: tuple[str, ...]
    op: str = "copy"
    when: str | None = None


@dataclass(frozen=True)
class Dims:
    """The sizes of a dense decoder. ``vocab`` is config.vocab_size, never the tokenizer's length."""

    layers: int
    hidden: int
    heads: int
    groups: int
    head_dim: int
    ffn: int
    vocab: int

    def size(self, symbol: str) -> int:
        """The number behind a symbol of a rule's shape."""
        return {
            "v": self.vocab,
            "h": self.hidden,
            "f": self.ffn,
            "d": self.head_dim,
            "q": self.heads * self.head_dim,
            "k": self.groups * self.head_dim,
        }[symbol]

    def as_dict(self) -> dict[str, int]:
        return {name: int(getattr(self, name)) for name in self.__dataclass_fields__}


@dataclass(frozen=True)
class TensorSpec:
    """A tensor by name and shape."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Task:
    """One native tensor and all that is needed to make it, or to take it apart.

    native   its state-dict style name, "decoder.layers.3.mlp.linear_fc1.weight"
    key      its torch_dist key, "decoder.layers.mlp.linear_fc1.weight", stacked over layers if ``layer`` is not None
    layer    its index on the leading axis of the stacked tensor; ``layers`` is that axis' length
    hf       the Hugging Face tensors, in the order of the regions' source numbers
    shape    of the native tensor (without the layer axis, with the vocabulary's padding)
    """

    native: str
    key: str
    layer: int | None
    layers: int
    hf: tuple[TensorSpec, ...]
    shape: tuple[int, ...]
    regions: tuple[Region, ...]
    op: str

    @property
    def padding(self) -> int:
        """Rows of the native tensor that no Hugging Face row fills."""
        return self.shape[0] - sum(spec.shape[0] for spec in self.hf)


@dataclass(frozen=True)
class Model:
    """One model of a family: what config.json says, read once."""

    family: Family
    dims: Dims
    facts: frozenset[str]
    dtype: str
    """What config.json says ("bfloat16"); the tensors' own headers have the last word."""

    @property
    def tied(self) -> bool:
        return "tied" in self.facts

    def rules(self) -> tuple[Rule, ...]:
        return tuple(rule for rule in self.family.rules if rule.when is None or rule.when in self.facts)

    def hf_tensors(self) -> list[TensorSpec]:
        """Every tensor that the Hugging Face directory must hold (a tied lm_head is not one)."""
        return [spec for task in tasks(self) for spec in task.hf]

    @property
    def parameters(self) -> int:
        return sum(prod(spec.shape) for spec in self.hf_tensors())

    def info(self, dtype: str | None = None) -> ModelInfo:
        """The manifest's description of this model."""
        from mst_core.manifest import ModelInfo

        return ModelInfo(
            family=self.family.name,
            architecture=self.family.architecture,
            dims=self.dims.as_dict(),
            dtype=dtype or self.dtype,
            tied=self.tied,
            parameters=self.parameters,
        )


@dataclass(frozen=True)
class Family:
    """An architecture as data. ``read`` gives dims and facts of a config, ``translate`` Megatron's settings.

    ignored   Hugging Face tensors of old checkpoints that hold no parameters (computed buffers), with ``{i}``:
              accounted for by name, not converted
    """

    name: str
    architecture: str
    model_type: str
    rules: tuple[Rule, ...]
    read: Callable[[Config, Where], tuple[Dims, frozenset[str]]]
    translate: Callable[[Config, Where], dict[str, dict[str, Any]]]
    ignored: tuple[str, ...] = ("model.layers.{i}.self_attn.rotary_emb.inv_freq",)

    def model(self, config: Config, where: Where = "config.json") -> Model:
        """Dims and facts of ``config``. InputError for a missing or impossible size."""
        dims, facts = self.read(config, where)
        dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
        return Model(self, dims, facts, str(dtype))

    def megatron(self, config: Config, where: Where = "config.json") -> dict[str, dict[str, Any]]:
        """Megatron's settings, in groups (see families/translate.py). InputError where Megatron has no equivalent."""
        return self.translate(config, where)

    def is_ignored(self, name: str, dims: Dims) -> bool:
        return any(name in _each_layer(pattern, dims.layers) for pattern in self.ignored)


@lru_cache(maxsize=64)
def _each_layer(pattern: str, layers: int) -> frozenset[str]:
    return frozenset(pattern.format(i=i) for i in range(layers))


def padded_vocab(vocab: int, divisor: int) -> int:
    """The vocabulary rounded up to a multiple of ``divisor`` (MAPPINGS.md 1.4)."""
    return -(-vocab // divisor) * divisor


def tasks(model: Model, vocab_padding: int = 1) -> list[Task]:
    """Every native tensor of ``model``, layer by layer; the vocabulary padded to a multiple of ``vocab_padding``."""
    found: list[Task] = []
    rules = model.rules()
    for rule in rules:
        if "{i}" not in rule.native:
            found.append(_task(model.dims, rule, None, vocab_padding))
    for layer in range(model.dims.layers):
        found.extend(_task(model.dims, rule, layer, vocab_padding) for rule in rules if "{i}" in rule.native)
    return found


def _task(dims: Dims, rule: Rule, layer: int | None, vocab_padding: int) -> Task:
    specs, rows = [], 0
    for text in rule.hf:
        name, symbols = text.rstrip("]").split(" [")
        shape = tuple(dims.size(symbol) for symbol in symbols.split(","))
        rows += padded_vocab(shape[0], vocab_padding) if symbols.startswith("v,") else shape[0]
        specs.append(TensorSpec(name.format(i=layer), shape))
    source_rows = [spec.shape[0] for spec in specs]
    regions = OPS[rule.op](dims, source_rows)
    check_regions(regions, source_rows, rows, rule.native)
    return Task(
        native=rule.native.format(i=layer),
        key=rule.native.replace(".{i}.", "."),
        layer=layer,
        layers=dims.layers,
        hf=tuple(specs),
        shape=(rows, *specs[0].shape[1:]),
        regions=regions,
        op=rule.op,
    )


def pack(task: Task, sources: Sequence[Tensor]) -> Tensor:
    """The native tensor of ``task`` from its Hugging Face tensors (or anything with the same rows: bias, LoRA B)."""
    return pack_rows(task.regions, task.shape[0], sources)


def unpack(task: Task, native: Tensor) -> list[Tensor]:
    """The Hugging Face tensors of ``task`` from its native tensor; padding rows are dropped."""
    return unpack_rows(task.regions, native)
