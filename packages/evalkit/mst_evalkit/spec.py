"""The settings of mst-eval."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from mst_core.spec import Spec

Task = Literal["choice", "perplexity", "reward"]
TASKS: tuple[Task, ...] = ("choice", "perplexity", "reward")


class EvalSpec(Spec):
    """Measure a checkpoint on rows."""

    model: str = Field(description="Hugging Face directory to measure, or hf://org/name@revision, ms://...")
    tasks: tuple[Task, ...] = Field(
        description="choice (is the right answer the likeliest?), perplexity (how likely are answers or texts?); of a "
        "reward model: reward (does the right answer score highest?)"
    )
    data: tuple[Path, ...] = Field(description="files of rows; each row goes to the task that its fields fit")
    out: Path = Field(description="the report directory that comes out")
    batch_size: int = Field(16, ge=1, description="rows per forward pass")
    precision: Literal["fp32", "bf16"] = Field("fp32", description="weights and arithmetic")
    seq_length: int | None = Field(
        None, ge=2, description="longest row in tokens (default: what the config allows); longer texts go in windows"
    )
    bad_rows: Literal["error", "skip"] = Field(
        "error", description="a row that cannot be used stops the run, or goes to rejected.jsonl"
    )

    @field_validator("tasks")
    @classmethod
    def _each_once(cls, value: tuple[Task, ...]) -> tuple[Task, ...]:
        if not value or len(set(value)) != len(value):
            raise ValueError("name each task once, and at least one")
        if "reward" in value and len(value) > 1:
            raise ValueError("reward is for reward models, which give tokens no probability: measure it alone")
        return tuple(task for task in TASKS if task in value)  # one order, so one id

    @field_validator("data")
    @classmethod
    def _some(cls, value: tuple[Path, ...]) -> tuple[Path, ...]:
        if not value:
            raise ValueError("name at least one file")
        return value
