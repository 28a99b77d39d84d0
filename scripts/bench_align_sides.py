"""The two sides of bench_align.py, in one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import bench_train_sides as sides
import torch
from bench_train import Turns
from torch import Tensor

from mst_align.pairs import objective
from mst_align.plan import plan
from mst_align.spec import AlignSpec
from mst_align.work import rows as load_rows
from mst_core import checkpoint
from mst_core.data.order import Order
from mst_core.data.render import Sample
from mst_core.engine import loop
from mst_core.engine.plain import PlainEngine

Pair = tuple[Sample, Sample]


@dataclass(frozen=True)
class Given(sides.Given):
    """What both sides work on, and whether ours is packed."""

    packing: bool


def both(turns: Turns, given: Given) -> sides.Found:
    """mst_core.engine.loop.fit and DPOTrainer.train on the same pairs."""
    spec = AlignSpec(
        model=str(given.model), data=(str(given.rows),), out=given.work / "out", cache=given.work / "cache",
        micro_batch=given.batch, global_batch=given.batch, seq_length=given.seq_length, bad_rows="skip",
        steps=given.steps, precision="fp32", lr=sides.LR, schedule="constant", warmup=0.0, packing=given.packing,
    )  # fmt: skip
    pairs = [tuple(ended(sample) for sample in pair) for pair in load_rows(spec, plan(spec))[0].samples]
    order = Order(len(pairs), spec.seed).batches(spec.global_batch)
    batches = [[pairs[index] for index in batch] for batch in islice(order, spec.steps)]
    tokens = sides.lengths([[sample for pair in batch for sample in pair] for batch in batches])
    found = sides.Found(tokens, tokens)
    engine = sides.watched(PlainEngine, turns, found, spec, given.model)
    with turns.beside(lambda: trl(given, batches, turns, found)), checkpoint.stage(spec.out) as staging:
        loop.fit(engine, objective(spec.chosen), pairs, spec, staging)
        turns.end(sides.OURS)
    return found


def ended(sample: Sample) -> Sample:
    """Without what the template writes after the end of the answer: TRL learns all that follows the prompt."""
    end = len(sample.mask) - sample.mask[::-1].index(1)
    return Sample(sample.tokens[:end], sample.mask[:end])


def trl(given: Given, batches: Sequence[Sequence[Pair]], turns: Turns, found: sides.Found) -> None:
    """TRL's DPOTrainer on ``batches``, which are tokens already."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import DPOConfig, DPOTrainer

    class Steps(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            turns.begin(sides.THEIRS)

        def on_train_end(self, *_: Any, **__: Any) -> None:
            turns.end(sides.THEIRS)

    class Told(DPOTrainer):
        def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
            return dataset

        def training_step(self, *args: Any, **options: Any) -> Tensor:
            loss: Tensor = super().training_step(*args, **options)
            found.their_losses.append(float(loss))
            return loss

    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32)
    model.get_input_embeddings().padding_idx = None  # as ours: the token that pads also ends a turn
    settings = DPOConfig(
        output_dir=str(given.work / "trl"), per_device_train_batch_size=given.batch, max_steps=given.steps,
        learning_rate=sides.LR, lr_scheduler_type="constant", adam_beta1=0.9, adam_beta2=0.95, adam_epsilon=1e-8,
        weight_decay=0.0, max_grad_norm=1.0, use_cpu=True, bf16=False, gradient_checkpointing=False, max_length=None,
        precompute_ref_log_probs=True, save_strategy="no", report_to="none", disable_tqdm=True,
        logging_strategy="no", train_sampling_strategy="sequential",
    )  # fmt: skip
    rows = Dataset.from_list([ids(pair) for batch in batches for pair in batch])
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    Told(model, None, settings, train_dataset=rows, processing_class=tokenizer, callbacks=[Steps()]).train()


def ids(pair: Pair) -> dict[str, list[int]]:
    """A pair as TRL's collator wants it."""
    begins = pair[0].mask.index(1)
    chosen, rejected = (sample.tokens for sample in pair)
    return {"prompt_ids": chosen[:begins], "chosen_ids": chosen[begins:], "rejected_ids": rejected[begins:]}
