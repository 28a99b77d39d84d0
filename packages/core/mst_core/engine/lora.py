"""LoRA, shared by the engines: which modules, how A starts, what a PEFT directory holds.

An adapter is a pair A (r, in) and B (out, r) beside a linear layer; its output is scaled by alpha / r (Hu et al. 2021,
arXiv 2106.09685). A starts as kaiming-uniform with a = sqrt(5), B as zero, both fp32. The start of A depends only on
the seed and the module's Hugging Face name, so every engine and every parallel layout begins at the same point.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mst_core.errors import MissingPackage, SettingsError
from mst_core.runspec import LINEAR

if TYPE_CHECKING:
    from mst_core.checkpoint import Staging


def targets(asked: Sequence[str]) -> list[str]:
    """The module names behind --lora-targets, in the order of LINEAR. Raises SettingsError if there is none.

    RunSpec refuses unknown names before any model is read; a name that no linear layer has would train nothing.
    """
    found = [name for name in LINEAR if name in asked or list(asked) == ["all-linear"]]
    if not found or len(found) < len(set(asked) - {"all-linear"}):
        raise SettingsError(f"--lora-targets: {', '.join(asked)} are not all of {', '.join(LINEAR)}")
    return found


def lora_init(seed: int, module_name: str, rank: int, in_features: int) -> Tensor:
    """The A (rank, in_features) that a module starts with, fp32 on the CPU.

    module_name   its Hugging Face name, "model.layers.0.self_attn.q_proj"
    """
    digest = hashlib.sha256(f"{seed}:{module_name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    bound = 1 / math.sqrt(in_features)  # kaiming_uniform_(a=sqrt(5))
    return torch.empty(rank, in_features).uniform_(-bound, bound, generator=generator)


def adapter_config(rank: int, alpha: float, modules: Iterable[str]) -> dict[str, Any]:
    """adapter_config.json as PEFT reads it. No base path: the manifest names the base by its id."""
    return {
        "base_model_name_or_path": None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": int(alpha) if float(alpha).is_integer() else alpha,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": rank,
        "target_modules": list(modules),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }


def save_adapter(staging: Staging, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    """adapter_model.safetensors (fp32) and adapter_config.json.

    ``tensors`` by PEFT's names, "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight".
    """
    from mst_core.tensors import SafetensorsWriter

    names = sorted(tensors)
    wanted = [(name, "F32", tuple(tensors[name].shape)) for name in names]
    writer = SafetensorsWriter(staging, "adapter_model.safetensors", wanted)
    for name in names:
        writer.put(name, tensors[name].detach().float().cpu().contiguous())
    writer.close()
    staging.write("adapter_config.json", json.dumps(config, indent=2, sort_keys=True) + "\n")


def wrap(model: torch.nn.Module, seed: int, rank: int, alpha: float, modules: Sequence[str]) -> torch.nn.Module:
    """A transformers model with a PEFT adapter on ``modules``, fp32, started as lora_init says."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise MissingPackage("LoRA needs peft", hint="pip install 'mst-tools-core[engine]'") from error

    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(modules), task_type="CAUSAL_LM")
    wrapped: torch.nn.Module = get_peft_model(model, config)
    for name, module in wrapped.named_modules():
        if hasattr(module, "lora_A"):
            start = lora_init(seed, name.removeprefix("base_model.model."), rank, module.in_features)
            with torch.no_grad():
                module.lora_A["default"].weight.data = start
                module.lora_B["default"].weight.data = torch.zeros(module.out_features, rank)
    return wrapped
