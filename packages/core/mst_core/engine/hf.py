"""What the engines on transformers models share: plain, fsdp and deepspeed differ only in how ranks hold the weights.

Parameters and optimizer are fp32; ``--precision bf16`` is autocast of the forward pass over them (DeepSpeed has bf16
weights and fp32 copies instead). AdamW is decoupled
(Loshchilov and Hutter, arXiv 1711.05101); matrices are decayed, norms and biases (one axis) are not, which is also
Megatron's rule. Gradients are clipped by their global norm as Megatron does it: times clip / (norm + 1e-6) if below 1.

Shapes: B sequences, T tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.utils.logging import disable_progress_bar

from mst_core import devices, families, runplan, tensors, vocabulary
from mst_core.checkpoint import TOKENIZER_FILES, Staging
from mst_core.engine import lora, quantised, scalar
from mst_core.engine.batches import in_a_row, positions, spread
from mst_core.engine.samples import Samples
from mst_core.engine.seam import Batch, Objective, weights
from mst_core.engine.stored import units
from mst_core.errors import InputError, MissingPackage, RunError
from mst_core.runspec import RunSpec


def token_logp(logits_BTV: Tensor, tokens_BT: Tensor) -> Tensor:
    """logp_BT, fp32: the log-probability of each token given those before it; 0 for the first."""
    return _aligned(_picked(logits_BTV.flatten(0, 1), tokens_BT.roll(-1, 1).flatten()).view(tokens_BT.shape))


def _picked(logits_NV: Tensor, tokens_N: Tensor) -> Tensor:
    """logp_N, fp32, of one token at each position."""
    return -F.cross_entropy(logits_NV.float(), tokens_N, reduction="none")


def _placed(value_N: Tensor, wanted_N: Tensor, tokens_BT: Tensor) -> Tensor:
    """value_BT of the values at ``wanted_N``, 0 elsewhere."""
    return value_N.new_zeros(tokens_BT.numel()).index_copy(0, wanted_N, value_N).view(tokens_BT.shape)


def _aligned(next_BT: Tensor) -> Tensor:
    """From the log-probability of the token after each position to that of the token at it."""
    return torch.cat([torch.zeros_like(next_BT[:, :1]), next_BT[:, :-1]], dim=1)


def _check_compiler() -> None:
    from torch._inductor import cpp_builder, exc

    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler as error:
        raise MissingPackage("--compile needs a C++ compiler", hint="install g++, or leave --compile out") from error


class HFEngine:
    """One transformers model, whole on this rank until a subclass shards it. See seam.Engine for the methods.

    A subclass says how ranks agree (``_sum``, ``agree``), where gradients come together (``_backward``, ``_norm``), and
    what a whole parameter is (``_whole``).
    """

    rank = 0
    dp_rank = 0
    dp_size = 1
    optimizer: Any

    def __init__(self, spec: RunSpec, model_dir: Path) -> None:
        if not (model_dir / "config.json").is_file():
            hint = f"mst-convert --model {model_dir} --to hf --out {model_dir}-hf, or --engine megatron"
            raise InputError(f"the {self._name()} engine eats a Hugging Face directory", where=model_dir, hint=hint)
        torch.manual_seed(spec.seed)
        self.spec, self.model_dir = spec, model_dir
        self.stored = tensors.headers(model_dir)
        self.device = torch.device(devices.best())
        self.steps = 0
        self.isolates = False
        disable_progress_bar()
        self.scores = families.is_classifier(tensors.config(model_dir))
        loader = AutoModelForSequenceClassification if self.scores else AutoModelForCausalLM
        model = loader.from_pretrained(
            model_dir,
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=False,
            **quantised.options(spec, self.device),
        )
        quantised.settle(model, model_dir)
        model.config.use_cache = False
        # transformers keeps the gradient from the embedding of the padding token. That token is often the end of a turn
        # as well, padding is never learnt here, and no other engine has such an exception.
        model.get_input_embeddings().padding_idx = None
        if self.scores:
            scalar.per_token(model)
        blocks = set(model._no_split_modules or ())
        self.samples = Samples.of(model) if spec.packing else None
        if spec.lora_rank is not None:
            self.known = runplan.open_model(model_dir, "hf")
            self.sites = runplan.check_lora(self.known, spec)
            self.rows = lora.token_rows(self.known, vocabulary.added(model_dir)[1]) if spec.add_tokens else None
            model = lora.wrap(model, spec, self.known, self.sites, self.rows)
        else:
            self.units = units(model_dir, self.stored, model)
        self.model: Any = model.eval()  # dropout is off everywhere
        if spec.compile:
            _check_compiler()
        self.layers = [module for module in model.modules() if type(module).__name__ in blocks]
        for layer in self.layers:
            if spec.compile:
                layer.forward = torch.compile(layer.forward, dynamic=True)  # once for all layers and lengths
            if spec.recompute:
                # transformers' own switch does nothing in eval mode.
                layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        self.wanted_N: Tensor | None = None
        inner: Any = self.model.get_base_model() if spec.lora_rank is not None else self.model
        self.head = inner.score if self.scores else inner.get_output_embeddings()
        if self.head is not None:
            self.head.register_forward_pre_hook(self._only_wanted)

    @property
    def trained(self) -> list[tuple[str, torch.nn.Parameter]]:
        """The parameters that learn, by name."""
        return [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]

    def step(self, micro_batches: Sequence[Batch], objective: Objective, lr: float) -> dict[str, float]:
        """One optimizer step over ``micro_batches``, those of this data parallel rank."""
        self.steps += 1
        total = self._sum(weights(objective, micro_batches))
        found: dict[str, list[Tensor]] = {name: [] for name in total}
        coefficients: dict[str, float] = {}
        self._zero_grad()
        for number, batch in enumerate(micro_batches, 1):
            terms = objective.loss(self._logp(batch), self._on_device(batch))
            parts = [t.coefficient * t.sum / total[n] for n, t in terms.items() if t.coefficient and total[n]]
            if parts:
                self._backward(torch.stack(parts).sum(), last=number == len(micro_batches))
            for name, term in terms.items():
                found[name].append(term.sum.detach())
                coefficients[name] = term.coefficient
        # Asked once, after the last micro-batch: a device need not be waited for before.
        sums = self._sum({name: sum(torch.stack(parts).tolist()) for name, parts in found.items()})
        means = {name: sums[name] / total[name] for name in sums if total[name]}
        means["loss"] = sum(coefficients[name] * mean for name, mean in means.items())
        means["grad_norm"] = self._update(means["loss"], lr)
        return means

    @torch.no_grad()
    def score(self, batch: Batch, *, reference: bool = False) -> Tensor:
        """logp_BT, fp32 on the CPU."""
        if reference and self.spec.lora_rank is not None:
            with self.model.disable_adapter():
                return self._logp(batch).cpu()
        return self._logp(batch).cpu()

    def total(self, value: float) -> float:
        """Summed over the data parallel ranks."""
        return self._sum({"value": value})["value"]

    def agree(self, value: int) -> int:
        """There is one rank."""
        return value

    def save(self, staging: Staging | None) -> None:
        """A Hugging Face directory, or a PEFT adapter. Every rank calls it; rank 0 writes, tensor by tensor."""
        if self.spec.lora_rank is not None:
            held = {lora.peft_name(name): self._whole(p) for name, p in self.trained}
            if staging is not None:
                lora.save_adapter(staging, held, lora.config_of(self.spec, self.known, self.sites, self.rows))
                if self.rows:
                    self._copy(staging, TOKENIZER_FILES)
            return
        state = self.model.state_dict(keep_vars=True)
        refs = [ref for unit in self.units for ref in unit.refs]
        writer = tensors.write_hf(staging, [(ref.name, ref.dtype, ref.shape) for ref in refs]) if staging else None
        for unit in self.units:
            whole = [self._whole(state[name]).detach() for name in unit.names]
            if writer is None:
                continue
            for ref, tensor in zip(unit.refs, unit.stored(whole), strict=True):
                # A bf16 model stays bf16: one rounding of the fp32 weights.
                writer.put(ref.name, tensor.to("cpu", tensors.torch_dtype(ref.dtype)).contiguous())
        if staging is not None and writer is not None:
            writer.finish()
            self._copy(staging, ("config.json", "generation_config.json", *TOKENIZER_FILES))

    def _copy(self, staging: Staging, names: Sequence[str]) -> None:
        for name in names:
            if (self.model_dir / name).is_file():
                staging.copy(self.model_dir / name, name)

    def close(self, *, stay: bool = False) -> None:
        """Nothing to leave."""

    @classmethod
    def _name(cls) -> str:
        return cls.__name__.removesuffix("Engine").lower()

    def _groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups: matrices are decayed."""
        matrices = [p for _, p in self.trained if p.ndim >= 2]
        others = [p for _, p in self.trained if p.ndim < 2]
        groups = ((matrices, self.spec.weight_decay), (others, 0.0))
        return [{"params": found, "weight_decay": decay} for found, decay in groups if found]

    def _adamw(self, kind: Any = torch.optim.AdamW, **options: Any) -> Any:
        spec = self.spec
        betas = (spec.adam_beta1, spec.adam_beta2)
        return kind(self._groups(), lr=spec.lr, betas=betas, eps=spec.adam_eps, **options)

    def _on_device(self, batch: Batch) -> Batch:
        extra = {name: value.to(self.device) for name, value in batch.extra.items()}
        return replace(
            batch,
            tokens_BT=batch.tokens_BT.to(self.device),
            mask_BT=batch.mask_BT.to(self.device),
            lengths_B=batch.lengths_B.to(self.device),
            extra=extra,
        )

    def _logp(self, batch: Batch) -> Tensor:
        """logp_BT (of a reward model value_BT) of a batch on the CPU. 0 where nothing is learnt: logits, often the
        largest tensor of a step, are made for learnt tokens only, where the model has a head."""
        if self.spec.packing or batch.packed is not None:
            self._check_isolation()
        if self.samples is None:
            if self.spec.packing and batch.packed is None:
                kind = type(self.model).__name__
                what = f"{kind} has an attention of its own: --packing cannot take its padding away"
                raise InputError(what, where=self.model_dir, hint="without --packing")
            return self._logp_of(batch)
        row, places_N = in_a_row(batch)
        return spread(self._logp_of(row), places_N, batch.tokens_BT.shape)

    def _logp_of(self, batch: Batch) -> Tensor:
        tokens_BT, positions_BT = batch.tokens_BT.to(self.device), None
        if batch.packed is not None:
            positions_BT = positions(batch).to(self.device)
            if self.samples is not None:
                (self.samples.sizes,) = batch.packed
        if self.head is None:
            logp_BT = token_logp(self._logits(tokens_BT, positions_BT), tokens_BT)
            return logp_BT if positions_BT is None else logp_BT.masked_fill(positions_BT == 0, 0.0)
        self.wanted_N = wanted_N = self._wanted(batch).to(self.device)
        try:
            logits_NV = self._logits(tokens_BT, positions_BT).squeeze(0)
        finally:
            self.wanted_N = None
        if self.scores:
            return _placed(logits_NV.squeeze(-1), wanted_N, tokens_BT)
        logp_N = _picked(logits_NV, tokens_BT.roll(-1, 1).flatten()[wanted_N])
        return _aligned(_placed(logp_N, wanted_N, tokens_BT))

    def _wanted(self, batch: Batch) -> Tensor:
        """Where, in B * T, the head is asked: before a learnt token, a reward model's at it. One place at least: every
        rank takes part in a backward pass."""
        asked_BT = batch.mask_BT if self.scores else batch.mask_BT.roll(-1, 1)
        wanted_N = (asked_BT != 0).flatten().nonzero().flatten()
        return wanted_N if len(wanted_N) else wanted_N.new_zeros(1)

    def _only_wanted(self, head: torch.nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Before the head: the hidden states of the wanted positions only, (1, N, H)."""
        if self.wanted_N is None:
            return None
        return (given[0].flatten(0, 1)[self.wanted_N].unsqueeze(0), *given[1:])

    @torch.no_grad()
    def _check_isolation(self) -> None:
        """Refuse a model that does not keep packed samples apart, once.

        samples.py does it; for an attention that is not torch's SDPA, transformers by the positions that begin again
        (masking_utils.find_packed_sequence_indices). What carries a state along the row (Mamba, linear attention) does
        not.
        """
        if self.isolates:
            return
        self.isolates = True
        tokens_BT = torch.tensor([[5, 6, 7, 8, 3, 4, 5, 6], [9, 3, 5, 4, 3, 4, 5, 6]], device=self.device)
        positions_1T = torch.arange(4, device=self.device).repeat(1, 2)
        if self.samples is not None:
            self.samples.sizes = (4, 4)
        seen: list[Tensor] = []  # what the head is given: one that is all zero would tell nothing
        hook = self.head and self.head.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
        logits = [self._logits(row_1T, positions_1T) for row_1T in tokens_BT.split(1)]
        if hook:
            hook.remove()
        one_SH, other_SH = (found[0, 4:].float() for found in seen or logits)
        if float((one_SH - other_SH).abs().max()) > 0.01 * float(one_SH.std()):
            kind = type(self.model).__name__
            raise InputError(
                f"{kind} does not keep packed samples apart", where=self.model_dir, hint="without --packing"
            )

    def _logits(self, tokens_BT: Tensor, positions_BT: Tensor | None = None) -> Tensor:
        # Attention is causal and padding stands on the right: no real token sees it, so no mask is needed.
        half = self.spec.precision == "bf16"
        # The cache of casted weights is of no use to one forward pass, and would keep gathered weights alive.
        with torch.autocast(self.device.type, torch.bfloat16, enabled=half, cache_enabled=False):
            logits_BTV: Tensor = self.model(input_ids=tokens_BT, position_ids=positions_BT, use_cache=False).logits
        return logits_BTV

    def _sum(self, values: dict[str, float]) -> dict[str, float]:
        """Each value summed over the data parallel ranks."""
        return values

    def _zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def _backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradient of a micro-batch. ``last``: no other follows in this step."""
        loss.backward()

    def _whole(self, parameter: Tensor) -> Tensor:
        """A parameter as fp32 and whole; collective where ranks hold parts."""
        return parameter

    def _local(self, tensor: Tensor) -> Tensor:
        """What this rank holds of a parameter, a gradient or a moment."""
        return tensor

    def _norm(self, grads: list[Tensor]) -> float:
        """The norm of all ranks' gradients, of which ``grads`` are this rank's parts."""
        return float(torch.stack(torch._foreach_norm(grads)).norm()) if grads else 0.0

    def _check(self, loss: float, norm: float) -> None:
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise RunError(
                f"step {self.steps}: loss {loss:g}, gradient norm {norm:g}",
                hint="the weights are those of the step before; try a smaller --lr or --precision fp32",
            )

    def _update(self, loss: float, lr: float) -> float:
        """Clip and step; the norm before clipping. Raises RunError, with the weights untouched, if not finite."""
        grads = [self._local(p.grad) for _, p in self.trained if p.grad is not None]
        norm = self._norm(grads)
        self._check(loss, norm)
        if self.spec.clip_grad and (scale := self.spec.clip_grad / (norm + 1e-6)) < 1:
            torch._foreach_mul_(grads, scale)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        return norm
