"""The two sides of each case of bench_train.py, in one process."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import bench
import torch
from bench_train import Turns
from torch import Tensor

from mst_core import checkpoint
from mst_core.data.order import Order
from mst_core.data.render import Sample
from mst_core.engine import loop
from mst_core.engine.batches import Singles, collate
from mst_core.engine.plain import PlainEngine
from mst_core.engine.seam import Batch, Engine, Objective
from mst_train.objective import CPT, SFT
from mst_train.plan import plan
from mst_train.spec import TrainSpec
from mst_train.work import rows as load_rows

OURS, THEIRS = "ours", "theirs"
LR = 1e-5


@dataclass(frozen=True)
class Given:
    """What a case works on."""

    model: Path
    rows: Path
    work: Path
    batch: int
    seq_length: int
    steps: int


@dataclass
class Found:
    """What both sides did, a value for each step: tokens that are no padding, losses, seconds inside our engine."""

    tokens: list[int]
    their_tokens: list[int]
    losses: list[float] = field(default_factory=list)
    their_losses: list[float] = field(default_factory=list)
    inside: list[float] = field(default_factory=list)


def spec_of(given: Given, **more: Any) -> TrainSpec:
    """The settings of both sides."""
    fields = {
        "micro_batch": given.batch, "global_batch": given.batch, "seq_length": given.seq_length, "truncate": "right",
        "steps": given.steps, "precision": "fp32", "lr": LR, "schedule": "constant", "warmup": 0.0,
        "cache": given.work / "cache", **more,
    }  # fmt: skip
    return TrainSpec(model=str(given.model), data=(str(given.rows),), out=given.work / "out", **fields)


def samples_of(spec: TrainSpec) -> Any:
    """The rows as mst-train makes them."""
    return load_rows(spec, plan(spec))[0]


def batches_of(samples: Sequence[Sample], spec: TrainSpec) -> list[list[Sample]]:
    """The steps' samples, in the order of loop.fit."""
    order = Order(len(samples), spec.seed).batches(spec.global_batch)
    return [[samples[index] for index in batch] for batch in islice(order, spec.steps)]


def lengths(batches: Sequence[Sequence[Sample]]) -> list[int]:
    """Tokens of each step."""
    return [sum(len(sample.tokens) for sample in batch) for batch in batches]


def watched(kind: type[Any], turns: Turns, found: Found, spec: TrainSpec, model: Path) -> Engine:
    """An engine that waits for its turn at each step, and tells how long it was inside."""

    class Watched(kind):
        def step(self, micro_batches: Sequence[Batch], objective: Objective, lr: float) -> dict[str, float]:
            turns.begin(OURS)
            begun = time.process_time()
            values: dict[str, float] = super().step(micro_batches, objective, lr)
            found.inside.append(time.process_time() - begun)
            found.losses.append(values["loss"])
            return values

    engine: Engine = Watched(spec, model)
    return engine


def fit(engine: Engine, objective: Objective, samples: Sequence[Sample], spec: TrainSpec, turns: Turns) -> None:
    """Our loop, as mst-train calls it."""
    with checkpoint.stage(spec.out) as staging:
        loop.fit(engine, objective, Singles(samples), spec, staging)
        turns.end(OURS)


def padded(turns: Turns, given: Given) -> Found:
    """The plain engine and Trainer on the same padded rows."""
    spec = spec_of(given)
    samples = samples_of(spec).samples
    batches = batches_of(samples, spec)
    found = Found(lengths(batches), lengths(batches))
    engine = watched(PlainEngine, turns, found, spec, given.model)  # before: loading is not safe beside another
    with turns.beside(lambda: trainer(given, batches, turns, found)):
        fit(engine, SFT, samples, spec, turns)
    return found


def packed(turns: Turns, given: Given) -> Found:
    """The plain engine on packed rows, and Trainer on padded ones; about as many tokens a step."""
    theirs = batches_of(samples_of(spec_of(given)).samples, spec_of(given))
    tokens = sum(lengths(theirs)) / len(theirs)
    loaded = samples_of(spec_of(given))
    loaded.pack(given.seq_length, 0)
    fill = sum(len(sample.tokens) for sample in loaded.samples) / len(loaded.samples)
    rows = max(1, round(tokens / fill))
    spec = spec_of(given, packing=True, micro_batch=rows, global_batch=rows)
    ours = batches_of(loaded.samples, spec)
    found = Found(lengths(ours), lengths(theirs))
    engine = watched(PlainEngine, turns, found, spec, given.model)
    with turns.beside(lambda: trainer(given, theirs, turns, found)):
        fit(engine, SFT, loaded.samples, spec, turns)
    found.losses = found.their_losses = []  # of other rows
    return found


def compiled(turns: Turns, given: Given) -> Found:
    """The plain engine with --compile, and without."""
    spec = spec_of(given, compile=True)
    samples = samples_of(spec).samples
    batches = batches_of(samples, spec)
    found = Found(lengths(batches), lengths(batches))
    plain, engine = PlainEngine(spec_of(given), given.model), watched(PlainEngine, turns, found, spec, given.model)

    def without() -> None:
        for batch in batches:
            turns.begin(THEIRS)
            found.their_losses.append(plain.step([collate(batch)], SFT, LR)["loss"])
        turns.end(THEIRS)

    with turns.beside(without):
        fit(engine, SFT, samples, spec, turns)
    return found


def trainer(given: Given, batches: Sequence[Sequence[Sample]], turns: Turns, found: Found) -> None:
    """transformers' Trainer on ``batches``, the loss on the same tokens."""
    from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

    class Steps(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            turns.begin(THEIRS)

        def on_train_end(self, *_: Any, **__: Any) -> None:
            turns.end(THEIRS)

    class Told(Trainer):
        def training_step(self, *args: Any, **options: Any) -> Tensor:
            loss: Tensor = super().training_step(*args, **options)
            found.their_losses.append(float(loss))
            return loss

    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32)
    model.get_input_embeddings().padding_idx = None  # as ours: the token that pads also ends a turn
    model.config.use_cache = False
    settings = TrainingArguments(
        output_dir=str(given.work / "trainer"), per_device_train_batch_size=given.batch, max_steps=given.steps,
        learning_rate=LR, lr_scheduler_type="constant", adam_beta1=0.9, adam_beta2=0.95, adam_epsilon=1e-8,
        weight_decay=0.0, max_grad_norm=1.0, use_cpu=True, save_strategy="no", report_to="none", disable_tqdm=True,
        remove_unused_columns=False, logging_strategy="no", train_sampling_strategy="sequential",
    )  # fmt: skip
    rows = [sample for batch in batches for sample in batch]
    Told(model, settings, data_collator=labelled, train_dataset=rows, callbacks=[Steps()]).train()


def labelled(rows: list[Sample]) -> dict[str, Tensor]:
    """Rows padded to the longest, as transformers wants them."""
    batch = collate(rows)
    within_BT = torch.arange(batch.tokens_BT.shape[1]) < batch.lengths_B[:, None]
    labels_BT = batch.tokens_BT.masked_fill(batch.mask_BT == 0, -100)
    return {"input_ids": batch.tokens_BT, "attention_mask": within_BT.long(), "labels": labels_BT}


def megatron(turns: Turns, given: Given) -> Found:
    """The megatron engine, and megatron-core's own parts in a loop; TP1, PP1, rows of one length, all learnt."""
    from mst_core.engine.megatron.engine import MegatronEngine

    bench.world_of_one()
    rows = max(1, given.batch // 4)  # full ones
    spec = spec_of(given, stage="cpt", engine="megatron", micro_batch=rows, global_batch=rows)
    generator = torch.Generator().manual_seed(0)
    count = rows * given.steps
    vocab = json.loads((given.model / "config.json").read_text())["vocab_size"]
    tokens = torch.randint(0, vocab, (count, given.seq_length), generator=generator).tolist()
    samples = [Sample(row, [1] * given.seq_length) for row in tokens]
    batches = batches_of(samples, spec)
    found = Found(lengths(batches), lengths(batches))
    engine = watched(MegatronEngine, turns, found, spec, given.model)
    with turns.beside(lambda: bare(engine, spec, batches, turns, found)):
        fit(engine, CPT, samples, spec, turns)
    engine.close()
    return found


def bare(engine: Any, spec: TrainSpec, batches: Sequence[Sequence[Sample]], turns: Turns, found: Found) -> None:
    """What Megatron-LM's training does in a step, and nothing else: the same modules, loaded from the same weights."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from mst_core.engine.megatron import model as models

    source = engine.source
    settings = source.family.megatron(source.config, str(source.hf))
    built = models.build(settings, spec, source.vocab_rows(1))
    source.load(built)
    config = built[0].config
    config.calculate_per_token_loss = False
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), built[0])
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam", lr=LR, weight_decay=0.0, adam_beta1=0.9, adam_beta2=0.95, adam_eps=1e-8, clip_grad=1.0
        ),
        [ddp],
        use_gloo_process_groups=False,
    )
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss

    def forward(iterator: Iterator[Batch], chunk: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
        batch = next(iterator)
        places_BT = torch.arange(batch.tokens_BT.shape[1]).expand_as(batch.tokens_BT)
        mask_BT = batch.mask_BT.roll(-1, 1)

        def loss_of(loss_BT: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            loss = (loss_BT * mask_BT).sum() / mask_BT.sum()
            return loss, {"loss": loss.detach()}

        return chunk(batch.tokens_BT, places_BT, None, labels=batch.tokens_BT.roll(-1, 1)), loss_of

    run = get_forward_backward_func()
    for rows in batches:
        turns.begin(THEIRS)
        ddp.train()
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        told = run(
            forward_step_func=forward, data_iterator=iter([collate(rows)]), model=[ddp], num_microbatches=1,
            seq_length=spec.seq_length, micro_batch_size=len(rows), forward_only=False,
        )  # fmt: skip
        optimizer.step()
        found.their_losses.append(float(told[0]["loss"]))
    turns.end(THEIRS)


CASES: dict[str, Callable[[Turns, Given], Found]] = {
    "padded": padded, "packed": packed, "compiled": compiled, "megatron": megatron,
}  # fmt: skip
