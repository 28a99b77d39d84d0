"""The settings of mst-align."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mst_core.runspec import RunSpec


class AlignSpec(RunSpec):
    """Align a language model with preferences."""

    method: Literal["dpo"] = Field("dpo", description="dpo: direct preference optimization")
    beta: float = Field(0.1, gt=0, allow_inf_nan=False, description="how strongly DPO holds to the reference")
