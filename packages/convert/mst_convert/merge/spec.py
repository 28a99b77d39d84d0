"""The settings of mst-merge."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import ByteSize, Field, field_validator

from mst_core.spec import Spec


class MergeSpec(Spec):
    """Merge a LoRA adapter into its base."""

    model: str = Field(description="the base: a Hugging Face or a Megatron directory, or hf://org/name@revision")
    adapter: str = Field(description="the adapter in PEFT format: adapter_config.json, adapter_model.safetensors")
    out: Path = Field(description="the directory to write")
    to: Literal["hf"] = Field("hf", description="layout of the output")
    max_shard_size: ByteSize = Field(ByteSize(5_000_000_000), description="largest weight file, as 5GB or 500MB")
    tokenizer: Literal["base", "adapter"] | None = Field(
        None, description="whose tokenizer files to take; needed only where the two have different vocabularies"
    )

    @field_validator("max_shard_size")
    @classmethod
    def _not_empty(cls, value: ByteSize) -> ByteSize:
        if value < 1:
            raise ValueError("must be at least one byte")
        return value
