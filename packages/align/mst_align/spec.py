"""The settings of mst-align."""

from __future__ import annotations

from typing import Any, Self

from pydantic import Field, model_validator

from mst_align.methods import UNPAIRED, Average, Chosen, Method, PairLossName, choose
from mst_core.runspec import RunSpec

METHOD = ("loss", "beta", "label_smoothing", "gamma", "sft_weight", "sft_average", "ld_alpha",
          "desirable_weight", "undesirable_weight", "center_rewards_coefficient")  # fmt: skip
"""Settings that some methods read; None where they are not given."""


class AlignSpec(RunSpec):
    """Align a language model with preferences."""

    method: Method = Field(
        "dpo",
        description="of pairs: dpo; without a reference orpo, simpo, cpo; of single answers with a label: kto, "
        "apo-zero-unpaired; rm: a reward model of pairs",
    )
    reference: str | None = Field(
        None,
        description="dpo, kto, apo-zero-unpaired: the model to compare with, with the tokenizer of --model (default: "
        "--model as it comes in)",
    )
    loss: PairLossName | None = Field(None, description="dpo: which of its losses (default: sigmoid)")
    beta: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="how strongly the reference holds; orpo: weight of the odds ratio (default: 0.1; simpo: 2)",
    )
    label_smoothing: float | None = Field(
        None,
        ge=0,
        lt=0.5,
        description="dpo sigmoid, cpo: share of labels that are wrong, conservatively; dpo robust: exactly (default: "
        "0; robust: 0.1)",
    )
    gamma: float | None = Field(
        None, allow_inf_nan=False, description="simpo: the margin that is asked for, not times beta (default: 1)"
    )
    sft_weight: float | None = Field(
        None, ge=0, allow_inf_nan=False,
        description="pairs: weight of the chosen answers' own loss (RPO) (default: 0; orpo, cpo: 1)",
    )  # fmt: skip
    sft_average: Average | None = Field(
        None,
        description="its mean: over all tokens, or over answers of their means (default: token; orpo: sequence)",
    )
    ld_alpha: float | None = Field(
        None, ge=0, le=1, description="dpo: what tokens count beyond the length of the shorter answer (LD-DPO)"
    )
    desirable_weight: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="single answers: weight of good ones (default: 1)"
    )
    undesirable_weight: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="single answers: weight of bad ones (default: 1)"
    )
    center_rewards_coefficient: float | None = Field(
        None, ge=0, allow_inf_nan=False, description="rm: weight of (r_chosen + r_rejected)^2 (default: 0)"
    )

    @model_validator(mode="after")
    def _method(self) -> Self:
        if self.chosen.method == "kto" and self.global_batch < 2:
            raise ValueError("--method kto needs a --global-batch of 2 or more: it compares each row with another")
        if self.method == "rm" and self.truncate == "right":
            raise ValueError("--truncate right cuts the token whose score --method rm learns: prompt-left, or error")
        if self.reference is not None and not self.chosen.needs_reference:
            raise ValueError(f"--reference means nothing to --method {self.method}, which compares with no other model")
        if self.reference is not None and self.add_tokens:
            raise ValueError("--reference and --add-tokens: the reference has no probability for new tokens")
        return self

    @property
    def chosen(self) -> Chosen:
        """The method with its settings in effect."""
        given: dict[str, Any] = {name: getattr(self, name) for name in METHOD}
        return choose(self.method, {name: value for name, value in given.items() if value is not None})

    @property
    def unpaired(self) -> bool:
        """Are the rows single answers?"""
        return self.method in UNPAIRED
