"""What the tensors of an adapter are: the parts that peft 0.21 writes (``get_peft_model_state_dict``). No torch.

    MODULE.lora_A.weight [r, in], MODULE.lora_B.weight [out, r]      LoRA on a linear layer
    MODULE.lora_B.bias [out]                                         lora_bias
    MODULE.lora_embedding_A [r, rows], MODULE.lora_embedding_B [width, r]
    MODULE.lora_magnitude_vector [out]                               DoRA ([width] on an embedding)
    MODULE.base_layer.lora_A.weight ...                              target_parameters: one parameter further in
    MODULE.weight, MODULE.bias                                       modules_to_save, whole
    MODULE.bias, MODULE.base_layer.bias                              bias: all or lora_only
    MODULE.token_adapter.trainable_tokens_delta [tokens, width]      trainable_token_indices
    MODULE.base_layer.weight                                         the base's, saved where an embedding is a target

All under ``base_model.model.``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mst_convert.merge.targets import is_saved
from mst_core.tensors import TensorRef

PREFIX = "base_model.model."
FLOATS = ("F32", "BF16", "F16")
FACTOR = re.compile(
    r"(?P<module>.+?)(?P<deep>(\.base_layer)*)\."
    r"(?P<which>lora_A\.weight|lora_B\.weight|lora_B\.bias|lora_embedding_A|lora_embedding_B"
    r"|lora_magnitude_vector(\.weight)?)"
)
ROWS = re.compile(r"(?P<module>.+)\.token_adapter\.trainable_tokens_delta")
FIELDS = {
    "lora_A.weight": "a",
    "lora_B.weight": "b",
    "lora_B.bias": "bias",
    "lora_embedding_A": "a",
    "lora_embedding_B": "b",
    "lora_magnitude_vector": "magnitude",
    "lora_magnitude_vector.weight": "magnitude",
}
# Names of tensors that PEFT or a trainer writes and this merge has no place for.
FOREIGN: tuple[tuple[str, str], ...] = (
    (r"\.(lora_[AB]|modules_to_save)\.[^.]+\.(weight|bias)$", "carries an adapter's name, which PEFT leaves out"),
    (r"\.(modules_to_save|original_module|trainable_tokens_|token_adapter)", "of PEFT's memory, not of its files"),
    (r"\.(lora_mlp|lora_E|lora_ranknum|hada_|lokr_|vera_|ia3_|oft_)", "not LoRA"),
)


@dataclass
class Factors:
    """The tensors of one LoRA layer. ``depth`` counts the wrappers around it (``.base_layer``)."""

    module: str
    depth: int
    embedding: bool = False
    a: TensorRef | None = None
    b: TensorRef | None = None
    bias: TensorRef | None = None
    magnitude: TensorRef | None = None

    @property
    def refs(self) -> list[TensorRef]:
        return [ref for ref in (self.a, self.b, self.bias, self.magnitude) if ref is not None]


@dataclass
class Parts:
    """All tensors of an adapter. Keys are names of the base: of modules (``rows``) or tensors (``whole``, ``copies``).

    copies   what PEFT saved of the base unchanged; compared, not used
    """

    factors: list[Factors] = field(default_factory=list)
    whole: dict[str, TensorRef] = field(default_factory=dict)
    rows: dict[str, TensorRef] = field(default_factory=dict)
    copies: dict[str, TensorRef] = field(default_factory=dict)

    @property
    def refs(self) -> list[TensorRef]:
        """Every tensor that changes the base."""
        return [*(ref for one in self.factors for ref in one.refs), *self.whole.values(), *self.rows.values()]


def sort_out(header: Mapping[str, TensorRef], config: Mapping[str, Any]) -> tuple[Parts, list[str]]:
    """The parts in the order of their names, and a sentence for every tensor that is none."""
    parts = Parts()
    layers: dict[tuple[str, int], Factors] = {}
    wrong = []
    for full, ref in sorted(header.items()):
        name = full.removeprefix(PREFIX)
        if name == full:
            wrong.append(f"{full}: {_why_foreign(full)}")
        elif ref.dtype not in FLOATS:
            wrong.append(f"{full}: dtype {ref.dtype}; it must be one of {', '.join(FLOATS)}")
        elif match := FACTOR.fullmatch(name):
            key = (match["module"], match["deep"].count(".base_layer"))
            layer = layers.setdefault(key, Factors(*key))
            layer.embedding |= "embedding" in match["which"]
            setattr(layer, FIELDS[match["which"]], ref)
        elif match := ROWS.fullmatch(name):
            parts.rows[match["module"]] = ref
        elif not _place_whole(parts, name, ref, config):
            wrong.append(f"{full}: {_why_foreign(full)}")
    for layer in layers.values():
        wrong += _halves(layer, dora=bool(config.get("use_dora")), bias=bool(config.get("lora_bias")))
    parts.factors = list(layers.values())
    return parts, sorted(wrong)


def _place_whole(parts: Parts, name: str, ref: TensorRef, config: Mapping[str, Any]) -> bool:
    """Put a tensor that is not of LoRA itself where it belongs; False if it belongs nowhere."""
    plain = name.replace(".base_layer.", ".")
    if any(re.search(pattern, name) for pattern, _ in FOREIGN):
        return False
    if is_saved(config, plain) or (plain.endswith(".bias") and config.get("bias", "none") != "none"):
        parts.whole[plain] = ref
    elif name.endswith((".base_layer.weight", "embed_tokens.weight", "lm_head.weight")):
        parts.copies[plain] = ref
    else:
        return False
    return True


def _halves(layer: Factors, *, dora: bool, bias: bool) -> Iterable[str]:
    name = layer.refs[0].name
    for which, ref in (("A", layer.a), ("B", layer.b)):
        if ref is None:
            yield f"{name}: there is no lora_{which} to go with it"
        elif len(ref.shape) != 2:
            yield f"{ref.name}: shape {list(ref.shape)}; A is [rank, in] and B [out, rank]"
    if dora != (layer.magnitude is not None):
        yield f"{name}: use_dora is {dora}, but there is {'no' if dora else 'a'} lora_magnitude_vector"
    if bias != (layer.bias is not None):
        yield f"{name}: lora_bias is {bias}, but there is {'no' if bias else 'a'} bias of B"


def _why_foreign(name: str) -> str:
    for pattern, reason in FOREIGN:
        if re.search(pattern, name):
            return reason
    if not name.startswith(PREFIX):
        return f"not under {PREFIX}, as PEFT saves them"
    return "neither of LoRA nor in modules_to_save: a tensor of the base that was trained or resized"
