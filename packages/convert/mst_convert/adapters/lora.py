"""An adapter by its headers: a pair of factors for each Hugging Face module. No torch until one is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class Recent:
    """The last few tensors that were read or made: those of a layer's experts are slices of one."""

    def __init__(self, most: int = 4) -> None:
        self._most = most
        self._held: dict[Any, Any] = {}

    def get(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._held:
            while len(self._held) >= self._most:
                del self._held[next(iter(self._held))]
            self._held[key] = make()
        return self._held[key]


@dataclass(frozen=True)
class Factor:
    """A or B: its shape and dtype (safetensors name) are known, its numbers are read when they are asked for.

    read   gives a Tensor; not annotated so, for the plan (pydantic) resolves annotations, and loads no torch
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], Any]


@dataclass(frozen=True)
class Pair:
    """``scale`` * B [out, r] @ A [r, in] is added to the weight."""

    a: Factor
    b: Factor
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclass
class Lora:
    """An adapter, whatever it was read from.

    pairs     by Hugging Face module ("model.layers.0.self_attn.q_proj"), experts one by one (names.Site)
    rslora    the scale is alpha / sqrt(r) in its own words
    config    a PEFT adapter's config; empty for a bridge's
    left      what was left aside, a sentence each
    """

    layout: str
    directory: Path
    pairs: dict[str, Pair]
    rslora: bool = False
    config: dict[str, Any] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)

    @property
    def dtype(self) -> str:
        """The one dtype of all factors; F32 where they differ, which holds each of them exactly."""
        found = {factor.dtype for pair in self.pairs.values() for factor in (pair.a, pair.b)}
        return found.pop() if len(found) == 1 else "F32"
