"""Plots of a report, as PNG bytes. Their bytes are outside the report's id: matplotlib promises none."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

RIGHT, WRONG, LINE = "#2a9d8f", "#e76f51", "#264653"


def choice(found: Sequence[dict[str, Any]], figures: dict[str, Any]) -> bytes:
    """The margins as a histogram, right and wrong apart, and beside it the accuracy with its 95% interval."""
    figure = Figure(figsize=(9, 3.6), dpi=110, layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 1))
    margins = [row["margin"] for row in found]
    edges = _edges(margins)
    groups = [
        [margin for margin in margins if margin <= 0],
        [margin for margin in margins if margin > 0],
    ]
    labels = [f"wrong ({len(groups[0])})", f"right ({len(groups[1])})"]
    left.hist(groups, bins=edges, stacked=True, color=[WRONG, RIGHT], label=labels, edgecolor="white", linewidth=0.5)
    left.axvline(figures["margin"], color=LINE, linestyle="--", label=f"mean {figures['margin']:+.2f}")
    left.set(xlabel="log p(right) - log p(best wrong), nats", ylabel="rows", title="Margin")
    left.legend(frameon=False, fontsize=8)
    heights = [figures["accuracy"], figures["accuracy_norm"]]
    right.bar(["summed", "per token"], heights, color=[RIGHT, "#8ab8b3"], width=0.6)
    # A bar of error stays in the range that an accuracy has.
    reach = 1.96 * figures["accuracy_stderr"]
    below, above = min(reach, heights[0]), min(reach, 1 - heights[0])
    right.errorbar([0], heights[:1], yerr=[[below], [above]], color=LINE, capsize=4)
    right.axhline(figures["chance"], color="grey", linestyle=":", label="chance")
    for place, height in enumerate(heights):
        right.text(place, 0.02, f"{height:.1%}", ha="center", color="white", fontsize=9, fontweight="bold")
    right.set(ylim=(0, 1), title="Accuracy")
    right.legend(frameon=False, fontsize=8)
    return _png(figure)


def perplexity(found: Sequence[dict[str, Any]], figures: dict[str, Any]) -> bytes:
    """The rows' nll per token as a histogram."""
    figure = Figure(figsize=(9, 3.2), dpi=110, layout="constrained")
    axes = figure.subplots()
    each = [row["nll"] / row["tokens"] for row in found]
    axes.hist(each, bins=min(40, max(8, len(each) // 4)), color=RIGHT, edgecolor="white", linewidth=0.5)
    axes.axvline(figures["nll"], color=LINE, linestyle="--", label=f"over all tokens {figures['nll']:.3f}")
    axes.set(xlabel="negative log-likelihood per token, nats", ylabel="rows", title="Perplexity by row")
    axes.legend(frameon=False, fontsize=8)
    return _png(figure)


def _edges(margins: Sequence[float]) -> list[float]:
    """Bins of one width with 0 as an edge, so that no bar holds both right and wrong rows."""
    low, high = min(*margins, 0.0), max(*margins, 0.0)
    width = (high - low) / 30 or 1.0
    first, last = int(low // width), int(-(-high // width))
    return [place * width for place in range(first, max(last, first + 1) + 1)]


def _png(figure: Figure) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png", metadata={"Software": None})
    return file.getvalue()
