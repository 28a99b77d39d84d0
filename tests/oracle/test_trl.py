"""SFT and DPO against TRL: the same rows through the real SFTTrainer and DPOTrainer, losses of the first steps.

The rows go in as a user has them, so TRL's rendering, masks and averaging are compared as well as its losses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from mst_align.methods import choose
from mst_align.pairs import objective as of_pairs
from mst_core.data import rows, shapes
from mst_core.data.render import Renderer, load_tokenizer
from mst_core.engine import loop
from mst_core.engine.plain import PlainEngine
from mst_core.engine.seam import Objective
from mst_core.runspec import RunSpec
from mst_train.objective import SFT

STEPS = 3
# No newline after the end of a turn: TRL learns what the template puts there, mst does not.
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
QUESTIONS = [f"{'very ' * (i % 3)}question number {i}, yes or no?" for i in range(8)]
YES, NO = "yes, it is the best answer", "no"


def user(i: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": QUESTIONS[i]}]


def says(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


SFT_ROWS = [{"prompt": user(i), "completion": says((YES, NO)[i % 2] + "." * i)} for i in range(8)]
PAIR_ROWS = [
    {"prompt": user(i), "chosen": says((YES, NO)[i % 2]), "rejected": says((NO, YES)[i % 2])} for i in range(8)
]


@pytest.fixture(scope="module")
def model(tiny_hf: Callable[..., Path]) -> Path:
    return tiny_hf("llama", template=TEMPLATE)


@pytest.fixture(scope="module")
def reference(tiny_hf: Callable[..., Path]) -> Path:
    """Another model, so that the first DPO loss is not ln 2 whatever the formula is."""
    return tiny_hf("llama", template=TEMPLATE, seed=1)


def renderer(model: Path) -> Renderer:
    return Renderer(load_tokenizer(model), 256)


def each(data: list[dict[str, Any]]) -> Iterator[rows.Row]:
    return (rows.Row("rows.jsonl", line, row) for line, row in enumerate(data, start=1))


def losses(
    model: Path, objective: Objective, units: list[loop.Unit], references: torch.Tensor | None = None
) -> list[dict[str, float]]:
    """Three steps of mst on all rows, in micro-batches of two."""
    spec = RunSpec(
        model=str(model), data=(Path("d"),), out=Path("o"), precision="fp32", lr=1e-3, warmup=0, schedule="constant",
        micro_batch=2, global_batch=8,
    )  # fmt: skip
    engine = PlainEngine(spec, model)
    return [engine.step(loop.micro_batches(units, engine, spec, references), objective, spec.lr) for _ in range(STEPS)]


def settings(folder: Path) -> dict[str, Any]:
    """TRL's arguments for the same optimizer."""
    return {
        "output_dir": str(folder), "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4,
        "max_steps": STEPS, "learning_rate": 1e-3, "lr_scheduler_type": "constant", "adam_beta2": 0.95,
        "logging_steps": 1, "save_strategy": "no", "report_to": [], "use_cpu": True, "bf16": False,
        "gradient_checkpointing": False, "max_length": 256, "disable_tqdm": True,
    }  # fmt: skip


def history(trainer: Any) -> list[dict[str, float]]:
    trainer.train()
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def load(model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)


def test_sft_losses_are_those_of_trl(model: Path, tmp_path: Path) -> None:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    trainer = SFTTrainer(
        load(model), SFTConfig(**settings(tmp_path)), train_dataset=Dataset.from_list(SFT_ROWS),
        processing_class=load_tokenizer(model),
    )  # fmt: skip
    make = renderer(model)
    units = [(sample,) for row in each(SFT_ROWS) for sample in make.samples(shapes.conversation(row), row.where)]
    theirs, ours = history(trainer), losses(model, SFT, units)
    assert [step["loss"] for step in ours] == pytest.approx([step["loss"] for step in theirs], abs=1e-5)
    assert [step["grad_norm"] for step in ours] == pytest.approx([step["grad_norm"] for step in theirs], rel=1e-4)


def test_dpo_losses_are_those_of_trl(model: Path, reference: Path, tmp_path: Path) -> None:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    trainer = DPOTrainer(
        load(model), load(reference), DPOConfig(**settings(tmp_path), beta=0.1),
        train_dataset=Dataset.from_list(PAIR_ROWS), processing_class=load_tokenizer(model),
    )  # fmt: skip
    make, objective = renderer(model), of_pairs(choose("dpo", {"beta": 0.1}))
    units = [make.pair(shapes.pair(row), row.where) for row in each(PAIR_ROWS)]
    spec = RunSpec(model=str(reference), data=(Path("d"),), out=Path("o"), precision="fp32")
    references = loop.refer(PlainEngine(spec, reference), objective, units, (), spec).logp_NR
    theirs, ours = history(trainer), losses(model, objective, units, references)
    assert abs(ours[0]["loss"] - 0.693147) > 1e-3
    for name, their_name in (
        ("loss", "loss"),
        ("rewards/chosen", "rewards/chosen"),
        ("rewards/rejected", "rewards/rejected"),
        ("rewards/margin", "rewards/margins"),
        ("rewards/accuracy", "rewards/accuracies"),
    ):
        assert [step[name] for step in ours] == pytest.approx([step[their_name] for step in theirs], abs=1e-5), name
