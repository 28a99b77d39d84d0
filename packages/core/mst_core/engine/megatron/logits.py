"""Logits of a Megatron checkpoint, by megatron-core's own GPTModel, layer spec and loaders, in fp32 on the CPU.

For comparison with another form of the same model (``mst-convert --verify logits``), so nothing here knows which
Hugging Face rows a tensor is made of: megatron-core asks for its tensors by its own names, shapes and shards. Nothing
in a foreign pickle runs either: see view.py, and a rank's file is read by mst_core.legacy.

Shapes: B sequences, T tokens, V vocabulary.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

from mst_core import families, legacy, megatron_names, tensors, torch_dist
from mst_core.engine.megatron import groups, step, view
from mst_core.engine.seam import Batch
from mst_core.errors import InputError
from mst_core.families import Model

Groups = dict[str, dict[str, Any]]
GROUPED = re.compile(r"\.experts\.(linear_fc[12]\.(?:weight|bias))(\d+)$")
HYBRID = re.compile(r"decoder\.layers\.(\d+)\.")


class Checkpoint(NamedTuple):
    """A Megatron checkpoint and its layout.

    hf           the directory of its config.json
    vocab_rows   rows of the embedding, padding included
    legacy       ``mp_rank_*`` files of tp, pp and ep; else torch_dist
    rounded      "BF16" or another: the weights are rounded to it first, as a conversion with ``--dtype`` does
    """

    directory: Path
    hf: Path
    vocab_rows: int
    legacy: bool = False
    tp: int = 1
    pp: int = 1
    ep: int = 1
    rounded: str | None = None


def write(asked: tuple[Any, ...], tokens: list[list[int]], out: Path) -> None:
    """logits_BTV (fp32, the real vocabulary) of ``tokens`` to the safetensors file ``out``, on tp * pp * ep ranks.

    ``asked`` are the fields of a Checkpoint. The folder of ``out`` is this function's own. InputError where
    megatron-core cannot build the model or load every one of its tensors.
    """
    source = Checkpoint(*asked)
    logging.getLogger("megatron").setLevel(logging.ERROR)
    groups.start(source.tp, source.pp, seed=0, ep=source.ep)
    from megatron.core import parallel_state

    config = tensors.config(source.hf)
    family = families.family_for(config, source.hf)
    known = family.model(config, source.hf)
    model = build(family.megatron(config, source.hf), source)
    if source.legacy:
        _load_rank(model, source.directory)
    else:
        _load_torch_dist(model, source.directory, known)
    if source.rounded:
        tensors.round_to(model, source.rounded)
    tokens_BT = torch.tensor(tokens)
    batch = Batch(tokens_BT, torch.zeros(tokens_BT.shape), torch.full((len(tokens),), tokens_BT.shape[1]))
    logits_BTV = step.logits(model, batch, known.dims.vocab)
    first = parallel_state.get_tensor_model_parallel_rank() == parallel_state.get_data_parallel_rank() == 0
    if logits_BTV is not None and first:
        save_file({"logits": logits_BTV.contiguous()}, out)
    groups.stop()


# --- the model ---------------------------------------------------------------------------------------------------


def build(settings: Groups, source: Checkpoint) -> Any:
    """This rank's GPTModel of megatron-core's local spec, every tensor NaN: what is not loaded shows."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    config = _config(settings, source)
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    if "mla" in settings:
        from mst_core.engine.megatron import attention

        for layer in block.layer_specs:  # the local one takes no values of another size than keys
            layer.submodules.self_attention.submodules.core_attention = attention.Attention
    model = GPTModel(
        config=config,
        transformer_layer_spec=block,
        **{**settings["gpt"], "vocab_size": source.vocab_rows},
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=False,
    )
    if settings["rope"]:
        rotary = model.rotary_pos_emb
        rotary.inv_freq = rotary._apply_scaling(rotary.inv_freq, **settings["rope"])
    with torch.no_grad():
        for tensor in _weights(model).values():
            tensor.fill_(float("nan"))
    return model.eval()


def _config(settings: Groups, source: Checkpoint) -> Any:
    from megatron.core.fusions.fused_bias_geglu import quick_gelu
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    fields = dict(settings["transformer"])
    name = fields["activation_func"]
    fields["activation_func"] = quick_gelu if name == "quick_gelu" else getattr(torch.nn.functional, name)
    make = MLATransformerConfig if "mla" in settings else TransformerConfig
    config = make(
        **fields,
        **settings.get("mla", {}),
        tensor_model_parallel_size=source.tp,
        pipeline_model_parallel_size=source.pp,
        expert_model_parallel_size=source.ep,
        expert_tensor_parallel_size=source.tp,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        perform_initialization=False,
        attention_softmax_in_fp32=True,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
    )
    for key, value in settings.get("attributes", {}).items():
        setattr(config, key, value)
    return config


def _weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in model.state_dict().items() if "_extra_state" not in name}


def _put(model: Any, state: dict[str, Any], where: Path) -> None:
    """All of ``state`` into the model, which must be all of the model."""
    try:
        missing, unexpected = model.load_state_dict(state, strict=False)
    except RuntimeError as error:
        raise InputError(f"megatron-core cannot load it: {error}", where=where) from error
    wrong = [name for name in (*missing, *unexpected) if "_extra_state" not in name]
    if wrong:
        raise InputError(f"megatron-core's model and the checkpoint differ in {', '.join(wrong[:10])}", where=where)


# --- torch_dist --------------------------------------------------------------------------------------------------


def _load_torch_dist(model: Any, directory: Path, known: Model) -> None:
    stored = torch_dist.metadata(directory)
    naming = megatron_names.detect(known, families.tasks(known), stored)
    apart = {"non_homogeneous_layers": True} if naming.form == "per-layer" else None
    state = {"model": model.sharded_state_dict(metadata=apart)}
    _put(model, view.load(state, stored, directory, _local_name(naming, known))["model"], directory)


def _local_name(naming: megatron_names.Naming, known: Model) -> Callable[[str], str]:
    """What GPTModel of the local spec calls a stored key. Only names: a TransformerEngine norm has another one, and a
    HybridModel's layers are counted otherwise (megatron-core's own gpt_checkpoint_interop says how)."""
    from megatron.core.dist_checkpointing.gpt_checkpoint_interop import gpt_compatible_layer_maps

    layer_of: dict[int, int] = {}
    if naming.spec == "hybrid":
        kind = "*E" if "experts" in known.dims.more else "*-"
        maps = gpt_compatible_layer_maps(kind * known.dims.layers)
        layer_of = {**maps.attention_to_gpt, **maps.mlp_to_gpt}

    def local_name(key: str) -> str:
        name = key.removeprefix(naming.prefix)
        if naming.spec == "hybrid":
            name = HYBRID.sub(lambda match: f"decoder.layers.{layer_of[int(match[1])]}.", name)
            name = name.replace("decoder.final_norm.", "decoder.final_layernorm.")
        return megatron_names.local_key(name, naming.mla)

    return local_name


# --- legacy ------------------------------------------------------------------------------------------------------


def _load_rank(model: Any, directory: Path) -> None:
    """The file of this rank, under the names it has there or, of TransformerEngine's spec, the local spec's."""
    from megatron.core import parallel_state

    place = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_expert_model_parallel_rank(),
    )
    rank = next(rank for rank in legacy.read(directory) if (rank.tp, rank.pp, rank.ep) == place)
    mine = _weights(model)
    state: dict[str, torch.Tensor] = {}
    for name, stored in rank.stages[0].items():
        local = GROUPED.sub(r".experts.local_experts.\2.\1", megatron_names.state_name(name, "local"))
        state[name if name in mine else local] = _read(stored)
    _put(model, state, rank.file)


def _read(stored: legacy.RankTensor) -> torch.Tensor:
    out = torch.empty(stored.shape, dtype=tensors.torch_dtype(stored.dtype))
    with stored.file.open("rb", buffering=0) as file:
        file.seek(stored.offset)
        tensors.read_into(file, tensors.raw(out), stored.file)
    return out
