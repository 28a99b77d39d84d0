"""Reading a PEFT LoRA adapter: ``adapter_config.json`` and the header of ``adapter_model.safetensors``. No torch.

Nothing is guessed: a field of the config that could change the merged weights is either understood or refused by name,
a field nobody here has heard of must be empty, and every tensor must be the A or the B of exactly one module.
Fields and names are those of peft 0.21 (``LoraConfig``, ``get_peft_model_state_dict``).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mst_core import tensors
from mst_core.errors import InputError, many
from mst_core.tensors import TensorRef

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."

UNDERSTOOD = frozenset(
    [
        "peft_type",
        "r",
        "lora_alpha",
        "use_rslora",
        "rank_pattern",
        "alpha_pattern",
        "fan_in_fan_out",
        "bias",
        "init_lora_weights",
        "target_modules",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
    ]
)
# How the adapter was made, or how it is run: none of these can reach the merged weights.
INERT = frozenset(
    [
        "task_type",
        "auto_mapping",
        "peft_version",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
        "lora_dropout",
        "megatron_core",
        "qalora_group_size",
        "runtime_config",
        "eva_config",
        "velora_config",
        "ensure_weight_tying",
    ]
)
LATER = "mst-merge does not do this yet"
REFUSED: dict[str, str] = {
    "use_dora": f"DoRA also rescales every row of the merged weight (lora_magnitude_vector); {LATER}",
    "lora_bias": f"B has a bias of its own, which would need a bias in the base layer; {LATER}",
    "modules_to_save": f"whole modules were trained beside the adapter; {LATER}",
    "target_parameters": f"LoRA on 3-D expert parameters has a layout of its own; {LATER}",
    "trainable_token_indices": f"rows of the embedding were trained beside the adapter; {LATER}",
    "layer_replication": "the adapted model repeats layers of the base; merged layers would not be the base's layers",
    "alora_invocation_tokens": "aLoRA is active only after its invocation tokens; a merged weight is always active",
    "use_qalora": "QALoRA pools the input of A, which a merged weight cannot do",
    "use_bdlora": f"BD-LoRA stores block-diagonal factors; {LATER}",
    "arrow_config": "Arrow routes between adapters by the input; a merged weight cannot",
    "megatron_config": f"the adapter was trained on Megatron's own layers; {LATER}",
}
# init_lora_weights under which the base that was trained on is the base as published. Others (pissa, olora, corda,
# lora_ga, loftq) train on a changed base: their A and B belong to that one, unless PEFT converted them on saving.
PLAIN_INITS = (True, False, None, "gaussian", "eva", "orthogonal")
# Names of tensors that PEFT writes and this merge has no place for.
FOREIGN: tuple[tuple[str, str], ...] = (
    (r"\.lora_embedding_[AB]$", f"LoRA on an embedding; {LATER}"),
    (r"\.lora_magnitude_vector(\.weight)?$", f"DoRA; {LATER}"),
    (r"\.lora_[AB]\.bias$", f"a bias of the adapter; {LATER}"),
    (r"\.lora_[AB]\.[^.]+\.weight$", "carries an adapter's name, which PEFT leaves out when it saves"),
    (r"\.base_layer\.", f"a copy of a base tensor, saved because an embedding or the head was a target; {LATER}"),
    (r"\.(modules_to_save|trainable_tokens_|token_adapter)", f"trained beside the adapter; {LATER}"),
    (r"\.(lora_mlp|lora_E|lora_ranknum|hada_|lokr_|vera_|ia3_|oft_)", "not LoRA"),
)
FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<which>[AB])\.weight")
FLOATS = ("F32", "BF16", "F16")


@dataclass(frozen=True)
class Pair:
    """A [rank, in] and B [out, rank] of one module, and its effective scale."""

    module: str
    a: TensorRef
    b: TensorRef
    rank: int
    alpha: float
    scale: float


@dataclass(frozen=True)
class Adapter:
    directory: Path
    config: Mapping[str, Any]
    pairs: tuple[Pair, ...]


def read(directory: Path) -> Adapter:
    """The adapter in ``directory``. InputError with every reason why it cannot be merged."""
    config = read_config(directory)
    wrong = refusals(config)
    if wrong:
        raise many(
            [InputError(reason, where=f"{directory.name}/{CONFIG}") for reason in wrong],
            what=f"{directory} cannot be merged:",
            hint="train without it, or merge it with PEFT",
        )
    weights = directory / WEIGHTS
    if not weights.is_file():
        pickled = (directory / "adapter_model.bin").is_file()
        raise InputError(
            f"{'adapter_model.bin is a pickle and is not read' if pickled else 'no ' + WEIGHTS}",
            where=directory,
            hint="load it with PEFT and save_pretrained() it: that writes safetensors" if pickled else None,
        )
    pairs, wrong = pair_up(tensors.file_headers(weights), config)
    if wrong:
        raise many(
            [InputError(reason) for reason in wrong],
            what=f"{weights} has {len(wrong)} tensor{'s' if len(wrong) > 1 else ''} that cannot be merged:",
            hint="every tensor must be the lora_A or the lora_B of one module, as PEFT saves them",
        )
    if not pairs:
        raise InputError("the adapter has no tensors", where=weights)
    return Adapter(directory, config, tuple(pairs))


def read_config(directory: Path) -> dict[str, Any]:
    path = directory / CONFIG
    if not directory.is_dir():
        raise InputError("no such directory", where=directory, hint="give a PEFT adapter directory")
    if not path.is_file():
        model = (directory / "config.json").is_file()
        raise InputError(
            f"no {CONFIG}: not a PEFT adapter" + (", but a whole model" if model else ""),
            where=directory,
            hint="--adapter is the directory with adapter_config.json, --model the base",
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise InputError(f"cannot be read as JSON: {error}", where=path) from error
    if not isinstance(config, dict):
        raise InputError("is not a JSON object", where=path)
    return config


def refusals(config: Mapping[str, Any]) -> list[str]:
    """Every reason in the config why a plain LoRA merge would be wrong. Empty: none."""
    found = []
    kind = config.get("peft_type")
    if kind != "LORA":
        return [f"peft_type is {kind!r}: only LORA can be merged"]
    for name, reason in REFUSED.items():
        if config.get(name):
            found.append(f"{name}: {reason}")
    if config.get("bias", "none") != "none":
        found.append(f"bias is {config['bias']!r}: biases of the base were trained too; {LATER}")
    # `in` would take 1 for True
    init = config.get("init_lora_weights", True)
    if not any(init is plain or (isinstance(init, str) and init == plain) for plain in PLAIN_INITS):
        found.append(
            f"init_lora_weights is {init!r}: such an adapter was trained on a changed base and only fits that one"
            " (PEFT's path_initial_model_for_weight_conversion saves it as plain LoRA)"
        )
    for name in sorted(config.keys() - UNDERSTOOD - INERT - REFUSED.keys()):
        if config[name]:
            found.append(
                f"{name}: not known to this version of mst-merge, so what it does to the weights is not either"
            )
    return found + _bad_numbers(config)


def _bad_numbers(config: Mapping[str, Any]) -> list[str]:
    found = []
    if not _whole(config.get("r")):
        found.append(f"r is {config.get('r')!r}: the rank must be a positive integer")
    if not _number(config.get("lora_alpha")):
        found.append(f"lora_alpha is {config.get('lora_alpha')!r}: it must be a number")
    for name, check in (("rank_pattern", _whole), ("alpha_pattern", _number)):
        pattern = config.get(name) or {}
        if not isinstance(pattern, dict):
            found.append(f"{name} is not a mapping of module names to numbers")
            continue
        for key, value in pattern.items():
            if not check(value):
                found.append(f"{name}[{key!r}] is {value!r}")
            if not _compiles(key):
                found.append(f"{name}[{key!r}] is not a regular expression")
    return found + _bad_targets(config)


def _bad_targets(config: Mapping[str, Any]) -> list[str]:
    """target_modules and its relatives decide which modules must have tensors: of another form they decide nothing."""
    found = []
    for name in ("target_modules", "exclude_modules", "layers_pattern"):
        value = config.get(name)
        names = [value] if isinstance(value, str) else value or []
        if not isinstance(names, list) or not all(isinstance(item, str) for item in names):
            found.append(f"{name} is {value!r}: it must be a name or a list of names")
        elif (isinstance(value, str) or name == "layers_pattern") and not all(map(_compiles, names)):
            found.append(f"{name} is {value!r}, which is not a regular expression")
    layers = config.get("layers_to_transform")
    indexes = layers if isinstance(layers, list) else [] if layers is None else [layers]
    if not all(type(index) is int for index in indexes):
        found.append(f"layers_to_transform is {layers!r}: it must be a list of layer numbers")
    return found


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _compiles(pattern: str) -> bool:
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True


def pattern_value(pattern: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    """PEFT's ``get_pattern_key``: the first key that is ``module`` or its dotted tail, as a regular expression."""
    for key, value in (pattern or {}).items():
        if re.match(rf"(.*\.)?({key})$", module):
            return value
    return default


def pair_up(header: Mapping[str, TensorRef], config: Mapping[str, Any]) -> tuple[list[Pair], list[str]]:
    """The pairs in the order of their names, and a sentence for every tensor that is not half of one."""
    halves: dict[str, dict[str, TensorRef]] = {}
    wrong = []
    for name, ref in sorted(header.items()):
        match = FACTOR.fullmatch(name)
        if not name.startswith(PREFIX) or match is None:
            wrong.append(f"{name}: {_why_foreign(name)}")
        elif ref.dtype not in FLOATS:
            wrong.append(f"{name}: dtype {ref.dtype}; A and B are {', '.join(FLOATS)}")
        else:
            halves.setdefault(match["module"].removeprefix(PREFIX), {})[match["which"]] = ref
    pairs = []
    for module, half in halves.items():
        if len(half) == 1:
            (present,) = half
            wrong.append(f"{half[present].name}: there is no lora_{'B' if present == 'A' else 'A'} to go with it")
            continue
        rank = pattern_value(config.get("rank_pattern"), module, config["r"])
        alpha = float(pattern_value(config.get("alpha_pattern"), module, config["lora_alpha"]))
        problems = [*_misshapen(half["A"], 0, rank), *_misshapen(half["B"], 1, rank)]
        wrong += problems
        if not problems:
            scale = alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank
            pairs.append(Pair(module, half["A"], half["B"], rank, alpha, scale))
    return pairs, sorted(wrong)


def _misshapen(ref: TensorRef, axis: int, rank: int) -> list[str]:
    if len(ref.shape) != 2:
        return [f"{ref.name}: shape {list(ref.shape)}; A is [rank, in] and B [out, rank]"]
    if ref.shape[axis] != rank:
        return [f"{ref.name}: shape {list(ref.shape)}, but {CONFIG} says rank {rank}"]
    return []


def _why_foreign(name: str) -> str:
    for pattern, reason in FOREIGN:
        if re.search(pattern, name):
            return reason
    if not name.startswith(PREFIX):
        return f"not under {PREFIX}, as PEFT saves them"
    return "neither a lora_A nor a lora_B: a tensor of the base that was trained or resized"


def is_target(config: Mapping[str, Any], module: str) -> bool:
    """Would PEFT adapt this linear module (``check_target_module_exists``)? False where the config leaves it open."""
    targets = config.get("target_modules")
    exclude = config.get("exclude_modules")
    if not targets or targets == "all-linear" or _listed(exclude, module) or not _listed(targets, module):
        return False
    layers = config.get("layers_to_transform")
    if layers is None or layers == [] or isinstance(targets, str):
        return True
    patterns = config.get("layers_pattern") or [r"[^.]*"]
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        match = re.match(rf"(?:^|.*?\.){pattern}\.(?P<index>\d+)\.", module)
        if match:
            return int(match["index"]) in (layers if isinstance(layers, list) else [layers])
    return False


def _listed(names: str | list[str] | None, module: str) -> bool:
    """A string is a regular expression for the whole name, a list holds whole names or dotted tails."""
    if not names:
        return False
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)
