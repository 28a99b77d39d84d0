"""Two ranks of test_convert_optimizer.py, under torchrun: real megatron-core models, optimizers and checkpoints.

    python -m torch.distributed.run --nproc-per-node 2 -m tests.oracle.convert_optimizer_ranks save|load PLAN.json

``save`` trains every run for two steps, saves it with ``dist_checkpointing.save`` as megatron.training does (the same
state dict, the same content metadata), trains one step more, and keeps weights and state of both moments.
``load`` builds model and optimizer anew, loads a directory with ``dist_checkpointing.load`` at default strictness,
takes the third step, and keeps the same of before and after it. CUDA is answered for by mst's bridge.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mst_core.engine.megatron import cpu, groups, step
from tests.oracle.convert_layouts_ranks import build, hybrid_model

Tensors = dict[str, torch.Tensor]
VOCAB, STEPS = 50, 2


def trainer(run: dict[str, Any]) -> tuple[Any, Any, Any]:
    """(raw model, model under DDP, MegatronOptimizer). A GPTModel, or a HybridModel if the run has a pattern."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.module import Float16Module

    half, distributed = run["dtype"] == "bf16", run["sharding"] is not None
    layout = {"tp": run["tp"], "pp": 1, "vp": 1, "ep": run["ep"], "etp": 1, "fields": {}}
    case = {"settings": run["settings"], "vocab_rows": run["rows"], "pattern": run["pattern"]}
    torch.manual_seed(3)
    if run["pattern"]:
        model = hybrid_model(case, layout)
    else:
        kind = {"bf16": half, "params_dtype": torch.bfloat16 if half else torch.float32}
        (model,) = build(case, layout, **kind)
    model.config.bf16 = half
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.1 + (parameter.ndim == 1))
    step.mask_padding(model, VOCAB)
    inner = Float16Module(model.config, model) if half else model
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=distributed)
    wrapped = DistributedDataParallel(model.config, ddp, inner)
    wrapped.broadcast_params()
    settings = OptimizerConfig(
        optimizer="adam", lr=0.01, weight_decay=0.1, clip_grad=1.0, bf16=half,
        params_dtype=torch.bfloat16 if half else torch.float32, use_distributed_optimizer=distributed,
    )  # fmt: skip
    return model, wrapped, get_megatron_optimizer(settings, [wrapped], use_gloo_process_groups=False)


def train(model: Any, optimizer: Any, number: int) -> None:
    """Step ``number`` of a run: the same rows on every data parallel rank."""
    from megatron.core.distributed import finalize_model_grads

    tokens = torch.randint(0, VOCAB, (2, 12), generator=torch.Generator().manual_seed(number))
    positions = torch.arange(12).expand_as(tokens)
    model.zero_grad_buffer()
    optimizer.zero_grad()
    loss = model(tokens, positions, None, labels=tokens.roll(-1, 1)).float().mean()
    loss.backward()
    finalize_model_grads([model], None)
    done, *_ = optimizer.step()
    assert done


def extra(state: dict[str, Any]) -> dict[str, Any]:
    """The _extra_state of each module."""
    return {name: value for name, value in state.items() if name.endswith("_extra_state")}


def metadata(run: dict[str, Any], form: str) -> dict[str, Any]:
    """As _build_sharded_state_dict_metadata of megatron.training makes it."""
    found: dict[str, Any] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    if run["sharding"]:
        found["distrib_optim_sharding_type"] = run["sharding"]
        found["distrib_optim_fully_reshardable_mem_efficient"] = False
    if form == "per-layer":
        found["non_homogeneous_layers"] = True
    return found


def everything(run: dict[str, Any], model: Any, optimizer: Any, content: dict[str, Any], loading: bool) -> Any:
    """As generate_state_dict of megatron.training makes it."""
    from megatron.core import parallel_state as at
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    full = {**content, "dp_cp_group": at.get_data_parallel_group(with_context_parallel=True)}
    state: dict[str, Any] = {"model": model.sharded_state_dict(metadata=full)}
    state["optimizer"] = optimizer.sharded_state_dict(state, is_loading=loading, metadata=full)
    tp = at.get_tensor_model_parallel_rank()
    here = [{"random_rng_state": random.getstate(), "torch_rng_state": torch.get_rng_state(), "rank": tp}]
    replica = at.get_data_parallel_rank(with_context_parallel=True)
    state["rng_state"] = ShardedObject("rng_state", here, (1, run["tp"]), (0, tp), replica_id=replica)
    if not loading:
        state["args"] = argparse.Namespace(
            num_layers=4, padded_vocab_size=run["rows"], tensor_model_parallel_size=run["tp"]
        )
        state |= {"checkpoint_version": 3.0, "iteration": STEPS, "num_floating_point_operations_so_far": 7}
        state["opt_param_scheduler"] = {"max_lr": 0.01, "num_steps": STEPS}
    return state


def inner(optimizer: Any) -> list[Any]:
    """The optimizers of a chain: that of the experts is one of its own."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def seen(model: Any, optimizer: Any) -> Tensors:
    """Weights and optimizer state of this rank: of a parameter or its main copy, whole or this rank's shard."""
    found = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for number, one in enumerate(inner(optimizer)):
        for at, (parameter, state) in enumerate(one.optimizer.state.items()):
            for key, value in {**state, "main": parameter}.items():
                found[f"{number}.{at}.{key}"] = torch.as_tensor(value).detach().clone()
        for at, group in enumerate(one.optimizer.param_groups):
            known = {key: value for key, value in group.items() if isinstance(value, int | float) and key != "step"}
            found |= {f"{number}.group{at}.{key}": torch.tensor(float(value)) for key, value in known.items()}
    return found


def save(run: dict[str, Any]) -> None:
    from megatron.core import dist_checkpointing

    model, wrapped, optimizer = trainer(run)
    for number in range(STEPS):
        train(wrapped, optimizer, number)
    target = Path(run["dir"], f"iter_{STEPS:07d}")
    if dist.get_rank() == 0:
        target.mkdir(parents=True)
        Path(run["dir"], "latest_checkpointed_iteration.txt").write_text(str(STEPS))
    dist.barrier()
    content = metadata(run, run["form"])
    state = everything(run, model, optimizer, content, loading=False)
    for name, value in extra(state["model"]).items():
        value.data = name  # what FP8 keeps of each module
    dist_checkpointing.save(state, str(target), content_metadata=content)
    kept = {"before": seen(model, optimizer)}
    train(wrapped, optimizer, STEPS)
    torch.save({**kept, "after": seen(model, optimizer)}, f"{run['dir']}-rank{dist.get_rank()}.pt")


def load(run: dict[str, Any], name: str) -> None:
    from megatron.core import dist_checkpointing

    model, wrapped, optimizer = trainer(run)
    if run["sharding"]:  # without TransformerEngine or Apex a DistributedOptimizer without state cannot be loaded
        train(wrapped, optimizer, STEPS + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
        for values in (one for each in inner(optimizer) for one in each.optimizer.state.values()):
            for key, value in values.items():
                value.fill_(float("nan") if key != "step" else 77)
    directory = str(next(Path(run["dir"]).glob("iter_*")))
    common = dist_checkpointing.load_common_state_dict(directory)
    content = dist_checkpointing.load_content_metadata(preloaded_state_dict=common)
    loaded = dist_checkpointing.load(everything(run, model, optimizer, content, loading=True), directory)
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    for state in (state for one in inner(optimizer) for state in one.optimizer.state.values()):
        state["step"] = state["step"].clone()  # DistributedOptimizer gives all parameters one tensor to count in
    rank = loaded["rng_state"][0]["rank"]
    kept: dict[str, Any] = {"before": seen(model, optimizer), "content": content, "rng": rank}
    kept |= {"args": vars(common["args"]), "extra": extra(loaded["model"]), "scheduler": common["opt_param_scheduler"]}
    train(wrapped, optimizer, STEPS)
    torch.save({**kept, "after": seen(model, optimizer)}, f"{name}-rank{dist.get_rank()}.pt")


def main() -> None:
    what, plan = sys.argv[1], json.loads(Path(sys.argv[2]).read_text())
    for name, run in plan.items():
        start(run)
        save(run) if what == "save" else load(run, name)
        dist.barrier()
        groups.leave()
    groups.stop()


def start(run: dict[str, Any]) -> None:
    cpu.apply()
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    if not dist.is_initialized():
        dist.init_process_group("gloo")
        # The step of torch's Adam (Apex's and TransformerEngine's have none) is asked for and was taken out: KeyError.
        put: Any = DistributedOptimizer._set_main_param_and_optimizer_states
        DistributedOptimizer._set_main_param_and_optimizer_states = lambda self, parameter, tensors: put(
            self, parameter, {"step": None, **tensors}
        )
    parallel_state.initialize_model_parallel(
        run["tp"], expert_model_parallel_size=run["ep"], expert_tensor_parallel_size=1, create_gloo_process_groups=False
    )
    tensor_parallel.model_parallel_cuda_manual_seed(5)


if __name__ == "__main__":
    main()
