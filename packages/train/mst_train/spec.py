"""The settings of mst-train."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from mst_core.runspec import RunSpec


class TrainSpec(RunSpec):
    """Train a language model on your rows."""

    stage: Literal["sft", "cpt"] = Field(
        "sft", description="sft: learn the assistant's turns of conversations; cpt: every token of documents"
    )
    packing: bool = Field(
        False, description="several samples in a row of --seq-length, kept apart exactly; batches count packed rows"
    )
    truncate: Literal["error", "right"] = Field("error", description="a longer row is refused, or cut at its right end")
    clean: str | None = Field(
        None, description="of --stage cpt: remove documents by a template, web or a YAML file; see removed.jsonl"
    )

    @model_validator(mode="after")
    def _cleans_documents(self) -> Self:
        if self.clean is not None and self.stage != "cpt":
            raise ValueError("--clean is for documents: --stage cpt")
        return self
