"""Forward and backward of one step through Megatron's schedules, and the log-probabilities that cross the seam.

The last pipeline stage turns its vocabulary-parallel logits into per-token log-probabilities (fp32, over the tensor
parallel ranks), calls the objective and scales each term by its weight over the whole global step. Megatron's own
divisions (by micro-batches, tokens, ranks) are off: calculate_per_token_loss without a token count.

Shapes: B sequences, T tokens of the batch, S = T padded for the layout, C = S / cp (cut.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mst_core.engine.batches import in_a_row, positions, spread
from mst_core.engine.megatron import groups
from mst_core.engine.megatron.cut import Cut
from mst_core.engine.seam import Batch, Objective
from mst_core.errors import SettingsError

LastStage = Callable[[Tensor, Batch], tuple[Tensor, Any]]


def mask_padding(model: Any, vocab: int) -> None:
    """Give the padded rows of the vocabulary probability 0: their logits become -inf on the rank that has them.

    Without this each zero row adds exp(0) to the softmax.
    """
    from megatron.core import parallel_state

    if not model.post_process:
        return
    rows = model.vocab_size // parallel_state.get_tensor_model_parallel_world_size()
    real = max(0, vocab - parallel_state.get_tensor_model_parallel_rank() * rows)
    if real >= rows:
        return

    def hide(module: torch.nn.Module, args: Any, output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        logits, bias = output
        # The largest negative number, not -inf: a rank whose rows are all padding still has a finite maximum.
        logits[..., real:] = torch.finfo(logits.dtype).min
        return logits, bias

    model.output_layer.register_forward_hook(hide)


def forward_logp(model: Any, batch: Batch, cut: Cut, shape: tuple[int, int] | None) -> Tensor:
    """This stage's forward pass. On the last stage -logp of the next token, (B, C), or of a reward model the score at
    each; else the hidden states.

    It is 0 for tokens that are not learnt: their logits, often the largest tensor of a step, are never made, where the
    cut allows. ``shape``: see Cut.shape. The samples of a packed row are told to attention and positions (Megatron's
    thd).
    """
    tokens_BS = cut.pad(batch.tokens_BT, shape)
    packing = None if batch.packed is None else _segments(batch.packed[0], tokens_BS)
    positions_BS = torch.arange(tokens_BS.shape[1], device=tokens_BS.device).expand_as(tokens_BS)
    labels_BS = tokens_BS.roll(-1, dims=1)  # the last column is wrapped around and dropped by logp_of
    process: Callable[..., Tensor] | None = None
    if cut.scores:
        process = _scores
    elif cut.learnt:
        process = partial(_learnt, learnt_BS=cut.mine(cut.pad(batch.mask_BT, shape).roll(-1, dims=1) != 0))
    return model(
        input_ids=cut.mine(tokens_BS),
        position_ids=cut.mine(positions_BS),
        attention_mask=None,
        labels=cut.mine(labels_BS),
        output_processor=process,
        packed_seq_params=packing,
        padding_mask=_padding(model, cut.mine(~_within(batch, cut, shape)), cut) if cut.balance else None,
    )


def _segments(sizes: tuple[int, ...], tokens_1S: Tensor) -> Any:
    """The samples of a row; what pads it is one too."""
    from megatron.core.packed_seq_params import PackedSeqParams

    lengths = [length for length in (*sizes, tokens_1S.shape[1] - sum(sizes)) if length]
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=tokens_1S.device)
    most = max(lengths)
    return PackedSeqParams("thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=most, max_seqlen_kv=most)


def _within(batch: Batch, cut: Cut, shape: tuple[int, int] | None) -> Tensor:
    """(B, S) bool: real tokens."""
    within_BT = torch.arange(batch.tokens_BT.shape[1], device=batch.tokens_BT.device) < batch.lengths_B[:, None]
    return cut.pad(within_BT, shape)


def _padding(model: Any, padding_BC: Tensor, cut: Cut) -> Tensor:
    """Padding as routers want it: for sequence parallelism Megatron cuts it, but on the first stage only."""
    from megatron.core import parallel_state
    from megatron.core.utils import get_attr_wrapped_model

    if cut.learnt or get_attr_wrapped_model(model, "pre_process"):
        return padding_BC
    rank, size = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )
    return padding_BC.chunk(size, dim=1)[rank]


def _learnt(
    *,
    learnt_BS: Tensor,
    hidden_states: Tensor,
    output_layer: Any,
    output_weight: Tensor | None,
    labels: Tensor,
    compute_language_model_loss: Callable[[Tensor, Tensor], Tensor],
    **_: object,
) -> Tensor:
    """GPTModel's end, for the positions before a learnt token only: -logp, (B, S), 0 elsewhere."""
    length, batch, _hidden = hidden_states.shape
    chosen_N = learnt_BS.t().flatten().nonzero().flatten()
    if not len(chosen_N):
        chosen_N = chosen_N.new_zeros(1)  # every rank must take part in the backward pass; the mask makes it 0
    hidden_N1H = hidden_states.flatten(0, 1)[chosen_N].unsqueeze(1)
    logits_N1V, _bias = output_layer(hidden_N1H, weight=output_weight)
    loss_N = compute_language_model_loss(labels.t().flatten()[chosen_N].unsqueeze(0), logits_N1V).flatten()
    return loss_N.new_zeros(length * batch).index_copy(0, chosen_N, loss_N).view(length, batch).t()


def _scores(*, hidden_states: Tensor, output_layer: Any, **_: object) -> Tensor:
    """GPTModel's end in a reward model: the score at each token, (B, C). The head is whole on every tensor parallel
    rank, so each needs all tokens, and finds their whole gradient."""
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

    if output_layer.sequence_parallel:
        hidden_states = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=False)
    scores_BC: Tensor = output_layer(hidden_states).squeeze(-1).t()
    return scores_BC


def logp_of(output_BC: Tensor, batch: Batch, cut: Cut) -> Tensor:
    """logp_BT (of a reward model value_BT) of the last stage's output, on every context parallel rank."""
    rows, length = batch.tokens_BT.shape
    output_BS = cut.whole(output_BC.float())
    if cut.scores:
        return output_BS[:rows, :length]
    first_B1 = torch.zeros_like(output_BS[:rows, :1])
    logp_BT = torch.cat([first_B1, -output_BS[:rows, : length - 1]], dim=1)
    return logp_BT if batch.packed is None else logp_BT.masked_fill(positions(batch).to(logp_BT.device) == 0, 0.0)


def run(
    chunks: Sequence[Any], batches: Sequence[Batch], last_stage: LastStage, *, forward_only: bool, cut: Cut
) -> list[Any]:
    """Megatron's schedule over the micro-batches.

    last_stage   (logp_BT, batch) -> (scaled loss, what to keep); called on the last stage only

    Returns what it kept, a list in the order of ``batches`` on the last stage and empty elsewhere.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    flat = cut.flat or any(batch.packed is not None for batch in batches)
    laid = [in_a_row(batch) if flat else (batch, None) for batch in batches]
    rows = [row for row, _ in laid]
    shape = cut.shape(rows)
    if flat and cut.cp > 1:
        raise SettingsError("--packing under --cp is not there yet", hint="--cp 1")
    # An interleaved pipeline takes its micro-batches in groups: the last is repeated, and counts for nothing.
    filler = replace(rows[-1], lengths_B=torch.zeros_like(rows[-1].lengths_B))
    given = list(enumerate([*rows, *[filler] * (-len(rows) % cut.group)]))
    kept: dict[int, Any] = {}

    def step(iterator: Iterator[tuple[int, Batch]], chunk: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
        number, row = next(iterator)
        row = on_device(row)

        def loss(output_BC: Tensor) -> Any:
            if number < len(batches):
                logp_BT, (_, places_N) = logp_of(output_BC, row, cut), laid[number]
                if places_N is not None:
                    logp_BT = spread(logp_BT, places_N, batches[number].tokens_BT.shape)
                value, kept[number] = last_stage(logp_BT, on_device(batches[number]))
            else:
                value = output_BC.sum() * 0
            return value, torch.tensor(0, dtype=torch.int), None

        return forward_logp(chunk, row, cut, shape), loss

    height, length = shape or rows[0].tokens_BT.shape
    iterators = [iter(given) for _ in chunks]
    get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=list(chunks),
        num_microbatches=len(given),
        seq_length=length,
        micro_batch_size=height,
        forward_only=forward_only,
    )
    return [kept[number] for number in sorted(kept)]


def train(
    chunks: Sequence[Any], batches: Sequence[Batch], objective: Objective, total: dict[str, float], cut: Cut
) -> dict[str, Tensor]:
    """Forward and backward. Returns each term's local sum and coefficient, (2,), on the last stage; else nothing."""
    sums: dict[str, Tensor] = {}

    def last_stage(logp_BT: Tensor, batch: Batch) -> tuple[Tensor, None]:
        terms = objective.loss(logp_BT, batch)
        for name, term in terms.items():
            coefficient = torch.tensor(term.coefficient, dtype=torch.float64)
            known = sums.get(name, torch.zeros(2, dtype=torch.float64))
            sums[name] = torch.stack([known[0] + term.sum.detach().double().cpu(), coefficient])
        parts = [t.coefficient * t.sum / total[n] for n, t in terms.items() if t.coefficient and total[n]]
        return torch.stack(parts).sum() if parts else logp_BT.sum() * 0, None

    run(chunks, batches, last_stage, forward_only=False, cut=cut)
    return sums


def score(chunks: Sequence[Any], batch: Batch, cut: Cut) -> Tensor:
    """logp_BT (fp32, CPU) on every rank of the model parallel group."""
    from megatron.core import parallel_state

    with torch.no_grad():
        kept = run(chunks, [batch], lambda logp_BT, _: (logp_BT.sum(), logp_BT), forward_only=True, cut=cut)
    found_BT = kept[0].contiguous() if kept else torch.empty(batch.tokens_BT.shape, dtype=torch.float32)
    found_BT = found_BT.to(groups.device())
    group = parallel_state.get_pipeline_model_parallel_group()
    dist.broadcast(found_BT, parallel_state.get_pipeline_model_parallel_last_rank(), group)
    return found_BT.cpu()


def logits(model: Any, batch: Batch, vocab: int) -> Tensor | None:
    """logits_BTV (fp32) on the last stage, None elsewhere; what oracles compare and no objective ever sees."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def step(iterator: Iterator[Batch], chunk: Any) -> tuple[Tensor, Callable[..., Any]]:
        part = on_device(next(iterator))
        positions_BT = torch.arange(part.tokens_BT.shape[1], device=part.tokens_BT.device).expand_as(part.tokens_BT)
        out = chunk(input_ids=part.tokens_BT, position_ids=positions_BT, attention_mask=None)
        return out, lambda found, non_loss_data=False: found[..., :vocab].float()

    with torch.no_grad():
        kept = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter([batch]),
            model=[model],
            num_microbatches=1,
            seq_length=batch.tokens_BT.shape[1],
            micro_batch_size=batch.tokens_BT.shape[0],
            forward_only=True,
            collect_non_loss_data=True,
        )
    return kept[0] if kept else None


def on_device(batch: Batch) -> Batch:
    """The batch where this rank computes."""
    device = groups.device()
    extra = {name: value.to(device) for name, value in batch.extra.items()}
    tokens_BT, mask_BT, lengths_B = (part.to(device) for part in (batch.tokens_BT, batch.mask_BT, batch.lengths_B))
    return replace(batch, tokens_BT=tokens_BT, mask_BT=mask_BT, lengths_B=lengths_B, extra=extra)
