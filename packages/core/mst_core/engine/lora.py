"""LoRA, shared by the engines: how A starts, what a PEFT directory holds, PEFT around a transformers model.

An adapter is a pair A (r, in) and B (out, r) beside a linear layer; its output is scaled by alpha / r (Hu et al. 2021,
arXiv 2106.09685), with rsLoRA by alpha / sqrt(r) (arXiv 2312.03732). DoRA (arXiv 2402.09353) trains the norm of each
row of the weight too, from where it is. A starts as kaiming-uniform with a = sqrt(5), B as zero, both fp32. The start
of A depends only on the seed and the Hugging Face name, so every engine and every layout begins at the same point.

The E experts of a layer share a pair of tensors as PEFT has them: A (E * r, in), one expert after the other, and B
(out, r * E), the experts of one rank side by side.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mst_core import lora_sites, vocabulary
from mst_core.errors import MissingPackage, MstError
from mst_core.families.rules import Model
from mst_core.lora_sites import Site
from mst_core.runspec import RunSpec

if TYPE_CHECKING:
    from mst_core.checkpoint import Staging

PREFIX = "base_model.model."
HEAD = "score"
"""Of a reward model: trained whole beside the adapter."""
EXPERTS_SINCE = "0.19.0"
"""What adapter_config.json says of PEFT's version where experts are adapted: since then A is of the input's side."""


def lora_init(seed: int, module_name: str, rank: int, in_features: int) -> Tensor:
    """The A (rank, in_features) that a module starts with, fp32 on the CPU.

    module_name   its Hugging Face name, "model.layers.0.self_attn.q_proj"
    """
    digest = hashlib.sha256(f"{seed}:{module_name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    bound = 1 / math.sqrt(in_features)  # kaiming_uniform_(a=sqrt(5))
    return torch.empty(rank, in_features).uniform_(-bound, bound, generator=generator)


def start_of(site: Site, seed: int, rank: int) -> Tensor:
    """A of a site, (r, in), of experts (E * r, in)."""
    names = [site.name] if site.experts is None else [f"{site.name}.{e}" for e in range(site.experts)]
    return torch.cat([lora_init(seed, name, rank, site.columns) for name in names])


def adapter_config(
    rank: int, alpha: float, modules: Iterable[str], *, rslora: bool = False, dora: bool = False
) -> dict[str, Any]:
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
        "use_dora": dora,
        "use_rslora": rslora,
    }


def config_of(
    spec: RunSpec, model: Model, sites: Sequence[Site], rows: Mapping[str, list[int]] | None = None
) -> dict[str, Any]:
    """adapter_config.json of a run. ``rows``: see token_rows."""
    modules, parameters = lora_sites.peft_targets(model, sites)
    more: dict[str, Any] = {"target_parameters": parameters, "peft_version": EXPERTS_SINCE} if parameters else {}
    rank, variants = spec.lora_rank or 1, {"rslora": spec.lora_rslora, "dora": spec.lora_dora}
    if rows:
        more["trainable_token_indices"] = rows
    if model.scores:
        more |= {"modules_to_save": [HEAD], "task_type": "SEQ_CLS"}
    return adapter_config(rank, spec.alpha, modules, **variants) | more


def token_rows(model: Model, numbers: Sequence[int]) -> dict[str, list[int]]:
    """PEFT's trainable_token_indices for new tokens: their rows of the embedding and of a head of its own are trained
    and saved whole, the others stay. PEFT ties those of a tied head by itself."""
    return {name.split(".")[-2]: list(numbers) for name in vocabulary.tables(model)}


def file_name(site: Site, letter: str, sites: Sequence[Site]) -> str:
    """A or B of ``site`` in PEFT's file. Of two parameters of one module gate_up_proj is wrapped first, from within."""
    inner = site.name.endswith("gate_up_proj") and any(other.box == site.box and other != site for other in sites)
    return f"{PREFIX}{site.box}{'.base_layer' if inner else ''}.lora_{letter}.weight"


def peft_name(name: str) -> str:
    """What PEFT calls a parameter of its model in its file."""
    name = name.replace(".modules_to_save.default.", ".")
    if "magnitude" in name:
        return name.replace(".default.weight", "")
    return name.replace(".default.", ".").removesuffix(".default")


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


def wrap(
    model: torch.nn.Module,
    spec: RunSpec,
    known: Model,
    sites: Sequence[Site],
    rows: Mapping[str, list[int]] | None = None,
) -> torch.nn.Module:
    """A transformers model with a PEFT adapter on ``sites``, fp32, started as lora_init says, and ``rows`` trained."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise MissingPackage("LoRA needs peft", hint="pip install 'mst-tools-core[engine]'") from error

    rank = spec.lora_rank or 1
    modules, parameters = lora_sites.peft_targets(known, sites)
    config = LoraConfig(
        r=rank,
        lora_alpha=spec.alpha,
        target_modules=modules,
        target_parameters=parameters or None,
        modules_to_save=[HEAD] if known.scores else None,
        use_rslora=spec.lora_rslora,
        use_dora=spec.lora_dora,
        trainable_token_indices=dict(rows) if rows else None,
    )
    with warnings.catch_warnings():  # of what PEFT calls in transformers, and of bitsandbytes, which is not used here
        warnings.simplefilter("ignore", FutureWarning)
        logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
        wrapped: torch.nn.Module = get_peft_model(model, config)
    adapted: dict[str, Any] = {}
    for name, module in wrapped.named_modules():
        if hasattr(module, "lora_A"):
            parameter = getattr(module, "parameter_name", "")
            key = name.removeprefix(PREFIX).removesuffix(".base_layer") + (f".{parameter}" if parameter else "")
            adapted[key] = module
    if other := adapted.keys() ^ {site.key for site in sites}:
        raise MstError(f"PEFT adapts {len(adapted)} layers, asked were {len(sites)}: {', '.join(sorted(other)[:5])}")
    for site in sites:
        module = adapted[site.key]
        module.lora_A["default"].weight.data = start_of(site, spec.seed, rank)
        module.lora_B["default"].weight.data = torch.zeros(site.rows, rank * (site.experts or 1))
    return wrapped
