"""The megatron engine: megatron-core's GPTModel, schedules, DDP and optimizers behind seam.Engine.

Tensor, pipeline (1F1B, interleaved), context, expert, data and sequence parallel, the distributed optimizer, fp32, bf16
and fp16 (half weights, fp32 main weights and gradients), all weights or LoRA. AdamW decays matrices only, as the plain
engine does.
"""

from __future__ import annotations

import contextlib
import logging
import math
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from mst_core import console, runplan, torch_dist
from mst_core.checkpoint import Staging
from mst_core.engine import lora as shared_lora
from mst_core.engine import ranks
from mst_core.engine.megatron import groups, lora, model, optimizer, shards, state, step
from mst_core.engine.megatron.checkpoint import MegatronDir
from mst_core.engine.megatron.cut import Cut
from mst_core.engine.megatron.hf import HFDir
from mst_core.engine.megatron.router import take_balance
from mst_core.engine.scalar import ScalarHead
from mst_core.engine.seam import Batch, Create, Objective, create, weights
from mst_core.errors import RunError
from mst_core.parallel.layout import check_layout
from mst_core.runspec import RunSpec


class MegatronEngine:
    """One rank of the run. See seam.Engine for the methods."""

    def __init__(self, spec: RunSpec, model_dir: Path) -> None:
        self.spec, self.model_dir = spec, model_dir
        self.source = MegatronDir(model_dir) if torch_dist.is_megatron(model_dir) else HFDir(model_dir)
        self.dims = self.source.model.dims
        check_layout(self.source.model, spec, model_dir)
        _quiet()
        sizes = {"vp": spec.vp, "cp": spec.cp, "ep": spec.ep, "etp": spec.expert_tp}
        groups.start(spec.tp, spec.pp, spec.seed, **sizes, timeout=spec.timeout)
        from megatron.core import parallel_state

        self.rank = dist.get_rank()
        self.dp_rank = parallel_state.get_data_parallel_rank()
        self.dp_size = parallel_state.get_data_parallel_world_size()
        scores = self.source.model.scores
        self.cut = Cut.of(spec, scores)
        settings = self.source.family.megatron(self.source.config, str(self.source.hf))
        built = model.build(settings, spec, self.source.vocab_rows(spec.tp), scores=scores)
        self.raw = [chunk.to(groups.device()) for chunk in built]
        self.source.load(self.raw)
        inner = []
        self.adapters: list[lora.Adapters] = []
        self.sites = [] if spec.lora_rank is None else runplan.check_lora(self.source.model, spec)
        for chunk in self.raw:
            if not scores:
                step.mask_padding(chunk, self.dims.vocab)
            inner.append(model.in_precision(chunk, spec))  # before the adapters, which stay fp32 as PEFT's do
            if spec.lora_rank is not None:
                self.adapters += lora.attach(chunk, spec, self.sites)
        self.chunks, self.optimizer = optimizer.wrap(inner, spec)
        self.update_scale = optimizer.share_loss_scale(self.optimizer)
        self.steps = 0

    def step(self, micro_batches: Sequence[Batch], objective: Objective, lr: float) -> dict[str, float]:
        """One optimizer step over ``micro_batches``, those of this data parallel rank."""
        self.steps += 1
        total = self._sum_over_dp(weights(objective, micro_batches))
        for chunk in self.chunks:
            chunk.train()
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        tokens = self._share_balance(micro_batches) if self.cut.balance else 0.0
        sums = step.train(self.chunks, micro_batches, objective, total, self.cut)
        means = self._means(sums, total)
        if self.cut.balance:
            means["balance"] = take_balance(self.raw, groups.device()) / tokens
        for group in self.optimizer.param_groups:
            group["lr"] = lr
            group["weight_decay"] = self.spec.weight_decay * group.get("wd_mult", 1.0)
        return means | self._update(means["loss"])

    def score(self, batch: Batch, *, reference: bool = False) -> Tensor:
        """logp_BT, fp32 on the CPU, on every rank."""
        for chunk in self.chunks:
            chunk.eval()
        if reference and self.adapters:
            with contextlib.contextmanager(lora.switched_off)(self.adapters):
                return step.score(self.chunks, batch, self.cut)
        return step.score(self.chunks, batch, self.cut)

    def total(self, value: float) -> float:
        """Summed over the data parallel ranks."""
        return self._sum_over_dp({"value": value})["value"]

    def agree(self, value: int) -> int:
        """The largest of all ranks'."""
        return ranks.largest(value, groups.device())

    def save_state(self, directory: Path, create: Create = create) -> None:
        """See state.py."""
        optimizer.finish_gather(self.chunks, self.spec)
        state.save(directory, self._spots(), self.optimizer, self.steps, create)

    def load_state(self, directory: Path) -> None:
        """See state.py."""
        self.steps = state.load(directory, self._spots(), self.optimizer)

    def save(self, staging: Staging | None) -> None:
        """A directory of the layout it came from, or a PEFT adapter. Every rank calls it; rank 0 writes."""
        optimizer.finish_gather(self.chunks, self.spec)
        if self.spec.lora_rank is None:
            self.source.save(self.raw, staging)
            return
        found = lora.gather(self.adapters, self.sites, self.spec.lora_rank, self._heads())
        if staging is not None:
            config = shared_lora.config_of(self.spec, self.source.model, self.sites)
            shared_lora.save_adapter(staging, found, config)

    def close(self, *, stay: bool = False) -> None:
        """Leave the process groups."""
        if stay:
            groups.leave()
        else:
            groups.stop()

    def _spots(self) -> shards.Spots:
        if self.adapters:
            return lora.spots(self.adapters, self._heads())
        return shards.spots(self.raw, self.source.per_layer)

    def _heads(self) -> list[ScalarHead]:
        return [head for chunk in self.raw for head in lora.heads(chunk)]

    def _share_balance(self, micro_batches: Sequence[Batch]) -> float:
        """Set the coefficient of the load balancing loss for this step; the step's tokens.

        Megatron multiplies each micro-batch's loss by its tokens and would divide by all tokens of the step; here
        nothing is divided by Megatron, so the coefficient is.
        """
        local = sum(int(batch.lengths_B.sum()) for batch in micro_batches)
        tokens = max(1.0, self._sum_over_dp({"tokens": float(local)})["tokens"])
        self.raw[0].config.moe_aux_loss_coeff = self.spec.moe_aux_loss_coeff / tokens
        return tokens

    def _sum_over_dp(self, local: dict[str, float]) -> dict[str, float]:
        from megatron.core import parallel_state

        return ranks.summed(local, groups.device(), parallel_state.get_data_parallel_group())

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
        means = {n: value / total[n] for n, value in zip(names, first.tolist(), strict=True) if total[n]}
        loss = sum(f * means[n] for n, f in zip(names, coefficients.tolist(), strict=True) if n in means)
        return {**means, "loss": loss}

    def _update(self, loss: float) -> dict[str, float]:
        """Clip and step; the gradient norm, and with fp16 the loss scale and whether the step was skipped.

        Raises RunError, with the weights untouched, if the loss or the norm is not finite. With fp16 gradients that
        overflow are no error: the scale is lowered and the step skipped, until the scale cannot be lowered.
        """
        # What optimizer.step() does, in its parts: it would change the weights although the norm is not a number, and
        # computes no norm where clipping is off.
        from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

        scaled = self.spec.precision == "fp16"
        report = {"loss_scale": float(self.optimizer.get_loss_scale()), "skipped": 0.0} if scaled else {}
        overflow = bool(self.optimizer.prepare_grads())
        self.update_scale(overflow)
        if scaled and overflow and math.isfinite(loss) and report["loss_scale"] > optimizer.MIN_LOSS_SCALE:
            if not self.rank:
                console.say(
                    f"step {self.steps} skipped: gradients overflow at a loss scale of {report['loss_scale']:g}"
                )
            return {"grad_norm": 0.0, **report, "skipped": 1.0}
        norm = float(self.optimizer.get_grad_norm())
        if overflow or not (math.isfinite(loss) and math.isfinite(norm)):
            raise RunError(
                f"step {self.steps}: loss {loss:g}, gradient norm {norm:g}",
                hint="the weights are those of the step before; try a smaller --lr or --precision fp32",
            )
        parameters = self.optimizer.get_parameters()
        if self.spec.clip_grad and parameters:
            clip_grad_by_total_norm_fp32(parameters, max_norm=self.spec.clip_grad, total_norm=norm)
        self.optimizer.step_with_ready_grads()
        return {"grad_norm": norm, **report}


def _quiet() -> None:
    """megatron-core says at import what is not installed and at build that GPTModel is old; neither is news."""
    warnings.filterwarnings("ignore", module="megatron")
    logging.getLogger("megatron").setLevel(logging.ERROR)
