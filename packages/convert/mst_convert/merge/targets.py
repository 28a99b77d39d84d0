"""Which modules and parameters a LoRA config means, as peft 0.21 reads it (``tuners_utils``, ``utils/other.py``)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any


def pattern_value(pattern: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    """PEFT's ``get_pattern_key``: the first key that is ``module`` or its dotted tail, as a regular expression."""
    for key, value in (pattern or {}).items():
        if re.match(rf"(.*\.)?({key})$", module):
            return value
    return default


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


def is_saved(config: Mapping[str, Any], name: str) -> bool:
    """Is the tensor ``name`` of a module in ``modules_to_save``? PEFT matches ends of names, not whole parts.

    With ``ensure_weight_tying`` it saves a tied head beside an embedding that it was told to save.
    """
    saved = tuple(config.get("modules_to_save") or ())
    if config.get("ensure_weight_tying") and any(end.endswith("embed_tokens") for end in saved):
        saved += ("lm_head",)
    parts = name.split(".")
    return bool(saved) and any(".".join(parts[:count]).endswith(saved) for count in range(1, len(parts)))


def is_parameter(config: Mapping[str, Any], name: str) -> bool:
    """Is the parameter ``name`` in ``target_parameters``?"""
    return any(name == target or name.endswith(f".{target}") for target in config.get("target_parameters") or ())


def token_indices(config: Mapping[str, Any], module: str) -> list[int] | None:
    """The rows of ``module`` that ``trainable_token_indices`` names; a bare list means the input embedding."""
    indices = config.get("trainable_token_indices")
    if isinstance(indices, list):
        return indices if module.endswith("embed_tokens") else None
    for name, rows in (indices or {}).items():
        if module == name or module.endswith(f".{name}"):
            return list(rows)
    return None
