"""Which linear layers can have an adapter, and what the two bridges call its tensors. No torch.

Sources: megatron-bridge 0.6.2 ``peft/{lora,canonical_lora,adapter_wrapper,utils}.py``; mcore-bridge 1.6.5
``tuners/{lora,utils}.py``; ms-swift ``megatron/utils/megatron_lm_utils.py``. L layers, r rank, after the layer's name:

    megatron-bridge  LoRA           adapter.linear_in.weight [L, r, in], adapter.linear_out.weight [L, out, r]
                     CanonicalLoRA  adapter.adapter_q.linear_in.weight ..., _k, _v, _gate, _up: of one projection
    mcore-bridge                    lora_A.NAME.weight [L, r, in], lora_B.NAME.weight [L, out, r]

Rows of a fused B are those of the fused weight (MAPPINGS.md 1.1, 1.2), but for two that depend on the tensor parallel
size n of the run that saves or loads:

    CanonicalLoRA's adapter_gate and adapter_up B   each is cut as if it were [gate; up] itself: the first halves of all
                                                    ranks' rows, then the second halves
    mcore-bridge's B of linear_fc1                  is not cut so, though it is: [gate; up] of rank 0, of rank 1, ...
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from mst_core.families import Model, Region, Task, tasks

QKV = ("adapter_q", "adapter_k", "adapter_v")
GATE_UP = ("adapter_gate", "adapter_up")
TARGETS = {
    "adapter_q": "linear_q",
    "adapter_k": "linear_k",
    "adapter_v": "linear_v",
    "adapter_gate": "linear_fc1_gate",
    "adapter_up": "linear_fc1_up",
}
"""CanonicalLoRA's adapters, and what its ``target_modules`` calls them."""
BRIDGE = re.compile(r"(?P<module>.+)\.adapter\.((?P<part>adapter_(q|k|v|gate|up))\.)?linear_(?P<which>in|out)\.weight")
MCORE = re.compile(r"(?P<module>.+)\.lora_(?P<which>[AB])\.(?P<name>[^.]+)\.weight")

TRAINING = ("optimizer.", "chained_", "rng_state")
"""What the keys of training state begin with."""


def is_adapter(keys: Iterable[str]) -> bool:
    """Whether a torch_dist checkpoint holds an adapter of a bridge and nothing else but training state."""
    kept = [key for key in keys if not key.startswith(TRAINING)]
    return bool(kept) and all(BRIDGE.fullmatch(key) or MCORE.fullmatch(key) for key in kept)


@dataclass(frozen=True)
class Site:
    """A linear layer of Megatron that can have an adapter, and the Hugging Face modules that it is made of."""

    task: Task

    @property
    def module(self) -> str:
        """ "decoder.layers.3.mlp.linear_fc1"."""
        return self.task.native.removesuffix(".weight")

    @property
    def kind(self) -> str:
        """The same of all layers, "decoder.layers.mlp.linear_fc1"."""
        return self.task.key.removesuffix(".weight")

    @property
    def inside(self) -> str:
        """The path in the layer, "mlp.linear_fc1"."""
        return self.module.partition(f".{self.task.layer}.")[2]

    @property
    def leaf(self) -> str:
        """ "linear_fc1"."""
        return self.module.rpartition(".")[2]

    @property
    def hf(self) -> tuple[str, ...]:
        """The Hugging Face modules, in the order of the regions."""
        return tuple(spec.name.removesuffix(".weight") for spec in self.task.hf)

    @property
    def canonical(self) -> tuple[str, ...]:
        """CanonicalLoRA's names of the parts; empty where the layer has one part, and so one plain adapter."""
        return {("linear_qkv", 3): QKV, ("linear_fc1", 2): GATE_UP}.get((self.leaf, len(self.task.hf)), ())

    @property
    def rows(self) -> tuple[int, ...]:
        """Output features of each part."""
        return tuple(spec.rows for spec in self.task.hf)


def sites(model: Model) -> list[Site]:
    """Every layer of the decoder that can have an adapter: linear, not of an expert."""
    return [Site(task) for task in tasks(model) if _linear(task)]


def _linear(task: Task) -> bool:
    leaf = task.native.removesuffix(".weight").rpartition(".")[2]
    plain = task.experts is None and not task.transposed and len(task.shape) == 2
    named = task.native.endswith(".weight") and all(spec.name.endswith(".weight") for spec in task.hf)
    return task.layer is not None and plain and named and leaf.startswith("linear_")


def targets(found: list[Site], everywhere: list[Site], canonical: bool, model: Model) -> list[str]:
    """``target_modules`` of Megatron-Bridge for adapters on ``found``: plain names where they mean nothing else."""
    named: dict[str, None] = {}
    kinds = {site.kind for site in found}
    experts = {task.key.rpartition(".")[0] for task in tasks(model) if task.experts is not None}
    for site in found:
        others = {other.kind for other in everywhere if other.leaf == site.leaf} - kinds
        experts_too = any(name.endswith(f".{site.leaf}") for name in experts)
        short = not others and not experts_too
        prefix = "" if short else f"*.{site.inside.removesuffix(site.leaf)}"
        parts = [TARGETS[part] for part in site.canonical] if canonical and site.canonical else [site.leaf]
        named.update(dict.fromkeys(prefix + part for part in parts))
    return list(named)


def halves_by_rank(rows: int, tp: int) -> tuple[Region, ...]:
    """CanonicalLoRA's gate or up: where its rows stand in the checkpoint of ``tp`` ranks."""
    each = rows // (2 * tp)
    return tuple(
        Region(0, (2 * rank + half) * each, (half * tp + rank) * each, each) for half in (0, 1) for rank in range(tp)
    )


def gate_up_by_rank(rows: int, tp: int) -> tuple[Region, ...]:
    """mcore-bridge's [gate; up] of ``rows`` rows: where they stand in the checkpoint of ``tp`` ranks."""
    each = rows // (2 * tp)
    return tuple(
        Region(0, (half * tp + rank) * each, (2 * rank + half) * each, each) for half in (0, 1) for rank in range(tp)
    )
