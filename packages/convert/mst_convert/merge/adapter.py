"""Reading a PEFT LoRA adapter: ``adapter_config.json`` and the header of ``adapter_model.safetensors``. No torch.

Nothing is guessed: a field of the config that could change the merged weights is either understood or refused by name,
and a field nobody here has heard of must be empty. Fields are those of peft 0.21 (``LoraConfig``).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mst_convert.merge.parts import Parts, sort_out
from mst_core import tensors, torch_dist
from mst_core.errors import InputError, many

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"

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
        "use_dora",
        "lora_bias",
        "modules_to_save",
        "target_parameters",
        "trainable_token_indices",
        "ensure_weight_tying",
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
    ]
)
LATER = "mst-merge does not do this yet"
REFUSED: dict[str, str] = {
    "layer_replication": "the adapted model repeats layers of the base; merged layers would not be the base's layers",
    "alora_invocation_tokens": "aLoRA is active only after its invocation tokens; a merged weight is always active",
    "use_qalora": "QALoRA pools the input of A, which a merged weight cannot do",
    "use_bdlora": f"BD-LoRA stores block-diagonal factors; {LATER}",
    "arrow_config": "Arrow routes between adapters by the input; a merged weight cannot",
    "kasa_config": f"KaSA truncates the base's weights before it adapts them; {LATER}",
    "monteclora_config": f"MonteCLoRA samples its factors; {LATER}",
    "megatron_config": f"the adapter was trained on Megatron's own layers; {LATER}",
}
# init_lora_weights under which the base that was trained on is the base as published. Others (pissa, olora, corda,
# lora_ga, loftq) train on a changed base: their A and B belong to that one, unless PEFT converted them on saving.
PLAIN_INITS = (True, False, None, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True)
class Adapter:
    directory: Path
    config: Mapping[str, Any]
    parts: Parts


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
    parts, wrong = sort_out(tensors.file_headers(weights), config)
    if wrong:
        raise many(
            [InputError(reason) for reason in wrong],
            what=f"{weights} has {len(wrong)} tensor{'s' if len(wrong) > 1 else ''} that cannot be merged:",
            hint="every tensor must be a part of one module, as PEFT saves them",
        )
    if not parts.refs:
        raise InputError("the adapter has no tensors", where=weights)
    return Adapter(directory, config, parts)


def read_config(directory: Path) -> dict[str, Any]:
    path = directory / CONFIG
    if not directory.is_dir():
        raise InputError("no such directory", where=directory, hint="give a PEFT adapter directory")
    if not path.is_file():
        model = (directory / "config.json").is_file()
        hint = "--adapter is the directory with adapter_config.json, --model the base"
        if torch_dist.is_megatron(directory):
            hint = f"of a bridge? mst-convert adapter --model {directory} --to peft --base BASE --out DIR"
        what = f"no {CONFIG}: not a PEFT adapter" + (", but a whole model" if model else "")
        raise InputError(what, where=directory, hint=hint)
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
    if config.get("bias", "none") not in ("none", "all", "lora_only"):
        found.append(f"bias is {config['bias']!r}: it must be none, all or lora_only")
    if config.get("use_dora") and config.get("lora_bias"):
        found.append("use_dora and lora_bias: PEFT knows no DoRA with a bias of B")
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
    for name in ("target_modules", "exclude_modules", "layers_pattern", "modules_to_save", "target_parameters"):
        value = config.get(name)
        names = [value] if isinstance(value, str) else value or []
        if not isinstance(names, list) or not all(isinstance(item, str) for item in names):
            found.append(f"{name} is {value!r}: it must be a name or a list of names")
        elif isinstance(value, str) and name in ("modules_to_save", "target_parameters"):
            found.append(f"{name} is {value!r}: it must be a list of names")
        elif (isinstance(value, str) or name == "layers_pattern") and not all(map(_compiles, names)):
            found.append(f"{name} is {value!r}, which is not a regular expression")
    layers = config.get("layers_to_transform")
    indexes = layers if isinstance(layers, list) else [] if layers is None else [layers]
    if not all(type(index) is int for index in indexes):
        found.append(f"layers_to_transform is {layers!r}: it must be a list of layer numbers")
    tokens = config.get("trainable_token_indices")
    for rows in tokens.values() if isinstance(tokens, dict) else [tokens or []]:
        if not isinstance(rows, list) or not all(type(row) is int and row >= 0 for row in rows):
            found.append(f"trainable_token_indices has {rows!r}: it must be a list of token numbers")
        elif len(set(rows)) < len(rows):
            found.append("trainable_token_indices names a token twice, so its row is not one value")
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
