"""One rank of test_convert_layouts.py, under torchrun: real megatron-core, nothing of mst.

    python -m torch.distributed.run --nproc-per-node 4 convert_layouts_ranks.py CASES.json

For every layout and case the GPTModel (local spec) of this rank is built and filled with NaN, loaded with what
mst-convert wrote (torch_dist at default strictness, legacy with ``load_state_dict(strict=True)``), and every parameter
and buffer compared bit for bit with the slice that the Hugging Face tensors say, which is written out below without
mst's maps. Then the same models are saved, by ``dist_checkpointing.save`` and as ``mp_rank_*`` files, for the way back.
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
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

Tensors = dict[str, torch.Tensor]


class NoAttention(torch.nn.Module):
    """Instead of the local core attention, which takes no k_channels and so cannot be built for MLA; no weights."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()


class Slices:
    """The tensors of this rank, from the Hugging Face tensors (MAPPINGS.md 1.1 to 1.7, 2.1 to 2.7, 2.13)."""

    def __init__(self, hf: Tensors, config: Any, vocab_rows: int) -> None:
        from megatron.core import parallel_state

        self.hf, self.config, self.vocab_rows = hf, config, vocab_rows
        self.tp = parallel_state.get_tensor_model_parallel_rank()
        self.tp_size = parallel_state.get_tensor_model_parallel_world_size()
        self.ep = parallel_state.get_expert_model_parallel_rank()
        self.ep_size = parallel_state.get_expert_model_parallel_world_size()

    def rows(self, tensor: torch.Tensor) -> torch.Tensor:
        mine: torch.Tensor = tensor.chunk(self.tp_size, 0)[self.tp]
        return mine

    def columns(self, tensor: torch.Tensor) -> torch.Tensor:
        mine: torch.Tensor = tensor.chunk(self.tp_size, 1)[self.tp]
        return mine

    def vocabulary(self, tensor: torch.Tensor) -> torch.Tensor:
        padded = torch.zeros(self.vocab_rows, tensor.shape[1])
        padded[: tensor.shape[0]] = tensor
        return self.rows(padded)

    def fused_qkv(self, p: str, kind: str) -> torch.Tensor:
        groups, d = self.config.num_query_groups, self.config.kv_channels
        parts = []
        for name, heads in (("q", self.config.num_attention_heads), ("k", groups), ("v", groups)):
            tensor = self.hf[f"{p}.self_attn.{name}_proj.{kind}"]
            parts.append(tensor.reshape(groups, heads // groups * d, *tensor.shape[1:]))
        whole = torch.cat(parts, 1)
        return self.rows(whole.reshape(-1, *whole.shape[2:]))

    def gated(self, p: str, gate: str = "gate_proj", up: str = "up_proj") -> torch.Tensor:
        return torch.cat([self.rows(self.hf[f"{p}.{gate}.weight"]), self.rows(self.hf[f"{p}.{up}.weight"])])

    def of_experts(self) -> Slices:
        """The same with the tensor parallel rank that experts have."""
        from megatron.core import parallel_state

        mine = copy(self)
        mine.tp = parallel_state.get_expert_tensor_parallel_rank()
        mine.tp_size = parallel_state.get_expert_tensor_parallel_world_size()
        return mine

    def expert(self, p: str, local: int, rest: str) -> torch.Tensor:
        number = self.ep * self.config.num_moe_experts // self.ep_size + local
        if f"{p}.mlp.experts.gate_up_proj" in self.hf:  # gpt-oss: transposed, gate and up rows in turn
            both = self.hf[f"{p}.mlp.experts.gate_up_proj"][number].T
            bias = self.hf[f"{p}.mlp.experts.gate_up_proj_bias"][number]
            return {
                "linear_fc1.weight": lambda: torch.cat([self.rows(both[::2]), self.rows(both[1::2])]),
                "linear_fc1.bias": lambda: torch.cat([self.rows(bias[::2]), self.rows(bias[1::2])]),
                "linear_fc2.weight": lambda: self.columns(self.hf[f"{p}.mlp.experts.down_proj"][number].T),
                "linear_fc2.bias": lambda: self.hf[f"{p}.mlp.experts.down_proj_bias"][number],
            }[rest]()
        mixtral = f"{p}.block_sparse_moe.experts.{number}"
        if f"{mixtral}.w1.weight" in self.hf:
            if rest == "linear_fc1.weight":
                return self.gated(mixtral, "w1", "w3")
            return self.columns(self.hf[f"{mixtral}.w2.weight"])
        if rest == "linear_fc1.weight":
            return self.gated(f"{p}.mlp.experts.{number}")
        return self.columns(self.hf[f"{p}.mlp.experts.{number}.down_proj.weight"])

    def one_of(self, *names: str) -> torch.Tensor:
        return next(self.hf[name] for name in names if name in self.hf)

    def __call__(self, name: str, layer: int) -> torch.Tensor:
        """What ``name`` of a state dict must be; ``layer`` is the global number of its layer."""
        hf, p = self.hf, f"model.layers.{layer}"
        if name == "embedding.word_embeddings.weight":
            return self.vocabulary(hf["model.embed_tokens.weight"])
        if name == "output_layer.weight":
            return self.vocabulary(self.one_of("lm_head.weight", "model.embed_tokens.weight"))
        if name in ("decoder.final_layernorm.weight", "decoder.final_norm.weight"):
            return hf["model.norm.weight"]
        rest = name.split(".", 3)[3]
        if rest.startswith("mlp.experts.local_experts."):
            _, _, _, local, rest = rest.split(".", 4)
            return self.of_experts().expert(p, int(local), rest)
        attention, mlp = f"{p}.self_attn", f"{p}.mlp"
        shared = f"{mlp}.shared_expert" if f"{mlp}.shared_expert_gate.weight" in hf else f"{mlp}.shared_experts"
        gates = (f"{mlp}.gate", f"{p}.block_sparse_moe.gate", f"{mlp}.router")
        makers: dict[str, Callable[[], torch.Tensor]] = {
            "input_layernorm.weight": lambda: hf[f"{p}.input_layernorm.weight"],
            "pre_mlp_layernorm.weight": lambda: hf[f"{p}.post_attention_layernorm.weight"],
            "self_attention.linear_qkv.weight": lambda: self.fused_qkv(p, "weight"),
            "self_attention.linear_qkv.bias": lambda: self.fused_qkv(p, "bias"),
            "self_attention.linear_proj.weight": lambda: self.columns(hf[f"{attention}.o_proj.weight"]),
            "self_attention.linear_proj.bias": lambda: hf[f"{attention}.o_proj.bias"],
            "self_attention.q_layernorm.weight": lambda: self.one_of(
                f"{attention}.q_norm.weight", f"{attention}.q_a_layernorm.weight"
            ),
            "self_attention.k_layernorm.weight": lambda: hf[f"{attention}.k_norm.weight"],
            "self_attention.kv_layernorm.weight": lambda: hf[f"{attention}.kv_a_layernorm.weight"],
            "self_attention.linear_q_down_proj.weight": lambda: hf[f"{attention}.q_a_proj.weight"],
            "self_attention.linear_q_up_proj.weight": lambda: hf[f"{attention}.q_b_proj.weight"],
            "self_attention.linear_kv_down_proj.weight": lambda: hf[f"{attention}.kv_a_proj_with_mqa.weight"],
            "self_attention.linear_kv_up_proj.weight": lambda: hf[f"{attention}.kv_b_proj.weight"],
            "self_attention.core_attention.softmax_offset": lambda: self.rows(hf[f"{attention}.sinks"]),
            "mlp.linear_fc1.weight": lambda: self.gated(mlp),
            "mlp.linear_fc2.weight": lambda: self.columns(hf[f"{mlp}.down_proj.weight"]),
            "mlp.router.weight": lambda: self.one_of(*(f"{gate}.weight" for gate in gates)),
            "mlp.router.bias": lambda: hf[f"{mlp}.router.bias"],
            "mlp.router.expert_bias": lambda: hf[f"{mlp}.gate.e_score_correction_bias"],
            "mlp.shared_experts.linear_fc1.weight": lambda: self.gated(shared),
            "mlp.shared_experts.linear_fc2.weight": lambda: self.columns(hf[f"{shared}.down_proj.weight"]),
            "mlp.shared_experts.gate_weight": lambda: hf[f"{mlp}.shared_expert_gate.weight"],
        }
        return makers[rest]()


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
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    config = config_of(case["settings"], layout, **more)
    models = []
    for stage in range(layout["vp"]):
        at = {"vp_stage": stage if layout["vp"] > 1 else None}
        block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm", **at)
        if "mla" in case["settings"]:
            for layer in block.layer_specs:
                layer.submodules.self_attention.submodules.core_attention = NoAttention
        where = {"ignore_virtual": False, **at} if layout["vp"] > 1 else {}
        models.append(
            GPTModel(
                config=config,
                transformer_layer_spec=block,
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
        layer = gpt_layer(model.decoder.layers[int(name.split(".")[2])].layer_number) if ".layers." in name else -1
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
        if form == "legacy" or form == "legacy-uneven":
            if form == "legacy-uneven":
                models = build(case, layout, num_layers_in_first_pipeline_stage=1)
                want = [wanted(model, slices) for model in models]
                found["layers"] = len(models[0].decoder.layers)
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
