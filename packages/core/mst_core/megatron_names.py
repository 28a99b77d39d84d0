"""What a native tensor is called in each kind of Megatron checkpoint (MAPPINGS.md 1.6 to 1.9).

Native names (families.Task) are those of TransformerEngine's spec in torch_dist. The local spec calls some norms
otherwise, HybridModel counts attention and MLP as two layers, and a legacy state dict has its own names for norms and
experts. Only names: where a tensor's elements are is the business of torch_dist.py and legacy.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from mst_core.errors import InputError
from mst_core.families import Config, Family, Model, Task
from mst_core.families.rules import Where

Spec = Literal["te", "local", "hybrid"]
Form = Literal["stacked", "per-layer"]

LINEAR_NORM = "self_attention.linear_qkv.layer_norm_"
FC1_NORM = "mlp.linear_fc1.layer_norm_"
MLP_NORM = "pre_mlp_layernorm."
MLA_NORMS = {
    "self_attention.linear_q_up_proj.layer_norm_": "self_attention.q_layernorm.",
    "self_attention.linear_kv_up_proj.layer_norm_": "self_attention.kv_layernorm.",
}


class Part(NamedTuple):
    """A stored tensor: its key, whether it has a leading layer axis, and the rows of the task's matrix it holds."""

    key: str
    stacked: bool
    row: int
    rows: int


@dataclass(frozen=True)
class Naming:
    """How the tensors of one torch_dist checkpoint are called.

    prefix   what other writers put before every model key ("model.")
    mla      the model has multi-latent attention, whose local spec has no key map for its norms
    fsdp     Megatron-FSDP's fsdp_dtensor, which keeps state dict names, each expert and gate and up apart: experts
             grouped or sequential
    """

    spec: Spec
    form: Form
    mla: bool
    prefix: str = ""
    fsdp: Literal["grouped", "sequential"] | None = None

    def parts(self, task: Task) -> list[Part]:
        """The stored tensors of a task."""
        if self.fsdp is None:
            key, stacked = self.key(task)
            return [Part(key, stacked, 0, task.rows)]
        found, rows = [], task.rows // (task.experts or 1)
        name = self.prefix + state_name(task.native, self.spec)
        for expert in range(task.experts or 1):
            key = name if task.experts is None else expert_name(name, expert, self.fsdp == "grouped")
            gated = ".linear_fc1." in name and "layer_norm" not in name
            halves = (("_w", 0), ("_v", rows // 2)) if gated else (("", 0),)
            found += [Part(key + end, False, expert * rows + row, rows // len(halves)) for end, row in halves]
        return found

    def key(self, task: Task) -> tuple[str, bool]:
        """The key of a task, and whether its tensor has a leading layer axis."""
        stacked = self.form == "stacked" and task.layer is not None
        name = task.key if stacked else task.native
        if self.spec == "local":
            name = local_key(name, self.mla)
        if self.spec == "hybrid":
            name = _hybrid(name, task.layer)
        return self.prefix + name, stacked


def local_key(name: str, mla: bool) -> str:
    """torch_dist keys of the local spec: its key map turns every pre-MLP norm but MLA's into linear_fc1's."""
    if not mla:
        return name.replace(f".{MLP_NORM}", f".{FC1_NORM}")
    for fused, plain in {**MLA_NORMS, FC1_NORM: MLP_NORM}.items():
        name = name.replace(f".{fused}", f".{plain}")
    return name


def hybrid_pattern(model: Model) -> str:
    """HybridModel's layers: attention and MLP or experts, in turn."""
    return ("*E" if "experts" in model.dims.more else "*-") * model.dims.layers


def _hybrid(name: str, layer: int | None) -> str:
    """HybridModel: attention of GPT layer i is layer 2i, its MLP or experts 2i + 1; the last norm is final_norm."""
    if layer is None:
        return name.replace("decoder.final_layernorm.", "decoder.final_norm.")
    inside = name.split(".", 3)[3]
    mlp = inside.startswith(("mlp.", MLP_NORM))
    return f"decoder.layers.{2 * layer + int(mlp)}.{inside}"


def model_of(family: Family, config: Config, keys: Iterable[str], where: Where = "config.json") -> Model:
    """The model of a Megatron directory: its keys, not config.json, say whether it has layers of MTP."""
    mtp = any(key.startswith("mtp.") for key in keys)
    dialect = next((spoken for spoken in family.dialects if ("mtp" in spoken.split(" and ")) == mtp), None)
    return family.model(config, where, dialect=dialect)


def is_mla(model: Model) -> bool:
    """Whether the model's attention is multi-latent."""
    return any("linear_kv_up_proj" in rule.native for rule in model.family.rules)


def detect(model: Model, tasks: Iterable[Task], keys: Iterable[str]) -> Naming:
    """The naming under which most tasks are found among ``keys``; the first of equals, which is TransformerEngine's."""
    found, mla, wanted = set(keys), is_mla(model), list(tasks)
    prefixes = sorted({key.partition("decoder.layers.")[0] for key in found if "decoder.layers." in key} | {""})
    prefixes = [p for p in prefixes if not p.startswith(("optimizer.", "chained_", "mtp."))]
    forms: tuple[Form, ...] = ("stacked", "per-layer")
    specs: tuple[Spec, ...] = ("te", "local")
    candidates = [Naming(spec, form, mla, prefix) for prefix in prefixes for form in forms for spec in specs]
    candidates += [Naming("hybrid", "per-layer", mla, prefix) for prefix in prefixes]
    writers: tuple[Literal["grouped", "sequential"], ...] = ("grouped", "sequential")
    candidates += [Naming(s, "per-layer", mla, prefix, w) for prefix in prefixes for s in specs for w in writers]
    return max(candidates, key=lambda naming: sum(naming.parts(task)[0].key in found for task in wanted))


def naming(model: Model, spec: Spec, form: Form) -> Naming:
    """The naming to write. InputError where ``model`` cannot be written so."""
    if form == "stacked" and not model.uniform:
        raise InputError(
            "its layers differ, and only layers that are all alike can be stacked", hint="--form per-layer"
        )
    if spec == "hybrid":
        kinds = {"moe" in facts for facts in model.layer_facts} or {False}
        if len(kinds) > 1 or "mtp" in model.facts:
            raise InputError("dense and MoE layers mixed, or MTP layers, have no hybrid pattern that Megatron reads")
        form = "per-layer"
    return Naming(spec, form, is_mla(model))


# --- legacy state dicts ------------------------------------------------------------------------------------------

LOCAL_STATE = {LINEAR_NORM: "input_layernorm.", FC1_NORM: MLP_NORM, **MLA_NORMS}
"""What the local spec's own state dict calls the norms that torch_dist keys call otherwise."""


def state_name(native: str, spec: Spec) -> str:
    """A native name (of experts: without their number) in a rank's state dict, with the layer's global number."""
    name = native.replace(".transformer_layer.", ".mtp_model_layer.")
    if spec == "local":
        for fused, plain in LOCAL_STATE.items():
            name = name.replace(f".{fused}", f".{plain}")
    return name


def expert_name(native: str, expert: int, grouped: bool) -> str:
    """An expert's tensor in a rank's state dict; ``expert`` counts on that rank."""
    if not grouped:
        return native.replace(".experts.experts.", f".experts.local_experts.{expert}.")
    return f"{native.replace('.experts.experts.', '.experts.')}{expert}"


SHARDED_ROWS = (
    "embedding.word_embeddings.weight",
    "output_layer.weight",
    "linear_qkv.weight",
    "linear_qkv.bias",
    "linear_q_proj.weight",
    "linear_q_up_proj.weight",
    "linear_kv_up_proj.weight",
    "linear_fc1.weight",
    "linear_fc1.bias",
    "core_attention.softmax_offset",
    "eh_proj.weight",
)
SHARDED_COLUMNS = ("linear_proj.weight", "linear_fc2.weight")
LATENT_DOWN = ("linear_q_down_proj.weight", "linear_kv_down_proj.weight")


def tensor_parallel_axis(native: str, spec: Spec) -> int | None:
    """0: tensor parallelism cuts the rows, 1: the columns, None: every rank has all (MAPPINGS.md 1.3).

    The local spec cuts MLA's down projections, which TransformerEngine's duplicates.
    """
    if native.endswith(SHARDED_ROWS) or (spec == "local" and native.endswith(LATENT_DOWN)):
        return 0
    return 1 if native.endswith(SHARDED_COLUMNS) else None
