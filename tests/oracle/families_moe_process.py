"""The one process of test_families_moe.py that runs megatron-core, alone in a gloo world of one.

    python -m tests.oracle.families_moe_process PLAN.json PORT

For every case: GPTModel of megatron-core's local spec from the family's settings, every parameter and buffer NaN, then
loaded with the packed tensors under the local spec's names, which are written out here (MAPPINGS.md 1.6, 1.7), and its
logits compared with those of transformers. Findings go to ``OUT/found.json``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from mst_core import families, tensors
from mst_core.engine.megatron import groups

LOCAL_NAMES = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
    "self_attention.linear_q_up_proj.layer_norm_weight": "self_attention.q_layernorm.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight": "self_attention.kv_layernorm.weight",
}


def local_state(native: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """A native tensor as the local spec's state_dict has it: one tensor an expert, norms that are modules."""
    name = native.removeprefix("language_model.")
    for fused, own in LOCAL_NAMES.items():
        if name.endswith(fused):
            name = name.removesuffix(fused) + own
    if ".experts.experts." not in name:
        return {name: tensor}
    return {name.replace(".experts.experts.", f".experts.local_experts.{e}."): tensor[e] for e in range(len(tensor))}


def config_of(settings: dict[str, dict[str, Any]]) -> Any:
    from megatron.core.fusions.fused_bias_geglu import quick_gelu
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    fields = dict(settings["transformer"])
    name = fields["activation_func"]
    fields["activation_func"] = quick_gelu if name == "quick_gelu" else getattr(torch.nn.functional, name)
    make = MLATransformerConfig if "mla" in settings else TransformerConfig
    config = make(
        **fields,
        **settings.get("mla", {}),
        use_cpu_initialization=True,
        perform_initialization=False,
        attention_softmax_in_fp32=True,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
    )
    for key, value in settings.get("attributes", {}).items():
        setattr(config, key, value)
    return config


def latent_attention() -> tuple[type, type]:
    """Two parts of MLA that the local spec lacks on a CPU, or megatron-core 0.19.2 at all.

    The first is mst's core attention with values of another size than keys (the local one takes no k_channels); the
    second MLASelfAttention that projects queries as they are where they are not compressed (megatron-core would put a
    norm into linear_q_proj).
    """
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention

    from mst_core.engine.megatron.attention import Attention

    class LatentAttention(Attention):
        def forward(self, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
            length, batch, heads, size = query.shape
            wide = torch.nn.functional.pad(value, (0, size - value.shape[-1]))
            out = super().forward(query, key, wide, None).reshape(length, batch, heads, size)
            return out[..., : value.shape[-1]].reshape(length, batch, -1)

    class WholeQueries(MLASelfAttention):
        def _resolve_qk_norm_config(self, submodules: Any) -> Any:
            return {
                "linear_q_proj": ColumnParallelLinear,
                "linear_q_up_proj": None,
                "linear_kv_up_proj": ColumnParallelLinear,
                "q_layernorm": None,
                "kv_layernorm": submodules.kv_layernorm,
            }

    return LatentAttention, WholeQueries


def build(settings: dict[str, dict[str, Any]], mtp: bool = False) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec

    config = config_of(settings)
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    if "mla" in settings:
        attention, whole_queries = latent_attention()
        for layer in block.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = attention
            if config.q_lora_rank is None:
                layer.submodules.self_attention.module = whole_queries
    more = {"mtp_block_spec": get_gpt_mtp_block_spec(config, block, use_transformer_engine=False)} if mtp else {}
    model = GPTModel(config=config, transformer_layer_spec=block, **settings["gpt"], **more, parallel_output=False)
    return model.eval()


def settings_of(family: families.Family, config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The family's settings; without compressed queries, which it refuses, those of the same model with them."""
    if config.get("kv_lora_rank") and config["q_lora_rank"] is None:
        settings = family.megatron({**config, "q_lora_rank": 24})
        return {**settings, "mla": {**settings["mla"], "q_lora_rank": None}}
    return family.megatron(config)


def run_case(directory: Path) -> dict[str, Any]:
    config = tensors.config(directory)
    family = families.family_for(config)
    hf = load_file(directory / "model.safetensors")
    known = family.model(config, names=hf)
    made = build(settings_of(family, config))
    state: dict[str, torch.Tensor] = {}
    for task in families.tasks(known):
        state.update(local_state(task.native, families.pack(task, [hf[spec.name] for spec in task.hf])))
    wanted = {name: tuple(t.shape) for name, t in made.state_dict().items() if "_extra_state" not in name}
    with torch.no_grad():
        for name, tensor in made.state_dict().items():
            if "_extra_state" not in name:
                tensor.fill_(float("nan"))
    found: dict[str, Any] = {
        "missing": sorted(wanted.keys() - state.keys()),
        "unexpected": sorted(state.keys() - wanted),
        "shapes": sorted(name for name in wanted.keys() & state if wanted[name] != tuple(state[name].shape)),
        "tensors": len(wanted),
    }
    if found["missing"] or found["unexpected"] or found["shapes"]:
        return found
    made.load_state_dict(state, strict=False)
    saved = load_file(directory / "logits.safetensors")
    tokens = saved["tokens"]
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    if made.position_embedding_type == "mrope":
        positions = positions.expand(3, *positions.shape)
    mask = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)[None, None]
    with torch.no_grad():
        logits = made(tokens, positions, mask)
    spread = saved["logits"].std().item()
    return {**found, "difference": (logits - saved["logits"]).abs().max().item(), "spread": spread}


def mtp_tensors(directory: Path) -> dict[str, Any]:
    """Names and shapes of the multi-token-prediction layers: by the family's rows, and in megatron-core."""
    config = tensors.config(directory)
    family = families.family_for(config)
    settings = family.megatron(config)
    made = build({**settings, "transformer": {**settings["transformer"], "mtp_num_layers": 2}}, mtp=True)
    built = {name: list(t.shape) for name, t in made.state_dict().items() if "_extra_state" not in name}
    rows: dict[str, list[int]] = {}
    for task in families.tasks(family.model({**config, "num_nextn_predict_layers": 2})):
        name = task.native.replace(".transformer_layer.", ".mtp_model_layer.")  # as torch_dist and as the state dict
        rows |= {name: list(t.shape) for name, t in local_state(name, torch.empty(task.shape)).items()}
    return {"built": built, "rows": rows}


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text())
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[2])
    groups.start(1, 1, seed=0)
    found = {name: run_case(Path(directory)) for name, directory in plan["cases"].items()}
    found |= {f"{name}, mtp": mtp_tensors(Path(directory)) for name, directory in plan["mtp"].items()}
    Path(plan["out"], "found.json").write_text(json.dumps(found))
    groups.stop()


if __name__ == "__main__":
    main()
