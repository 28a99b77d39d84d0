"""The settings of mst-convert adapter."""

from __future__ import annotations

from math import isfinite
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from mst_core.spec import Spec

Layout = Literal["peft", "megatron-bridge", "mcore-bridge"]
Form = Literal["fused", "separate"]
Experts = Literal["parameters", "modules"]


class AdapterSpec(Spec):
    """Convert a LoRA adapter between PEFT, Megatron-Bridge and mcore-bridge (ms-swift)."""

    model: str = Field(description="the adapter: a PEFT directory, or a torch_dist checkpoint of one of the bridges")
    to: Layout = Field(description="who reads the output")
    out: Path = Field(description="the directory to write")
    base: str | None = Field(
        None,
        description="the base model, for its config.json: a directory, or the file; not needed where the adapter has"
        " hf/config.json",
    )
    form: Form | None = Field(
        None,
        description="fused: q, k, v (and gate, up) get one A, block-diagonal where theirs differ; separate: an A each"
        " (PEFT, CanonicalLoRA). Without it megatron-bridge gets fused where all A are shared, peft what was there",
    )
    experts: Experts = Field(
        "parameters",
        description="--to peft: parameters, experts in one tensor and the router as transformers 5 has them"
        " (target_parameters), or modules, each expert's own as transformers 4 and ms-swift name them",
    )
    vocab_padding: int = Field(
        128,
        ge=1,
        description="--to megatron-bridge: the rows of an adapted head are padded with zeros to a multiple of this",
    )
    tp: int = Field(
        1, ge=1, description="tensor parallel size of the run that will load it, where its rows depend on that"
    )
    alpha: float | None = Field(None, description="lora_alpha, for a checkpoint of a bridge that does not say it")

    @model_validator(mode="after")
    def _each_flag_has_its_layout(self) -> Self:
        if self.to == "mcore-bridge" and self.form == "separate":
            raise ValueError("--form separate: mcore-bridge knows one A for q, k, v and one for gate, up")
        if self.to == "peft" and self.tp > 1:
            raise ValueError("--tp belongs to --to megatron-bridge or mcore-bridge: PEFT's files have no ranks")
        for name, to in (("experts", "peft"), ("vocab_padding", "megatron-bridge")):
            if name in self.model_fields_set and self.to != to:
                raise ValueError(f"--{name.replace('_', '-')} belongs to --to {to}")
        if self.alpha is not None and not (isfinite(self.alpha) and self.alpha > 0):
            raise ValueError("--alpha must be a finite number above 0")
        return self
