"""GPTModel of megatron-core from a family's settings: which spec, which dtype, which of our modules.

| part | with TransformerEngine on CUDA | else |
|---|---|---|
| linear layers, norms | TransformerEngine's | megatron-core's local linear layers, attention.RMSNorm |
| core attention | TransformerEngine's (flash or fused) | attention.Attention over SDPA |

LoRA always takes the right column: its adapters need the normed input, which TransformerEngine's fused layers hide.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from mst_core.engine.megatron import attention, cpu
from mst_core.runspec import RunSpec


def transformer_config(groups: dict[str, dict[str, Any]], spec: RunSpec) -> Any:
    """megatron-core's TransformerConfig of a family's "transformer" group under the run's layout and precision."""
    from megatron.core.transformer import TransformerConfig

    fields = dict(groups["transformer"])
    fields["activation_func"] = getattr(torch.nn.functional, fields["activation_func"])
    fields["attention_dropout"] = fields["hidden_dropout"] = 0.0  # as in the plain engine, whatever config.json says
    half = spec.precision == "bf16"
    fused = with_te(spec)
    return TransformerConfig(
        **fields,
        tensor_model_parallel_size=spec.tp,
        pipeline_model_parallel_size=spec.pp,
        sequence_parallel=spec.sp,
        bf16=half,
        params_dtype=torch.bfloat16 if half else torch.float32,
        pipeline_dtype=torch.bfloat16 if half else torch.float32,
        moe_token_dispatcher_type="alltoall",  # no experts here, but Megatron checks it against the next line
        variable_seq_lengths=True,  # micro-batches of one step have their own lengths
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


def build(groups: dict[str, dict[str, Any]], spec: RunSpec, vocab_rows: int) -> Any:
    """This rank's part of the model, weights not yet loaded.

    vocab_rows   rows of the embedding over all ranks, padding included
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel

    config = transformer_config(groups, spec)
    gpt = {**groups["gpt"], "vocab_size": vocab_rows}
    model = GPTModel(
        config=config,
        transformer_layer_spec=block_spec(config, with_te(spec)),
        **gpt,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=True,
    )
    if groups["rope"]:
        rotary = model.rotary_pos_emb
        rotary.inv_freq = rotary._apply_scaling(rotary.inv_freq, **groups["rope"])
    return model


def in_precision(model: Any, spec: RunSpec) -> Any:
    """The model with its weights, inputs and stage boundaries in the run's precision."""
    from megatron.core.transformer.module import Float16Module

    return Float16Module(model.config, model) if spec.precision == "bf16" else model


def with_te(spec: RunSpec) -> bool:
    """Whether TransformerEngine's modules are used: CUDA is there and the package is installed."""
    if spec.lora_rank is not None or not torch.cuda.is_available():
        return False
    return importlib.util.find_spec("transformer_engine") is not None


def block_spec(config: Any, te: bool) -> Any:
    """The layers of this pipeline stage and the final norm."""
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

    if te:
        return gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
    layer = gpt_layer_specs.get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = attention.RMSNorm
    inner = parts.self_attention.submodules
    inner.core_attention = attention.Attention
    if config.qk_layernorm:
        inner.q_layernorm = inner.k_layernorm = attention.RMSNorm
    layers = [layer] * get_num_layers_to_build(config)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=attention.RMSNorm)
