"""The settings of mst-train."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mst_core.runspec import RunSpec


class TrainSpec(RunSpec):
    """Train a language model on your rows."""

    stage: Literal["sft", "cpt"] = Field(
        "sft", description="sft: learn the assistant's turns of conversations; cpt: every token of documents"
    )
    packing: bool = Field(
        False, description="several samples in a row of --seq-length, kept apart exactly; batches count packed rows"
    )
