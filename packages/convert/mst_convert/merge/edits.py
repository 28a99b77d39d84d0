"""What an adapter does to each tensor of a base: its parts matched with the base's names and shapes. No torch.

Every part must have exactly one place, and everything that the config names must have its part.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mst_convert.accounts import LM_HEAD
from mst_convert.merge import targets
from mst_convert.merge.adapter import CONFIG, Adapter
from mst_convert.merge.experts import Piece, stacks, transposed
from mst_convert.merge.parts import Factors
from mst_core.errors import InputError, MstError
from mst_core.tensors import TensorRef

Shapes = Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class Delta:
    """Adds ``scale`` * B @ A, or with ``transposed`` its transpose, to a matrix; DoRA if it has a ``magnitude``.

    experts  how many A and B hold, 1 for a plain layer
    expert   which of them is meant; None: all, one after the other (a stacked tensor)
    rows     of the expert's delta, where the tensor is a part of what was adapted
    """

    a: TensorRef
    b: TensorRef
    rank: int
    alpha: float
    scale: float
    transposed: bool = False
    experts: int = 1
    expert: int | None = 0
    rows: tuple[int, int] | None = None
    magnitude: TensorRef | None = None

    @property
    def refs(self) -> tuple[TensorRef, ...]:
        return (self.a, self.b) if self.magnitude is None else (self.a, self.b, self.magnitude)

    def told(self) -> dict[str, Any]:
        kind = "DoRA" if self.magnitude else "LoRA"
        return {"kind": kind, "rank": self.rank, "alpha": self.alpha, "scale": self.scale}


@dataclass(frozen=True)
class Shift:
    """Adds ``scale`` * the bias of B to a bias."""

    ref: TensorRef
    scale: float

    @property
    def refs(self) -> tuple[TensorRef, ...]:
        return (self.ref,)

    def told(self) -> dict[str, Any]:
        return {"kind": "bias of B", "scale": self.scale}


@dataclass(frozen=True)
class Whole:
    """Replaces a tensor, or (``rows``) some rows of it."""

    ref: TensorRef
    rows: tuple[int, ...] | None = None

    @property
    def refs(self) -> tuple[TensorRef, ...]:
        return (self.ref,)

    def told(self) -> dict[str, Any]:
        return {"kind": "replaced"} if self.rows is None else {"kind": "rows replaced", "rows": len(self.rows)}


Edit = Delta | Shift | Whole
RENAMES = (
    (".mlp.", ".block_sparse_moe."),
    ("model.language_model.", "model."),
    ("model.visual.", "visual."),
    ("model.", "model.language_model."),
)
"""Names in the memory of transformers, which adapters have, and other names of the same in files."""
Named = tuple[str, Edit]


class Matcher:
    """One adapter against one base. ``base`` holds the head, tied or not."""

    def __init__(self, lora: Adapter, base: Shapes, embedding: str, weight: float = 1.0) -> None:
        self.lora = lora
        self.base = base
        self.embedding = embedding
        self.weight = weight
        self.stacks = stacks(base)
        self.edits: list[Named] = []
        self.faults: list[MstError] = []
        self.copies: dict[str, TensorRef] = {}

    def match(self) -> None:
        """Fill ``edits``, ``copies`` and ``faults``."""
        experts: dict[str, list[Factors]] = {}
        for layer in self.lora.parts.factors:
            name = self._stored(f"{layer.module}.weight")
            if name is None and layer.module in self.stacks:
                experts.setdefault(layer.module, []).append(layer)
            elif layer.depth:
                self._fault(layer.module, "is wrapped as a stacked parameter is, but the base has none there")
            else:
                self._layer(layer, name)
        for module, layers in experts.items():
            self._experts(module, layers)
        for name, ref in self.lora.parts.whole.items():
            self._replace(name, ref)
        for module, ref in self.lora.parts.rows.items():
            self._rows(module, ref)
        for name, ref in self.lora.parts.copies.items():
            if self._fits(name, ref):
                self.copies[self._stored(name) or name] = ref
        self._complete()

    def _fault(self, where: str, reason: str) -> None:
        self.faults.append(InputError(reason, where=where))

    def _stored(self, name: str) -> str | None:
        """The base's name for a tensor that an adapter names, or None."""
        names = [name, *(name.replace(old, new, 1) for old, new in RENAMES if old in name)]
        return next((found for found in names if found in self.base), None)

    def _close(self, name: str) -> str:
        close = difflib.get_close_matches(name, self.base, n=1, cutoff=0.8)
        return f"; did you mean {close[0].removesuffix('.weight')}?" if close else ""

    def _layer(self, layer: Factors, name: str | None) -> None:
        """LoRA on a linear layer or an embedding."""
        if layer.a is None or layer.b is None:
            return None
        if name is None:
            return self._fault(layer.module, "the base has no such layer" + self._close(f"{layer.module}.weight"))
        shape = tuple(self.base[name])
        if len(shape) != 2:
            return self._fault(layer.module, f"is no linear layer: its weight is {list(shape)}")
        if (name == self.embedding) != layer.embedding:
            kind, other = ("an embedding", "a linear layer") if name == self.embedding else ("no embedding", "one")
            return self._fault(layer.module, f"is {kind}, adapted as {other}")
        made = (layer.a.shape[1], layer.b.shape[0]) if layer.embedding else (layer.b.shape[0], layer.a.shape[1])
        if made != shape:
            factors = f"B {list(layer.b.shape)} times A {list(layer.a.shape)}"
            return self._fault(layer.module, f"{factors} is {list(made)}, the base's weight {list(shape)}")
        width = shape[1] if layer.embedding else shape[0]
        for ref in (layer.magnitude, layer.bias):
            if ref is not None and ref.shape != (width,):
                return self._fault(layer.module, f"{ref.name} is {list(ref.shape)}, expected {[width]}")
        key = f"{layer.module}.weight" if self._as_parameter(layer.module) else layer.module
        delta = self._delta(layer.a, layer.b, key, transposed=layer.embedding, magnitude=layer.magnitude)
        if delta is None:
            return None
        self.edits.append((name, delta))
        if layer.bias is not None:
            bias = name.removesuffix("weight") + "bias"
            if bias not in self.base:
                return self._fault(layer.module, "lora_bias needs a bias in the base's layer, which has none")
            self.edits.append((bias, Shift(layer.bias, delta.scale)))
        return None

    def _as_parameter(self, module: str) -> bool:
        return targets.is_parameter(self.lora.config, f"{module}.weight")

    def _delta(self, a: TensorRef, b: TensorRef, key: str, **more: Any) -> Delta | None:
        """The delta with the rank and scale that the config gives ``key``, if A and B have that rank."""
        config = self.lora.config
        rank = targets.pattern_value(config.get("rank_pattern"), key, config["r"])
        alpha = float(targets.pattern_value(config.get("alpha_pattern"), key, config["lora_alpha"]))
        experts = more.get("experts", 1)
        for ref, axis in ((a, 0), (b, 1)):
            if ref.shape[axis] != rank * experts:
                times = f" for each of {experts} experts" if experts > 1 else ""
                self._fault(ref.name, f"shape {list(ref.shape)}, but {CONFIG} says rank {rank}{times}")
                return None
        scale = alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank
        return Delta(a, b, rank, alpha, scale * self.weight, **more)

    def _experts(self, module: str, layers: list[Factors]) -> None:
        """LoRA on stacked parameters: the wrappers from the inside out are the targets in the order of definition."""
        named = [stack for stack in self.stacks[module] if targets.is_parameter(self.lora.config, stack.name)]
        if len(named) != len(layers):
            names = ", ".join(stack.name.rpartition(".")[2] for stack in named) or "none"
            return self._fault(module, f"target_parameters names {names} of its parameters, adapted are {len(layers)}")
        for layer, stack in zip(sorted(layers, key=lambda layer: -layer.depth), named, strict=True):
            if layer.magnitude or layer.bias or layer.embedding or layer.a is None or layer.b is None:
                self._fault(module, "has tensors that PEFT does not write for a stacked parameter")
                continue
            turned = transposed(stack, layer.a.shape, layer.b.shape, self.lora.config.get("peft_version"))
            if isinstance(turned, str):
                self._fault(stack.name, turned)
                continue
            delta = self._delta(layer.a, layer.b, stack.name, transposed=turned, experts=stack.shape[0])
            if delta is not None:
                self.edits += [(piece.name, _cut(delta, piece)) for piece in stack.pieces]
        return None

    def _fits(self, name: str, ref: TensorRef) -> bool:
        stored = self._stored(name)
        if stored is None:
            self._fault(name, "the base has no such tensor" + self._close(name))
            return False
        if tuple(self.base[stored]) != ref.shape:
            why = ": its vocabulary was resized, the base's is not" if name in (self.embedding, LM_HEAD) else ""
            self._fault(name, f"{list(ref.shape)}, the base's is {list(self.base[stored])}{why}")
            return False
        return True

    def _replace(self, name: str, ref: TensorRef) -> None:
        if self._alone(name, "is replaced as a whole") and self._fits(name, ref):
            self.edits.append((self._stored(name) or name, Whole(ref)))

    def _rows(self, module: str, ref: TensorRef) -> None:
        name = f"{module}.weight"
        rows = targets.token_indices(self.lora.config, module)
        stored = self._stored(name)
        if rows is None:
            return self._fault(module, "has trained rows, but trainable_token_indices does not name it")
        if stored is None or len(self.base[stored]) != 2:
            return self._fault(module, "the base has no such matrix" + self._close(name))
        height, width = self.base[stored]
        if ref.shape != (len(rows), width) or any(row >= height for row in rows):
            said = f"{list(ref.shape)} for tokens up to {max(rows, default=0)}"
            return self._fault(module, f"trained rows {said} do not fit the base's {[height, width]}")
        if self._alone(name, "has rows replaced"):
            self.edits.append((stored, Whole(ref, tuple(rows))))
        return None

    def _alone(self, name: str, what: str) -> bool:
        """A replaced tensor has no weight: half of one is not what was trained."""
        if self.weight != 1:
            self._fault(name, f"{what}, which cannot be weighted with {self.weight:g}")
        return self.weight == 1

    def _complete(self) -> None:
        """Everything that the config names has its tensors: what was trained and not saved must not pass as merged."""
        config, parts = self.lora.config, self.lora.parts
        have = {layer.module for layer in parts.factors}
        have |= {(self._stored(f"{module}.weight") or "").removesuffix(".weight") for module in have}
        single = any(".experts." in module for module in have)
        saved = {self._stored(name) for name in parts.whole}
        for name in _linears(self.base):
            module = name.removesuffix(".weight")
            if module in have or targets.is_saved(config, name) or (".experts." in module and not single):
                continue  # without layers of experts they are parameters, as in transformers 5
            if targets.is_target(config, module):
                self._fault(module, "target_modules names it, but the adapter has no tensors for it")
        for box, of_box in self.stacks.items():
            for stack in of_box:
                if box not in have and targets.is_parameter(config, stack.name):
                    self._fault(stack.name, "target_parameters names it, but the adapter has no tensors for it")
        for name in self.base:
            if name in saved:
                continue
            if targets.is_saved(config, name) and not (name == LM_HEAD and self._follows()):
                self._fault(name, "modules_to_save names it, but the adapter does not hold it")
            elif name.endswith(".bias") and self._trained_bias(name.removesuffix(".bias"), have):
                self._fault(name, f"bias is {config['bias']!r}, but the adapter does not hold it")
        for end in config.get("modules_to_save") or ():
            if not any(targets.is_saved({"modules_to_save": [end]}, name) for name in self.base):
                self._fault(end, "modules_to_save names it, but the base has no such module")

    def _follows(self) -> bool:
        return bool(self.lora.config.get("ensure_weight_tying"))

    def _trained_bias(self, module: str, adapted: set[str]) -> bool:
        kind = self.lora.config.get("bias", "none")
        return kind == "all" or (kind == "lora_only" and module in adapted)


def _cut(delta: Delta, piece: Piece) -> Delta:
    values = {**delta.__dict__, "expert": piece.expert}
    return Delta(**{**values, "rows": None if piece.expert is None else (piece.start, piece.stop)})


def _linears(base: Shapes) -> Iterable[str]:
    """Names of matrices."""
    return (name for name, shape in base.items() if name.endswith(".weight") and len(shape) == 2)


def conflicts(edits: Mapping[str, Sequence[Edit]]) -> Iterable[MstError]:
    """Only sums commute: a tensor that is replaced or rescaled has one edit."""
    for name, several in edits.items():
        if len(several) > 1 and any(isinstance(e, Whole) or (isinstance(e, Delta) and e.magnitude) for e in several):
            yield InputError("is replaced or rescaled and changed by something else too", where=name)
