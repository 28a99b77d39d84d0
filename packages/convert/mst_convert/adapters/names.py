"""Which linear layers can have an adapter, and what the two bridges call its tensors. No torch.

Sources: megatron-bridge 0.6.2 ``peft/{lora,canonical_lora,adapter_wrapper,utils}.py``; mcore-bridge 1.6.5
``tuners/{lora,utils}.py``; ms-swift ``megatron/utils/megatron_lm_utils.py``. L layers, r rank, after the layer's name:

    megatron-bridge  LoRA           adapter.linear_in.weight [L, r, in], adapter.linear_out.weight [L, out, r]
                     CanonicalLoRA  adapter.adapter_q.linear_in.weight ..., _k, _v, _gate, _up: of one projection
    mcore-bridge                    lora_A.NAME.weight [L, r, in], lora_B.NAME.weight [L, out, r]

Experts have one more axis, [L, E, r, in], under the key of their weight (``mlp.experts.experts.linear_fc1``): in
mcore-bridge, and in LoRA of all three kinds: share_expert_adapters (all E are equal), an adapter each, SequentialMLP.
With experts_shared_outer_loras A of fc1 and B of fc2 have no such axis, nor have both in checkpoints of older releases.
CanonicalLoRA gives experts a plain adapter. Both bridges adapt routers; Megatron-Bridge alone the head, with the rows
of the padded vocabulary (mcore-bridge adapts layers of TransformerEngine, which it is not); neither the embedding.

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
from functools import cached_property

from mst_core.families import Model, Region, Task, TensorSpec, tasks

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
    """A linear layer of Megatron that can have an adapter, or one expert's, and the Hugging Face modules it is made of.

    An expert's modules are named as transformers 4 had them, ``X.mlp.experts.3.gate_proj``; of experts that no
    generation had apart (gpt-oss) ``X.mlp.experts.3.gate_up_proj``, as mcore-bridge calls them.
    """

    task: Task
    expert: int | None = None

    @property
    def module(self) -> str:
        """ "decoder.layers.3.mlp.linear_fc1", as checkpoints have it: all experts of a layer are one."""
        return self.task.native.removesuffix(".weight")

    @property
    def kind(self) -> str:
        """The same of all layers, "decoder.layers.mlp.linear_fc1"."""
        return self.task.key.removesuffix(".weight")

    @property
    def where(self) -> str:
        """For messages."""
        return self.module if self.expert is None else f"{self.module} of expert {self.expert}"

    @property
    def inside(self) -> str:
        """The path in the layer, "mlp.linear_fc1", as modules have it: "mlp.experts.linear_fc1"."""
        path = self.module if self.task.layer is None else self.module.partition(f".{self.task.layer}.")[2]
        return path.replace(".experts.experts.", ".experts.")

    @property
    def leaf(self) -> str:
        """ "linear_fc1"."""
        return self.module.rpartition(".")[2]

    @property
    def stacked(self) -> bool:
        """Whether Hugging Face has all experts in one tensor."""
        return self.expert is not None and len(self.task.hf) == 1

    @cached_property
    def specs(self) -> tuple[TensorSpec, ...]:
        """The Hugging Face tensors that its rows are in."""
        if self.expert is None or self.stacked:
            return self.task.hf
        each = len(self.task.hf) // self.experts
        return self.task.hf[self.expert * each : (self.expert + 1) * each]

    @property
    def experts(self) -> int:
        """How many experts its layer has; 1 where it has none."""
        return self.task.experts or 1

    @property
    def hf(self) -> tuple[str, ...]:
        """The Hugging Face modules, in the order of the regions."""
        if self.stacked:
            box, _, parameter = self.specs[0].name.rpartition(".")
            return (f"{box}.{self.expert}.{parameter}",)
        return tuple(spec.name.removesuffix(".weight") for spec in self.specs)

    @property
    def canonical(self) -> tuple[str, ...]:
        """CanonicalLoRA's names of the parts; empty where the layer has one plain adapter, as experts have."""
        parts = {("linear_qkv", 3): QKV, ("linear_fc1", 2): GATE_UP}.get((self.leaf, len(self.specs)), ())
        return parts if self.expert is None else ()

    @property
    def rows(self) -> tuple[int, ...]:
        """Output features of each part."""
        return tuple(spec.rows // (self.experts if self.stacked else 1) for spec in self.specs)

    @property
    def height(self) -> int:
        """Output features of the layer, with the vocabulary's padding."""
        return self.task.rows // self.experts

    @property
    def columns(self) -> int:
        """Input features."""
        return self.task.columns

    @cached_property
    def regions(self) -> tuple[Region, ...]:
        """Where the rows of the parts land."""
        if self.expert is None:
            return self.task.regions
        first, rows = self.expert * self.height, self.rows[0]
        source, start = (0, self.expert * rows) if self.stacked else (self.expert * len(self.specs), 0)
        return tuple(
            r._replace(start=r.start - first, source=r.source - source, source_start=r.source_start - start)
            for r in self.task.regions
            if first <= r.start < first + self.height
        )


def sites(model: Model, vocab_padding: int = 1) -> list[Site]:
    """Every layer that can have an adapter: linear layers of the decoder, of each expert, routers, an untied head."""
    found = [task for task in tasks(model, vocab_padding) if _linear(task)]
    return [Site(task, e) for task in found for e in (range(task.experts) if task.experts else [None])]


def _linear(task: Task) -> bool:
    leaf = task.native.removesuffix(".weight").rpartition(".")[2]
    if not task.native.endswith(".weight") or len(task.shape) != (2 if task.experts is None else 3):
        return False
    if task.layer is None:
        return leaf == "output_layer"
    return leaf.startswith("linear_") or leaf == "router"


def unfit(module: str) -> str:
    """Why a Hugging Face module, or a key of a bridge, can have no adapter in the two bridges."""
    if re.search(r"(^|\.)(embed_tokens|tok_embeddings|word_embeddings)(\.|$)", module):
        return "is an embedding: both bridges adapt linear layers only, not VocabParallelEmbedding"
    if re.search(r"(^|\.)(lm_head|output_layer)(\.|$)", module):
        return "is a head that this base has tied to its embedding: Megatron has no layer of its own for it"
    if "shared_expert_gate" in module:
        return "is a parameter of Megatron's shared expert (gate_weight), not a layer that the bridges adapt"
    return "is no linear layer of this base that Megatron has too"


def targets(found: list[Site], everywhere: list[Site], canonical: bool = False, wild: bool = True) -> list[str]:
    """``target_modules`` for adapters on ``found``: plain names where they mean nothing else, else paths.

    wild   Megatron-Bridge's: a path begins with ``*.``, and experts may be grouped or one by one (local_experts)
    """
    named: dict[str, None] = {}
    kinds = {site.kind for site in found}
    kinds_of: dict[str, set[str]] = {}
    for site in everywhere:
        kinds_of.setdefault(site.leaf, set()).add(site.kind)
    for site in found:
        prefix = "" if kinds_of[site.leaf] <= kinds else site.inside.removesuffix(site.leaf)
        if prefix and wild:
            prefix = "*." + prefix + ("*" if site.expert is not None and not canonical else "")
        # CanonicalLoRA takes no linear_fc1 by that name, though it gives experts a plain adapter.
        parts = site.canonical or (GATE_UP if site.leaf == "linear_fc1" else ())
        named.update(dict.fromkeys(prefix + part for part in _asked(site, parts if canonical else ())))
    return list(named)


def _asked(site: Site, parts: tuple[str, ...]) -> list[str]:
    return [TARGETS[part] for part in parts] or [site.leaf]


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
