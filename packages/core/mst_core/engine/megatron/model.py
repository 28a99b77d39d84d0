"""GPTModel of megatron-core from a family's settings: which spec, which dtype, which of our modules.

| part | with TransformerEngine on CUDA | else |
|---|---|---|
| linear layers, norms | TransformerEngine's | megatron-core's local linear layers, attention.RMSNorm |
| experts | TransformerEngine's grouped GEMM | one MLP an expert (SequentialMLP) |
| core attention | TransformerEngine's (flash or fused) | attention.Attention over SDPA |

LoRA always takes the right column: its adapters need the normed input, which TransformerEngine's fused layers hide.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any

import torch

from mst_core.engine.megatron import attention, cpu
from mst_core.engine.scalar import ScalarHead
from mst_core.runspec import RunSpec

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def dtype_of(spec: RunSpec) -> torch.dtype:
    """What weights and activations are in; fp32 where nothing is said."""
    return DTYPES[spec.precision or "fp32"]


def transformer_config(groups: dict[str, dict[str, Any]], spec: RunSpec) -> Any:
    """megatron-core's TransformerConfig of a family's "transformer" group under the run's layout and precision."""
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    fields = {**groups["transformer"], **groups.get("mla", {})}
    fields["activation_func"] = getattr(torch.nn.functional, fields["activation_func"])
    fields["attention_dropout"] = fields["hidden_dropout"] = 0.0  # as in the plain engine, whatever config.json says
    if fields.get("num_moe_experts"):
        fields |= _expert_fields(spec)
    dtype, fused = dtype_of(spec), with_te(spec)
    make = MLATransformerConfig if "mla" in groups else TransformerConfig
    return make(
        **fields,
        **_layout_fields(spec),
        **_recompute_fields(spec),
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        moe_token_dispatcher_type=spec.moe_token_dispatcher_type,
        variable_seq_lengths=not same_shapes(spec),
        calculate_per_token_loss=True,  # the loss comes to Megatron already divided; it must not divide again
        use_cpu_initialization=cpu.is_applied(),
        perform_initialization=False,  # the checkpoint gives every weight
        bias_activation_fusion=fused,
        bias_dropout_fusion=fused,
        masked_softmax_fusion=fused,
        apply_rope_fusion=fused,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        attention_softmax_in_fp32=True,
    )


def same_shapes(spec: RunSpec) -> bool:
    """Whether all micro-batches of a step must have one shape, on all ranks.

    The allgather dispatcher gathers the tokens of ranks that have other rows, and the interleaved schedule posts its
    receives before a shape could come.
    """
    return spec.vp > 1 or spec.moe_token_dispatcher_type == "allgather"


def _layout_fields(spec: RunSpec) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": spec.tp,
        "pipeline_model_parallel_size": spec.pp,
        "virtual_pipeline_model_parallel_size": spec.vp if spec.vp > 1 else None,
        "num_layers_in_first_pipeline_stage": spec.decoder_first_pipeline_num_layers,
        "num_layers_in_last_pipeline_stage": spec.decoder_last_pipeline_num_layers,
        "context_parallel_size": spec.cp,
        "expert_model_parallel_size": spec.ep,
        "expert_tensor_parallel_size": spec.expert_tp,
        "sequence_parallel": spec.sp,
        # Batched sends of the interleaved schedule give wrong losses on gloo (MEGATRON.md).
        "overlap_p2p_comm": spec.vp > 1,
        "batch_p2p_comm": spec.vp == 1,
    }


def _expert_fields(spec: RunSpec) -> dict[str, Any]:
    return {
        "moe_router_load_balancing_type": "aux_loss" if spec.moe_aux_loss_coeff else "none",
        "moe_aux_loss_coeff": spec.moe_aux_loss_coeff,
        "moe_router_bias_update_rate": 0.0,  # no engine moves the bias that only chooses experts
        "moe_grouped_gemm": with_te(spec),
    }


def _recompute_fields(spec: RunSpec) -> dict[str, Any]:
    if spec.recompute == "full":
        method = {"recompute_method": spec.recompute_method, "recompute_num_layers": spec.recompute_num_layers}
        return {"recompute_granularity": "full", **method}
    if spec.recompute == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": list(spec.recompute_modules)}
    return {}


def build(groups: dict[str, dict[str, Any]], spec: RunSpec, vocab_rows: int, *, scores: bool = False) -> list[Any]:
    """This rank's parts of the model (one, or one for each virtual stage), weights not yet loaded.

    vocab_rows   rows of the embedding over all ranks, padding included
    scores       a reward model: the last stage ends in a scalar head
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel

    config = transformer_config(groups, spec)
    chunks = []
    for stage in range(spec.vp) if spec.vp > 1 else [None]:
        at = {"ignore_virtual": False, "vp_stage": stage}
        model = GPTModel(
            config=config,
            transformer_layer_spec=block_spec(config, with_te(spec), stage),
            **{**groups["gpt"], "vocab_size": vocab_rows},
            pre_process=parallel_state.is_pipeline_first_stage(**at),
            post_process=parallel_state.is_pipeline_last_stage(**at),
            parallel_output=True,
            vp_stage=stage,
        )
        if scores and model.post_process:
            model.output_layer = ScalarHead(torch.empty(1, config.hidden_size, dtype=config.params_dtype))
            model.output_layer.sequence_parallel = spec.sp
        if groups["rope"]:
            rotary = model.rotary_pos_emb
            rotary.inv_freq = rotary._apply_scaling(rotary.inv_freq, **groups["rope"])
        if not with_te(spec):
            _te_keys(model)
        if spec.recompute == "full" and spec.lora_rank is not None and model.pre_process:
            # Recomputed layers have a gradient only if their input has, and a frozen embedding's output has none.
            model.embedding.register_forward_hook(lambda module, args, output: output.requires_grad_())
        chunks.append(model)
    return chunks


def in_precision(model: Any, spec: RunSpec) -> Any:
    """The model with its weights, inputs and stage boundaries in the run's precision."""
    from megatron.core.transformer.module import Float16Module

    return model if dtype_of(spec) is torch.float32 else Float16Module(model.config, model)


def with_te(spec: RunSpec) -> bool:
    """Whether TransformerEngine's modules are used: CUDA is there and the package is installed."""
    if spec.lora_rank is not None or not torch.cuda.is_available():
        return False
    return importlib.util.find_spec("transformer_engine") is not None


def block_spec(config: Any, te: bool, stage: int | None) -> Any:
    """The layers of this (virtual) pipeline stage and the final norm."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from mst_core.engine.megatron.router import BalancedRouter

    block = get_gpt_decoder_block_spec(config, use_transformer_engine=te, normalization="RMSNorm", vp_stage=stage)
    if config.num_moe_experts and config.moe_router_load_balancing_type == "aux_loss":
        for layer in block.layer_specs:
            if layer.submodules.mlp.func is MoELayer:
                layer.submodules.mlp.keywords["submodules"].router = BalancedRouter
    if te:
        return block
    for layer in block.layer_specs:
        parts = layer.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = attention.RMSNorm
        inner = parts.self_attention.submodules
        inner.core_attention = attention.Attention
        if config.multi_latent_attention:
            inner.q_layernorm = inner.kv_layernorm = attention.RMSNorm
        elif config.qk_layernorm:
            inner.q_layernorm = inner.k_layernorm = attention.RMSNorm
    block.layer_norm = attention.RMSNorm
    return block


def _te_keys(model: Any) -> None:
    """Give layers of the local spec the checkpoint keys of TransformerEngine's (MAPPINGS.md 1.6)."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    if model.config.multi_latent_attention:
        pairs = (("q_layernorm", "linear_q_up_proj"), ("kv_layernorm", "linear_kv_up_proj"))
        found = {f"self_attention.{ours}.": f"self_attention.{theirs}.layer_norm_" for ours, theirs in pairs}
    else:
        found = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
    for layer in model.decoder.layers:
        dense = {} if isinstance(layer.mlp, MoELayer) else {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
        layer.submodules_config = replace(layer.submodules_config, sharded_state_dict_keys_map={**found, **dense})
