"""The settings of mst-merge."""

from __future__ import annotations

from math import isfinite
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import ByteSize, Field, field_validator, model_validator

from mst_core.spec import Spec


class MergeSpec(Spec):
    """Merge LoRA adapters into their base."""

    model: str = Field(description="the base: a Hugging Face or a Megatron directory, or hf://org/name@revision")
    adapter: tuple[str, ...] = Field(
        min_length=1,
        description="an adapter in PEFT format: adapter_config.json, adapter_model.safetensors; or several",
    )
    weights: tuple[float, ...] | None = Field(
        None, description="a factor for each adapter's delta, as 0.7,0.3; without it 1 each"
    )
    untie: bool = Field(False, description="write a tied head and its embedding apart: tie_word_embeddings false")
    out: Path = Field(description="the directory to write")
    to: Literal["hf", "megatron"] = Field("hf", description="layout of the output")
    max_shard_size: ByteSize = Field(
        ByteSize(5_000_000_000), description="--to hf: largest weight file, as 5GB or 500MB"
    )
    tokenizer: Literal["base", "adapter"] | None = Field(
        None, description="whose tokenizer files to take; needed only where the two have different vocabularies"
    )

    @field_validator("adapter", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return (str(value),) if isinstance(value, str | Path) else value

    @field_validator("weights", mode="before")
    @classmethod
    def _numbers(cls, value: Any) -> Any:
        """pydantic-settings hands on as text what JSON does not know: nan, inf."""
        return value.strip("[]").split(",") if isinstance(value, str) else value

    @model_validator(mode="after")
    def _weights_for_adapters(self) -> Self:
        if self.weights is not None and len(self.weights) != len(self.adapter):
            raise ValueError(f"--weights: {len(self.weights)} for {len(self.adapter)} adapters")
        if not all(weight and isfinite(weight) for weight in self.factors):
            raise ValueError("--weights: each must be a finite number other than 0")
        if self.to == "megatron" and "max_shard_size" in self.model_fields_set:
            raise ValueError("--max-shard-size belongs to --to hf")
        return self

    @property
    def factors(self) -> tuple[float, ...]:
        """The weight of each adapter."""
        return self.weights or (1.0,) * len(self.adapter)

    @field_validator("max_shard_size")
    @classmethod
    def _not_empty(cls, value: ByteSize) -> ByteSize:
        if value < 1:
            raise ValueError("must be at least one byte")
        return value
