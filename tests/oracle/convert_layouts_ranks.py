"""One rank of test_convert_layouts.py, under torchrun: real megatron-core, nothing of mst.

    python -m torch.distributed.run --nproc-per-node 4 -m tests.oracle.convert_layouts_ranks PLAN.json

For every layout and case the GPTModel (local spec) of this rank is built and filled with NaN, loaded with what
mst-convert wrote (torch_dist at default strictness, legacy with ``load_state_dict(strict=True)``), and every parameter
and buffer compared bit for bit with the slice that the Hugging Face tensors say (slices.py). Then the same models are
saved, by ``dist_checkpointing.save`` and as ``mp_rank_*`` files, for the way back.
HybridModel and the code that retargets it to GPT checkpoints are run too, on modules of the local spec.
The findings of each rank go to ``OUT/rank-N.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.oracle.slices import Slices, Tensors


class NoAttention(torch.nn.Module):
    """Instead of the local core attention, which takes no k_channels and so cannot be built for MLA; no weights."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()


SPLITS: dict[str, dict[str, Any]] = {
    "legacy-uneven": {"num_layers_in_first_pipeline_stage": 1},
    "legacy-layout": {"pipeline_model_parallel_layout": "Et|tt|m|L", "account_for_loss_in_pipeline_split": False},
}
"""Splits that are saved for the way back only."""


def config_of(settings: dict[str, Any], layout: dict[str, int], **more: Any) -> Any:
    from megatron.core.fusions.fused_bias_geglu import quick_gelu
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    fields = dict(settings["transformer"])
    name = fields["activation_func"]
    fields["activation_func"] = quick_gelu if name == "quick_gelu" else getattr(torch.nn.functional, name)
    make = MLATransformerConfig if "mla" in settings else TransformerConfig
    if layout["vp"] > 1:
        more["virtual_pipeline_model_parallel_size"] = layout["vp"]
    config = make(
        **{**fields, **settings.get("mla", {}), **more},
        use_cpu_initialization=True,
        perform_initialization=False,
        pipeline_dtype=torch.float32,
        tensor_model_parallel_size=layout["tp"],
        pipeline_model_parallel_size=layout["pp"],
        expert_model_parallel_size=layout["ep"],
        expert_tensor_parallel_size=layout["etp"],
        attention_softmax_in_fp32=True,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
    )
    for key, value in settings.get("attributes", {}).items():
        setattr(config, key, value)
    return config


def build(case: dict[str, Any], layout: dict[str, int], **more: Any) -> list[Any]:
    """The GPTModels of this rank, one a virtual stage."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_decoder_layer_specs,
        get_gpt_mtp_block_spec,
    )

    config = config_of(case["settings"], layout, **{**layout["fields"], **more})
    models = []
    for stage in range(layout["vp"]):
        at = {"vp_stage": stage if layout["vp"] > 1 else None}
        block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm", **at)
        # The last stage may have no decoder layer to take the MTP layer's spec from.
        body = get_gpt_decoder_layer_specs(config, use_transformer_engine=False, normalization="RMSNorm")[-1]
        if "mla" in case["settings"]:
            for layer in (*block.layer_specs, body):
                layer.submodules.self_attention.submodules.core_attention = NoAttention
        mtp = get_gpt_mtp_block_spec(config, body, use_transformer_engine=False, **at)
        where = {"ignore_virtual": False, **at} if layout["vp"] > 1 else {}
        models.append(
            GPTModel(
                config=config,
                transformer_layer_spec=block,
                mtp_block_spec=mtp,
                **{**case["settings"]["gpt"], "vocab_size": case["vocab_rows"]},
                pre_process=parallel_state.is_pipeline_first_stage(**where),
                post_process=parallel_state.is_pipeline_last_stage(**where),
                parallel_output=True,
                **at,
            )
        )
    return models


def weights(model: Any) -> Tensors:
    return {name: tensor for name, tensor in model.state_dict().items() if not name.endswith("_extra_state")}


def wanted(model: Any, slices: Slices, gpt_layer: Callable[[int], int] = lambda number: number - 1) -> Tensors:
    """What each tensor must be; megatron-core's own layer_number says which layer it is of."""
    found = {}
    for name in weights(model):
        layer = -1
        if name.startswith("decoder.layers."):
            layer = gpt_layer(model.decoder.layers[int(name.split(".")[2])].layer_number)
        elif name.startswith("mtp."):  # Hugging Face numbers these on
            layer = model.config.num_layers + model.mtp.layers[int(name.split(".")[2])].layer_number - 1
        found[name] = slices(name, layer)
    return found


def fill(model: Any, values: Tensors | None = None) -> None:
    with torch.no_grad():
        for name, tensor in weights(model).items():
            tensor.copy_(values[name]) if values is not None else tensor.fill_(float("nan"))


def wrong(model: Any, want: Tensors) -> list[str]:
    return [name for name, tensor in weights(model).items() if not torch.equal(tensor, want[name])]


def load_dist(models: list[Any], directory: str, metadata: dict[str, Any] | None, retarget: Any = None) -> None:
    """``dist_checkpointing.load`` with nothing of its strictness changed; virtual stages together, as in training."""
    from megatron.core import dist_checkpointing

    asked = {f"model{number}": model.sharded_state_dict(metadata=metadata) for number, model in enumerate(models)}
    if retarget is not None:
        retarget(asked)
    loaded = dist_checkpointing.load(asked, directory + "/release")
    for number, model in enumerate(models):
        model.load_state_dict(loaded[f"model{number}"])


def rank_file(directory: str, layout: dict[str, int]) -> Path:
    """As ``get_checkpoint_name`` of megatron.training says."""
    from megatron.core import parallel_state

    name = f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}"
    if layout["pp"] > 1:
        name += f"_{parallel_state.get_pipeline_model_parallel_rank():03d}"
    if layout["ep"] > 1:
        name += f"_{parallel_state.get_expert_model_parallel_rank():03d}"
    return Path(directory, name, "model_optim_rng.pt")


def save_legacy(models: list[Any], path: Path) -> None:
    """As ``generate_state_dict`` of megatron.training saves a run, optimizer and random state included."""
    import numpy
    from megatron.core.enums import ModelType
    from megatron.core.transformer.enums import AttnBackend

    args = argparse.Namespace(num_layers=4, model_type=ModelType.encoder_or_decoder, attention_backend=AttnBackend.auto)
    first = next(models[0].parameters())
    whole: dict[str, Any] = {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": 7,
        "optimizer": {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 0.1, "params": [0]}]},
        "opt_param_scheduler": {"max_lr": 0.1, "num_steps": 7},
        "rng_state": [{"np_rng_state": numpy.random.get_state(), "torch_rng_state": torch.get_rng_state()}],
        "num_floating_point_operations_so_far": 12,
        "main_params": first,
    }
    for number, model in enumerate(models):
        whole["model" if len(models) == 1 else f"model{number}"] = model.state_dict()
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(whole, path)


def is_first_copy() -> bool:
    """One of the data parallel ranks writes a legacy file; of expert ranks, the one that holds these experts first."""
    from megatron.core import parallel_state

    return bool(parallel_state.get_expert_data_parallel_rank() == 0)


def run_case(case: dict[str, Any], layout: dict[str, int]) -> dict[str, Any]:
    from megatron.core import dist_checkpointing
    from safetensors.torch import load_file

    hf = load_file(case["hf"] + "/model.safetensors")
    found: dict[str, Any] = {"wrong": {}, "extra": []}
    models = build(case, layout)
    slices = Slices(hf, models[0].config, case["vocab_rows"])
    want = [wanted(model, slices) for model in models]
    found["tensors"] = sum(map(len, want))
    found["layers"] = [len(model.decoder.layers) for model in models]
    for form, directory in case["dist"].items():
        metadata = {"non_homogeneous_layers": True} if form == "per-layer" else None
        for model in models:
            fill(model)
        load_dist(models, directory, metadata)
        found["wrong"][form] = [name for model, w in zip(models, want, strict=True) for name in wrong(model, w)]
    if directory := case["legacy"].get(layout["name"]):
        file = torch.load(rank_file(directory + "/release", layout), weights_only=False)
        faults = []
        for number, model in enumerate(models):
            fill(model)
            state = file["model" if len(models) == 1 else f"model{number}"]
            try:
                model.load_state_dict(state, strict=True)
            except RuntimeError as error:
                faults.append(str(error))
            faults += wrong(model, want[number])
            real = {name for name in model.state_dict() if name.endswith("_extra_state")}
            found["extra"] += sorted({name for name in state if name.endswith("_extra_state")} - real)
        found["wrong"]["legacy"] = faults
    for form, target in case["save"].get(layout["name"], {}).items():
        if form.startswith("legacy"):
            if form in SPLITS:
                models = build(case, layout, **SPLITS[form])
                want = [wanted(model, slices) for model in models]
                found["saved_layers"] = [len(model.decoder.layers) for model in models]
            for model, values in zip(models, want, strict=True):
                fill(model, values)
            if is_first_copy():
                save_legacy(models, rank_file(target, layout))
            continue
        for model, values in zip(models, want, strict=True):
            fill(model, values)
        metadata = {"non_homogeneous_layers": True} if form == "per-layer" else None
        if dist.get_rank() == 0:
            Path(target).mkdir(parents=True)
        dist.barrier()
        (model,) = models
        dist_checkpointing.save(model.sharded_state_dict(metadata=metadata), target)
        dist.barrier()
    return found


def hybrid_model(case: dict[str, Any], layout: dict[str, int]) -> Any:
    """HybridModel on modules of the local spec, under the names that its TransformerEngine spec has on disk."""
    from megatron.core import parallel_state
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import (
        MoETransformerLayer,
        TransformerLayer,
        TransformerLayerSubmodules,
    )

    settings = case["settings"]
    config = config_of(settings, layout, num_layers=2 * settings["transformer"]["num_layers"])
    norm = LocalSpecProvider().layer_norm(rms_norm=True, for_qk=False)
    hybrid_block.TENorm = norm  # the block's own final norm
    experts = config.num_moe_experts
    gpt = get_gpt_layer_local_submodules(num_experts=experts, qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    attention = ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=gpt.self_attention,
            self_attn_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map={"input_layernorm.": "self_attention.linear_qkv.layer_norm_"},
        ),
    )
    fused = {"sharded_state_dict_keys_map": {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}}
    mlp = ModuleSpec(
        module=MoETransformerLayer if experts else MLPLayer,
        submodules=TransformerLayerSubmodules(
            pre_mlp_layernorm=norm, mlp=gpt.mlp, mlp_bda=get_bias_dropout_add, **({} if experts else fused)
        ),
    )
    stack = hybrid_block.HybridStackSubmodules(attention_layer=attention, mlp_layer=mlp, moe_layer=mlp)
    same = ("share_embeddings_and_output_weights", "position_embedding_type", "rotary_base", "rotary_percent")
    return HybridModel(
        config=config,
        hybrid_stack_spec=ModuleSpec(module=hybrid_block.HybridStack, submodules=stack),
        vocab_size=case["vocab_rows"],
        max_sequence_length=64,
        hybrid_layer_pattern=case["pattern"],
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        **{name: settings["gpt"][name] for name in same},
    )


def run_hybrid(case: dict[str, Any], layout: dict[str, int]) -> dict[str, Any]:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.gpt_checkpoint_interop import (
        gpt_compatible_layer_maps,
        retarget_sharded_state_dict_to_gpt_checkpoint,
    )
    from safetensors.torch import load_file
    from torch.distributed.checkpoint.api import CheckpointException

    model = hybrid_model(case, layout)
    slices = Slices(load_file(case["hf"] + "/model.safetensors"), model.config, case["vocab_rows"])
    want = wanted(model, slices, lambda number: (number - 1) // 2)
    maps = gpt_compatible_layer_maps(case["pattern"])
    found: dict[str, Any] = {"tensors": len(want), "wrong": {}}
    for form, retarget in (
        ("hybrid", None),
        ("stacked", partial(retarget_sharded_state_dict_to_gpt_checkpoint, layer_maps=maps)),
    ):
        fill(model)
        try:
            load_dist([model], case[form], None, retarget)
        except CheckpointException as error:
            found["wrong"][form] = [str(error).strip().splitlines()[-1]]
            continue
        found["wrong"][form] = wrong(model, want)
    fill(model, want)
    if dist.get_rank() == 0:
        Path(case["save"]).mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(model.sharded_state_dict(), case["save"])
    dist.barrier()
    return found


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text())
    cuda: Any = torch.cuda
    tensor: Any = torch.Tensor
    cuda.current_device = lambda: torch.device("cpu")
    cuda.synchronize = lambda *_: None
    tensor.cuda = lambda self, *_, **__: self
    dist.init_process_group("gloo")
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    get_cuda_rng_tracker().fork = lambda *_: nullcontext()  # nothing here is drawn

    findings: dict[str, Any] = {}
    for layout in plan["layouts"]:
        parallel_state.initialize_model_parallel(
            layout["tp"],
            layout["pp"],
            virtual_pipeline_model_parallel_size=layout["vp"] if layout["vp"] > 1 else None,
            expert_model_parallel_size=layout["ep"],
            expert_tensor_parallel_size=layout["etp"],
        )
        for name, case in plan["cases"].items():
            if layout["name"] in case["layouts"]:
                findings[f"{name} {layout['name']}"] = run_case(case, layout)
        for name, case in plan["hybrids"].items():
            if layout["name"] == case["layout"]:
                findings[f"{name} hybrid"] = run_hybrid(case, layout)
        parallel_state.destroy_model_parallel()
    Path(plan["out"], f"rank-{os.environ['RANK']}.json").write_text(json.dumps(findings))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
