"""The learning rate of a step."""

from __future__ import annotations

import math
from typing import Literal


def warmup_steps(steps: int, fraction: float) -> int:
    """Steps of linear warmup: the fraction of all steps, rounded up."""
    return math.ceil(steps * fraction)


def lr(
    step: int, *, steps: int, peak: float, floor: float, warmup: int, schedule: Literal["cosine", "constant"]
) -> float:
    """The learning rate of step 0, 1, ... steps - 1.

    Warmup is linear and starts at peak / warmup (Hugging Face's starts at 0). Cosine then goes from the peak towards
    ``floor``, which the step after the last would have: so no step is wasted at zero.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    if schedule == "constant":
        return peak
    after = max(1, steps - warmup)
    return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / after)))
