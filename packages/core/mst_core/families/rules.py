"""What a family is: rows (Rule), sizes (Dims), facts, and the tasks (task.py) that follow from them.

A rule names one native (Megatron) tensor and the Hugging Face tensors it is made of, with their shapes in symbols:
v vocabulary, h hidden, f ffn, 2f twice that, d head, q = heads*d, k = groups*d, qkv = q + 2k, or a name of
``Dims.more``. In names ``{i}`` is the decoder layer, ``{e}`` the expert, ``{m}`` the multi-token-prediction layer and
``{n}`` its Hugging Face number (layers + m). ``when`` is a fact of the model or of that layer, or several joined by
" and "; a rule without it always applies.

Native names are those of torch_dist with TransformerEngine's spec; what other specs and formats call the same tensor is
in mst_core.megatron_names. The tensors of all experts of a layer are one native tensor with a leading expert axis.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from mst_core.errors import InputError
from mst_core.families.task import Task, TensorSpec, task_of

if TYPE_CHECKING:
    from mst_core.manifest import ModelInfo

Config = Mapping[str, Any]
Where = str | Path
HEAD = "output_layer.weight"


@dataclass(frozen=True)
class Rule:
    """``native`` is made of ``hf`` ("name [shape]") by ``op`` (of ops.OPS), if model or layer has the facts ``when``.

    transposed   the last two axes of the Hugging Face tensors are swapped: [.., in, out]
    """

    native: str
    hf: tuple[str, ...]
    op: str = "copy"
    when: str | None = None
    transposed: bool = False


@dataclass(frozen=True)
class Dims:
    """The sizes of a decoder. ``vocab`` is config.vocab_size, never the tokenizer's length.

    more   sizes that not every family has, by the name that its rules' shapes use: experts, moe_ffn, q_lora, ...
           ``mtp`` is the number of multi-token-prediction layers
    """

    layers: int
    hidden: int
    heads: int
    groups: int
    head_dim: int
    ffn: int
    vocab: int
    more: Mapping[str, int] = field(default_factory=dict)

    def size(self, symbol: str) -> int:
        """The number behind a symbol of a rule's shape; a digit before it is a factor (2f), alone it is itself."""
        if symbol[0].isdigit():
            return int(symbol[0]) * (self.size(symbol[1:]) if symbol[1:] else 1)
        fixed = {
            "v": self.vocab,
            "h": self.hidden,
            "f": self.ffn,
            "d": self.head_dim,
            "q": self.heads * self.head_dim,
            "k": self.groups * self.head_dim,
            "qkv": (self.heads + 2 * self.groups) * self.head_dim,
        }
        return fixed[symbol] if symbol in fixed else self.more[symbol]

    def as_dict(self) -> dict[str, int]:
        fixed = {name: int(getattr(self, name)) for name in self.__dataclass_fields__ if name != "more"}
        return {**fixed, **self.more}


class Reading(NamedTuple):
    """What a family reads from config.json: sizes, facts of the model, facts of each layer (none: all alike)."""

    dims: Dims
    facts: frozenset[str]
    layers: tuple[frozenset[str], ...] = ()


@dataclass(frozen=True)
class Model:
    """One model of a family: what config.json says, read once."""

    family: Family
    dims: Dims
    facts: frozenset[str]
    dtype: str
    """What config.json says ("bfloat16"); the tensors' own headers have the last word."""
    layer_facts: tuple[frozenset[str], ...] = ()
    known: dict[int, list[Task]] = field(default_factory=dict, compare=False, repr=False)
    """What ``tasks`` found, by the multiple that pads the vocabulary."""

    @property
    def tied(self) -> bool:
        return "tied" in self.facts

    @property
    def scores(self) -> bool:
        """Whether it is a reward model: a scalar head in the place of the vocabulary's."""
        return "reward" in self.facts

    @property
    def kind(self) -> Literal["model", "reward"]:
        """Of its manifest."""
        return "reward" if self.scores else "model"

    @property
    def architecture(self) -> str:
        """transformers' class."""
        return self.family.reward if self.scores else self.family.architecture

    @property
    def rules(self) -> tuple[Rule, ...]:
        """Its family's. The scalar head is called as mcore-bridge does, and never padded."""
        if not self.scores:
            return self.family.rules
        kept = (rule for rule in self.family.rules if not rule.native.endswith(HEAD))
        return (*kept, Rule(HEAD, ("score.weight [1,h]",)))

    @property
    def uniform(self) -> bool:
        """Whether all layers have the same tensors: only then can a checkpoint stack them."""
        return len(set(self.layer_facts)) < 2

    def applies(self, rule: Rule, layer: int | None = None) -> bool:
        """Whether the model (or its layer) has the facts that ``rule`` asks for."""
        mine = self.layer_facts[layer] if layer is not None and self.layer_facts else frozenset()
        return rule.when is None or all(fact in self.facts or fact in mine for fact in rule.when.split(" and "))

    def hf_tensors(self) -> list[TensorSpec]:
        """Every tensor that the Hugging Face directory must hold (a tied lm_head is not one)."""
        return [spec for task in tasks(self) for spec in task.hf]

    @property
    def parameters(self) -> int:
        return sum(prod(spec.shape) for spec in self.hf_tensors())

    def duplicates(self) -> dict[str, str]:
        """Tensors that a directory may hold beside their original, by name: {copy: original}."""
        found = tasks(self)
        # Vision-language models have a prefix of their own, on both sides.
        embedding = next((t.hf[0].name for t in found if t.key.endswith("embedding.word_embeddings.weight")), "")
        # The name of the head, InternLM2's too, is in the rule that a tied model leaves out.
        heads = (rule.hf[0] for rule in self.family.rules if rule.native.endswith(HEAD))
        own_head = next(heads, "lm_head.weight").partition(" ")[0]
        copies = {own_head: embedding} if self.tied else {}
        head = embedding if self.tied else own_head
        for m in range(self.dims.more.get("mtp", 0)):
            layer = f"model.layers.{self.dims.layers + m}"
            copies[f"{layer}.embed_tokens.weight"] = embedding
            copies[f"{layer}.shared_head.head.weight"] = head
        names = {spec.name for task in found for spec in task.hf}
        return {copy: original for copy, original in copies.items() if original in names and copy not in names}

    def info(self, dtype: str | None = None) -> ModelInfo:
        """The manifest's description of this model."""
        from mst_core.manifest import ModelInfo

        return ModelInfo(
            family=self.family.name,
            architecture=self.architecture,
            dims=self.dims.as_dict(),
            dtype=dtype or self.dtype,
            tied=self.tied,
            parameters=self.parameters,
        )


@dataclass(frozen=True)
class Family:
    """An architecture as data. ``read`` gives dims and facts of a config, ``translate`` Megatron's settings.

    reward    transformers' class of this decoder with a scalar head, "" where it has none
    ignored   Hugging Face tensors of old checkpoints that hold no parameters (computed buffers), with ``{i}``:
              accounted for by name, not converted
    dialects  facts that names decide where config.json does not: {fact, or facts joined by " and ": a tensor whose
              presence means it, with ``{i}`` for any layer and ``{n}`` for the number after the last}. The first whose
              tensor is there counts; the very first where the names are not known
    carried   prefixes of Hugging Face tensors that no rule maps and that pass as they are, with their native prefix;
              where dialects differ in it, one pair a dialect, in the dialects' order
    """

    name: str
    architecture: str
    model_type: str
    rules: tuple[Rule, ...]
    read: Callable[[Config, Where], Reading]
    translate: Callable[[Config, Where], dict[str, dict[str, Any]]]
    reward: str = ""
    ignored: tuple[str, ...] = ("model.layers.{i}.self_attn.rotary_emb.inv_freq",)
    dialects: Mapping[str, str] = field(default_factory=dict)
    carried: tuple[tuple[str, str], ...] = ()

    def model(
        self, config: Config, where: Where = "config.json", *, names: Collection[str] = (), dialect: str | None = None
    ) -> Model:
        """Dims and facts of ``config``. InputError for a missing or impossible size.

        names     the tensors of the directory, which decide the dialect
        dialect   the dialect itself (a manifest remembers it)
        """
        check_counts(config, where)
        scores = self._scores(config, where)
        dims, facts, layers = self.read(_untied(config) if scores else config, where)
        if scores:
            facts |= {"reward"}
        dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
        if self.dialects:
            there = frozenset(names)
            probe = (spoken for spoken, name in self.dialects.items() if there & _each_layer(name, dims.layers))
            facts = facts.union((dialect or next(probe, next(iter(self.dialects)))).split(" and "))
        return Model(self, dims, facts, str(dtype), layers)

    def megatron(self, config: Config, where: Where = "config.json") -> dict[str, dict[str, Any]]:
        """Megatron's settings, in groups (see families/translate.py). InputError where Megatron has no equivalent."""
        return self.translate(_untied(config) if self._scores(config, where) else config, where)

    def _scores(self, config: Config, where: Where) -> bool:
        """Whether ``config`` is a reward model's. InputError for a classifier with more than one label."""
        if not self.reward or (config.get("architectures") or [""])[0] != self.reward:
            return False
        check_labels(config, where)
        return True

    def carried_native(self, name: str) -> str | None:
        """The native name of a Hugging Face tensor that is carried as it is; None if it is not one."""
        for hf, native in self.carried:
            if name.startswith(hf):
                return native + name.removeprefix(hf)
        return None

    def is_ignored(self, name: str, dims: Dims) -> bool:
        return any(name in _each_layer(pattern, dims.layers) for pattern in self.ignored)


def check_labels(config: Config, where: Where) -> None:
    """Refuse a sequence classifier that is no reward model."""
    labels = len(config["id2label"]) if config.get("id2label") else config.get("num_labels", 2)
    if labels != 1:
        raise InputError(f"is a classifier of {labels} labels; a reward model has one", where=where)


def _untied(config: Config) -> Config:
    """Without the tie of the head that a reward model does not have."""
    return {**config, "tie_word_embeddings": False}


LAYERS = ("num_hidden_layers", "num_layers", "num_nextn_predict_layers")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
MOST = 10_000


def check_counts(config: Config, where: Where) -> None:
    """Refuse numbers of layers and experts that no model has, before anything counts to them."""
    text = config.get("text_config")
    for part in (config, text if isinstance(text, Mapping) else {}):
        counts = {key: part[key] for key in (*LAYERS, *EXPERTS) if isinstance(part.get(key), int)}
        layers = max((counts[key] for key in LAYERS if key in counts), default=1)
        experts = max((counts[key] for key in EXPERTS if key in counts), default=1)
        for key, value in counts.items():
            if value > MOST or (key in EXPERTS and layers * experts > 100 * MOST):
                raise InputError(f"{key} {value} is more than any model has", where=where)


@lru_cache(maxsize=64)
def _each_layer(pattern: str, layers: int) -> frozenset[str]:
    return frozenset(pattern.format(i=i, n=layers) for i in range(layers))


def tasks(model: Model, vocab_padding: int = 1) -> list[Task]:
    """Every native tensor of ``model``, layer by layer; the vocabulary padded to a multiple of ``vocab_padding``."""
    if vocab_padding not in model.known:
        model.known[vocab_padding] = _tasks(model, vocab_padding)
    return list(model.known[vocab_padding])


def _tasks(model: Model, vocab_padding: int) -> list[Task]:
    rules = model.rules
    found = [
        task_of(rule, model.dims, {}, vocab_padding)
        for rule in rules
        if "{i}" not in rule.native and "{m}" not in rule.native and model.applies(rule)
    ]
    for layer in range(model.dims.layers):
        for rule in rules:
            if "{i}" in rule.native and model.applies(rule, layer):
                found.append(task_of(rule, model.dims, {"i": layer}, vocab_padding))
    for m in range(model.dims.more.get("mtp", 0)):
        for rule in rules:
            if "{m}" in rule.native and model.applies(rule):
                found.append(task_of(rule, model.dims, {"m": m, "n": model.dims.layers + m}, vocab_padding))
    return found
