"""The methods, which settings each reads, and what those are when they are not given.

A setting that a method does not read is an error, not silence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Method = Literal["dpo", "kto", "apo-zero-unpaired", "orpo", "simpo", "cpo", "rm"]
PairLossName = Literal["sigmoid", "robust", "ipo", "hinge", "sigmoid-norm", "apo-zero", "apo-down", "bco"]
Average = Literal["token", "sequence"]

UNPAIRED = ("kto", "apo-zero-unpaired")
"""Methods of single answers that are good or bad."""
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "dpo": {"loss": "sigmoid", "beta": 0.1, "sft_weight": 0.0, "sft_average": "token", "ld_alpha": None},
    "kto": {"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0},
    "apo-zero-unpaired": {"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0},
    "orpo": {"beta": 0.1, "sft_weight": 1.0, "sft_average": "sequence"},
    "simpo": {"beta": 2.0, "gamma": 1.0, "sft_weight": 0.0, "sft_average": "token"},
    "cpo": {"beta": 0.1, "label_smoothing": 0.0, "sft_weight": 1.0, "sft_average": "token"},
    "rm": {"center_rewards_coefficient": 0.0},
}
"""What each method reads, and its values if they are not given."""
SMOOTHED: Mapping[str, float] = {"sigmoid": 0.0, "robust": 0.1}
"""The losses of DPO that read label_smoothing."""
BY_LENGTH = ("ipo", "sigmoid-norm", "simpo", "orpo")
"""Losses of the mean over an answer's tokens, of which the rewards are made then."""


@dataclass(frozen=True)
class Chosen:
    """A method with its settings."""

    method: Method
    beta: float = 0.0
    loss: str = ""
    label_smoothing: float = 0.0
    gamma: float = 0.0
    sft_weight: float = 0.0
    sft_average: Average = "token"
    ld_alpha: float | None = None
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    center_rewards_coefficient: float = 0.0

    def told(self) -> dict[str, Any]:
        """What the method reads, by the names of the settings."""
        read = {*DEFAULTS[self.method], *(("label_smoothing",) if self.loss in SMOOTHED else ())}
        return {name: getattr(self, name) for name in sorted(read)}

    @property
    def name(self) -> str:
        """Of the objective, and of its loss in the metrics."""
        return self.method if self.loss in ("", "sigmoid") else f"{self.method}-{self.loss}"

    @property
    def needs_reference(self) -> bool:
        return self.method in ("dpo", *UNPAIRED)

    @property
    def by_length(self) -> bool:
        return (self.loss or self.method) in BY_LENGTH


def choose(method: Method, given: Mapping[str, Any]) -> Chosen:
    """The settings in effect of a method, ``given`` those that were set. ValueError for one that it does not read."""
    read = dict(DEFAULTS[method])
    if method == "dpo":
        loss = given.get("loss", read["loss"])
        if loss in SMOOTHED:
            read["label_smoothing"] = SMOOTHED[loss]
    what = f"--method {method}" + (f" --loss {given['loss']}" if method == "dpo" and "loss" in given else "")
    for name in given:
        if name not in read:
            flags = ", ".join(f"--{other.replace('_', '-')}" for other in read)
            raise ValueError(f"--{name.replace('_', '-')} means nothing to {what}, which reads {flags}")
    chosen = Chosen(method, **{**read, **given})
    if "sft_average" in given and not chosen.sft_weight:
        raise ValueError("--sft-average needs --sft-weight above 0")
    return chosen
