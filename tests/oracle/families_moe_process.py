"""The one process of test_families_moe.py that runs megatron-core, alone in a gloo world of one.

    python families_moe_process.py CASES.json PORT

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


def latent_attention() -> type:
    """mst's core attention, with values of another size than keys (megatron-core's local one takes no k_channels)."""
    from mst_core.engine.megatron.attention import Attention

    class LatentAttention(Attention):
        def forward(self, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
            length, batch, heads, size = query.shape
            wide = torch.nn.functional.pad(value, (0, size - value.shape[-1]))
            out = super().forward(query, key, wide, None).reshape(length, batch, heads, size)
            return out[..., : value.shape[-1]].reshape(length, batch, -1)

    return LatentAttention


def build(settings: dict[str, dict[str, Any]]) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    config = config_of(settings)
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    if "mla" in settings:
        attention = latent_attention()
        for layer in block.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = attention
    model = GPTModel(config=config, transformer_layer_spec=block, **settings["gpt"], parallel_output=False)
    return model.eval()


def run_case(directory: Path) -> dict[str, Any]:
    config = tensors.config(directory)
    family = families.family_for(config)
    hf = load_file(directory / "model.safetensors")
    known = family.model(config, names=hf)
    made = build(family.megatron(config))
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
    return {**found, "difference": (logits - saved["logits"]).abs().max().item()}


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text())
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[2])
    groups.start(1, 1, seed=0)
    found = {name: run_case(Path(directory)) for name, directory in plan["cases"].items()}
    Path(plan["out"], "found.json").write_text(json.dumps(found))
    groups.stop()


if __name__ == "__main__":
    main()
