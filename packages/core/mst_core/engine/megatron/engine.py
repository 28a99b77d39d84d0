"""The megatron engine: megatron-core's GPTModel, schedules, DDP and optimizers behind seam.Engine.

Tensor, pipeline (1F1B), data and sequence parallel, the distributed optimizer, fp32 and bf16 (bf16 weights, fp32 main
weights and gradients), all weights or LoRA. AdamW decays matrices only, as the plain engine does.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mst_core import families, torch_dist
from mst_core.checkpoint import Staging
from mst_core.engine import lora as shared_lora
from mst_core.engine.megatron import checkpoint, groups, lora, model, state, step
from mst_core.engine.seam import Batch, Objective, weights
from mst_core.errors import InputError, RunError
from mst_core.parallel.layout import check_layout
from mst_core.runspec import RunSpec


class MegatronEngine:
    """One rank of the run. See seam.Engine for the methods."""

    def __init__(self, spec: RunSpec, model_dir: Path) -> None:
        if not torch_dist.is_megatron(model_dir):
            hint = f"mst-convert --model {model_dir} --to megatron --out {model_dir}-megatron, or --engine plain"
            raise InputError("the megatron engine eats a Megatron directory", where=model_dir, hint=hint)
        hf = model_dir / "hf"
        config = json.loads((hf / "config.json").read_text())
        family = families.family_for(config, str(hf))
        self.spec, self.model_dir, self.dims = spec, model_dir, family.model(config).dims
        check_layout(family.model(config), spec, model_dir)
        _quiet()
        groups.start(spec.tp, spec.pp, spec.seed)
        from megatron.core import parallel_state

        self.rank = dist.get_rank()
        self.dp_rank = parallel_state.get_data_parallel_rank()
        self.dp_size = parallel_state.get_data_parallel_world_size()
        self.multiple = spec.tp if spec.sp else 1
        self.raw = model.build(family.megatron(config, str(hf)), spec, self._vocab_rows()).to(groups.device())
        checkpoint.load(self.raw, model_dir)
        step.mask_padding(self.raw, self.dims.vocab)
        inner = model.in_precision(self.raw, spec)  # before the adapters, which stay fp32 as PEFT's do
        self.adapters: list[lora.Adapters] = []
        self.targets: list[str] = []
        if spec.lora_rank is not None:
            self.targets = shared_lora.targets(spec.lora_targets)
            self.adapters = lora.attach(self.raw, spec, self.dims, self.targets)
        self.model, self.optimizer = _wrap(inner, spec)
        self.steps = 0

    def step(self, micro_batches: Sequence[Batch], objective: Objective, lr: float) -> dict[str, float]:
        """One optimizer step over ``micro_batches``, those of this data parallel rank."""
        self.steps += 1
        total = self._sum_over_dp(weights(objective, micro_batches))
        self.model.train()
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        sums = step.train(self.model, micro_batches, objective, total, self.multiple)
        means = self._means(sums, total)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
            group["weight_decay"] = self.spec.weight_decay * group.get("wd_mult", 1.0)
        means["grad_norm"] = self._update(means["loss"])
        return means

    def score(self, batch: Batch, *, reference: bool = False) -> Tensor:
        """logp_BT, fp32 on the CPU, on every rank."""
        self.model.eval()
        if reference and self.adapters:
            with contextlib.contextmanager(lora.switched_off)(self.adapters):
                return step.score(self.model, batch, self.multiple)
        return step.score(self.model, batch, self.multiple)

    def logits(self, batch: Batch) -> Tensor | None:
        """logits_BTV of the real vocabulary on the last pipeline stage, None elsewhere. For comparisons, TP 1 only."""
        self.model.eval()
        return step.logits(self.model, batch, self.dims.vocab)

    def agree(self, value: int) -> int:
        """The largest of all ranks'."""
        found = torch.tensor([value], device=groups.device())
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return int(found)

    def save_state(self, directory: Path) -> None:
        """See state.py."""
        state.save(directory, self.spec, self.raw, self.optimizer, self.steps)

    def load_state(self, directory: Path) -> None:
        """See state.py."""
        self.steps = state.load(directory, self.spec, self.raw, self.optimizer)

    def save(self, staging: Staging | None) -> None:
        """A Megatron directory, or a PEFT adapter. Every rank calls it; rank 0 writes."""
        if self.spec.lora_rank is None:
            checkpoint.save(self.raw, self.model_dir, staging)
            return
        found = lora.gather(self.adapters)
        if staging is not None:
            config = shared_lora.adapter_config(self.spec.lora_rank, self.spec.alpha, self.targets)
            shared_lora.save_adapter(staging, found, config)

    def close(self) -> None:
        """Leave the process groups."""
        groups.stop()

    def _vocab_rows(self) -> int:
        """Rows of the embedding: those of the directory, rounded up to a multiple of the tensor parallel size."""
        stored = torch_dist.metadata(torch_dist.checkpoint_dir(self.model_dir))
        rows = stored["embedding.word_embeddings.weight"].shape[0]
        return -(-rows // self.spec.tp) * self.spec.tp

    def _sum_over_dp(self, local: dict[str, float]) -> dict[str, float]:
        from megatron.core import parallel_state

        names = sorted(local)
        values = torch.tensor([local[name] for name in names], dtype=torch.float64, device=groups.device())
        dist.all_reduce(values, group=parallel_state.get_data_parallel_group())
        return dict(zip(names, values.tolist(), strict=True))

    def _means(self, sums: dict[str, Tensor], total: dict[str, float]) -> dict[str, float]:
        """Each term's global sum / weight, and the loss, the same on every rank."""
        from megatron.core import parallel_state

        names = sorted(total)
        table = torch.stack([sums.get(name, torch.zeros(2, dtype=torch.float64)) for name in names])
        table = table.to(groups.device())
        first, coefficients = table[:, 0].contiguous(), table[:, 1].contiguous()
        dist.all_reduce(first, group=parallel_state.get_data_parallel_group())
        pipeline = parallel_state.get_pipeline_model_parallel_group()
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        for values in (first, coefficients):
            dist.broadcast(values, last, group=pipeline)
        means = {n: value / total[n] if total[n] else 0.0 for n, value in zip(names, first.tolist(), strict=True)}
        loss = sum(factor * means[n] for n, factor in zip(names, coefficients.tolist(), strict=True))
        return {**means, "loss": loss}

    def _update(self, loss: float) -> float:
        """Clip and step. Raises RunError, with the weights untouched, if the loss or the norm is not finite."""
        # What optimizer.step() does, in its parts: it would change the weights although the norm is not a number, and
        # computes no norm where clipping is off.
        from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

        self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm())
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise RunError(
                f"step {self.steps}: loss {loss:g}, gradient norm {norm:g}",
                hint="the weights are those of the step before; try a smaller --lr or --precision fp32",
            )
        parameters = self.optimizer.get_parameters()
        if self.spec.clip_grad and parameters:
            clip_grad_by_total_norm_fp32(parameters, max_norm=self.spec.clip_grad, total_norm=norm)
        self.optimizer.step_with_ready_grads()
        return norm


def _wrap(inner: Any, spec: RunSpec) -> tuple[Any, Any]:
    """DDP and optimizer around the model, gradients reduced in fp32, nothing divided by Megatron."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config, half = inner.config, spec.precision == "bf16"
    distributed = spec.distributed_optimizer
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=distributed, overlap_grad_reduce=False
    )
    wrapped = DistributedDataParallel(config, ddp, inner)
    wrapped.broadcast_params()
    config.finalize_model_grads_func = lambda chunks, _tokens=None, **options: finalize_model_grads(
        chunks, None, **{name: value for name, value in options.items() if name == "pg_collection"}
    )
    settings = OptimizerConfig(
        optimizer="adam",
        lr=spec.lr,
        min_lr=spec.min_lr,
        weight_decay=spec.weight_decay,
        adam_beta1=spec.adam_beta1,
        adam_beta2=spec.adam_beta2,
        adam_eps=spec.adam_eps,
        clip_grad=spec.clip_grad,
        bf16=half,
        params_dtype=torch.bfloat16 if half else torch.float32,
        use_distributed_optimizer=distributed,
        log_num_zeros_in_grad=False,
    )
    optimizer = get_megatron_optimizer(settings, [wrapped], use_gloo_process_groups=torch.cuda.is_available())
    config.grad_scale_func = optimizer.scale_loss
    return wrapped, optimizer


def _quiet() -> None:
    """megatron-core says at import what is not installed and at build that GPTModel is old; neither is news."""
    warnings.filterwarnings("ignore", module="megatron")
    logging.getLogger("megatron").setLevel(logging.ERROR)
