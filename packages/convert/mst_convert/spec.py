"""The settings of mst-convert."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import ByteSize, Field, model_validator

from mst_core.spec import Spec


class ConvertSpec(Spec):
    """Convert a checkpoint between layouts."""

    model: str = Field(description="a Hugging Face or Megatron directory, a .gguf file, or hf://org/name@revision")
    to: Literal["megatron", "hf"] = Field(description="layout of the output")
    out: Path = Field(description="the directory to write")
    dtype: Literal["bf16", "fp16", "fp32"] | None = Field(
        None, description="cast the weights (no longer lossless); without it they keep theirs, and a GGUF becomes bf16"
    )
    vocab_padding: int = Field(
        128, ge=1, description="--to megatron: pad the vocabulary with zero rows to a multiple of this"
    )
    max_shard_size: ByteSize = Field(
        ByteSize(5_000_000_000), description="--to hf: largest weight file, as 5GB or 500MB"
    )
    hf_config: Path | None = Field(
        None,
        description="--to hf: directory with config.json and tokenizer, for a Megatron checkpoint without hf/ in it",
    )

    @model_validator(mode="after")
    def _each_flag_has_its_layout(self) -> Self:
        if self.max_shard_size < 1:
            raise ValueError("--max-shard-size must be at least one byte")
        given = self.model_fields_set
        if self.to == "hf" and "vocab_padding" in given:
            raise ValueError("--vocab-padding belongs to --to megatron; on the way to hf the padding is cut off")
        if self.to == "megatron":
            for field in ("max_shard_size", "hf_config"):
                if field in given and getattr(self, field) is not None:
                    raise ValueError(f"--{field.replace('_', '-')} belongs to --to hf")
        return self

    def changing_bytes(self) -> dict[str, object]:
        """The settings for the manifest: those of the layout that is written."""
        return self.effective("hf_config", "max_shard_size" if self.to == "megatron" else "vocab_padding")
