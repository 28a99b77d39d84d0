"""What a run measured: metrics.jsonl, TensorBoard, and plots. Attachments of the output, outside its id."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any, Self

from mst_core import files
from mst_core.checkpoint import Staging
from mst_core.engine import reports
from mst_core.resume import HISTORY
from mst_core.runspec import RunSpec

LINES, REPORTS = "metrics.jsonl", "reports.json"
PLOTS: dict[str, dict[str, tuple[str, ...]]] = {
    "loss.png": {"loss": ("loss",)},
    "rewards.png": {
        "reward": ("rewards/chosen", "rewards/rejected"),
        "margin": ("rewards/margin",),
        "accuracy": ("rewards/accuracy", "logps/accuracy"),
        "KL (z)": ("kl",),
    },
}
"""The panels of each file, and what they show."""
COLOURS = {"rewards/chosen": "tab:green", "rewards/rejected": "tab:red", "logps/accuracy": "tab:gray"}
"""Others are matplotlib's."""
WINDOWS = 60
"""Lines are smoothed over one part in so many of their points, where that is two or more."""


class Metrics:
    """A context on rank 0: written as the run goes, drawn and attached when it ends well.

    With ``staging=None`` (the other ranks) nothing is written.
    """

    def __init__(self, staging: Staging | None, start: int = 0, spec: RunSpec | None = None) -> None:
        """``start``: the step that a resumed run goes on from; what was written of later ones is dropped. ``spec``: who
        --report-to names gets them too."""
        self._staging = staging
        self._reports: list[reports.Report] = []
        self._told = -1.0
        """The last step that the reports of a resumed run have: nothing is taken back from them, nothing sent twice."""
        self._board: Any = None
        if staging is not None:
            from torch.utils.tensorboard import SummaryWriter

            path = staging.path / LINES
            before = _rows(path) if start and path.is_file() else []
            kept = [row for row in before if row["step"] <= start]
            self._told = max((row["step"] for row in before), default=-1.0)
            self._file = path.open("w", encoding="utf-8")
            self._file.writelines(json.dumps(row) + "\n" for row in kept)
            self._board = SummaryWriter(str(staging.path / "tensorboard"), purge_step=start + 1 if start else None)
            if spec is not None and spec.report_to:
                self._reports = reports.start(spec, staging.path / REPORTS, resumed=start > 0)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """The values after a step (counted from 1; 0: before the first)."""
        if self._staging is None:
            return
        row = {"step": step, **values}
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        for name, value in values.items():
            self._board.add_scalar(name, value, step)
        for report in self._reports if step > self._told else ():
            report.log(values, step)

    def draw(self) -> None:
        """The plots as far as the run is."""
        if self._staging is not None:
            draw(_rows(self._staging.path / LINES), self._staging.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Close the files (after an error too: the writer's thread must not outlive the directory)."""
        if self._staging is None:
            return
        self._file.close()
        self._board.close()
        for report in self._reports:
            report.close()
        if kind is None:
            self._attach(self._staging)

    def _attach(self, staging: Staging) -> None:
        self.draw()
        for name in files.listing(staging.path):
            if name.startswith(HISTORY):
                staging.attach(name)


def _rows(path: Path) -> list[dict[str, float]]:
    """The whole lines of a metrics.jsonl; the last one may be torn."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("}\n")]


def draw(rows: list[dict[str, float]], folder: Path) -> None:
    """The plots that ``rows`` have values for."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    there = {name.removeprefix("eval/") for row in rows for name in row}
    for file, given in PLOTS.items():
        panels = {title: [name for name in names if name in there] for title, names in given.items()}
        panels = {title: names for title, names in panels.items() if names}
        if not panels:
            continue
        figure, axes = pyplot.subplots(len(panels), 1, figsize=(7, 0.6 + 2.6 * len(panels)), sharex=True, squeeze=False)
        for axis, (title, names) in zip(axes[:, 0], panels.items(), strict=True):
            for name in names:
                _curves(axis, rows, name)
            axis.set_ylabel(title)
            axis.grid(alpha=0.3)
            if title == "accuracy":
                axis.set_ylim(-0.04, 1.04)
            if len(axis.get_legend_handles_labels()[0]) > 1:
                axis.legend(frameon=False, fontsize="small")
        axes[-1, 0].set_xlabel("step")
        axes[-1, 0].xaxis.get_major_locator().set_params(integer=True)
        figure.align_ylabels()
        figure.tight_layout()
        figure.savefig(folder / file, dpi=120, metadata={"Software": None})
        pyplot.close(figure)


def _curves(axis: Any, rows: list[dict[str, float]], name: str) -> None:
    """One measure: of the steps a line, pale under its running mean where they are many; of the evaluations dashes."""
    colour = COLOURS.get(name)
    steps, values = _points(rows, name)
    if (width := len(steps) // WINDOWS) > 1:
        (line,) = axis.plot(steps, values, color=colour, alpha=0.25, linewidth=0.8)
        sums = [0.0, *accumulate(values)]
        means = [(sums[end] - sums[max(0, end - width)]) / min(end, width) for end in range(1, len(sums))]
        axis.plot(steps, means, color=line.get_color(), label=f"{name} (mean of {width})")
    elif steps:
        (line,) = axis.plot(steps, values, color=colour, marker="." if len(steps) == 1 else None, label=name)
    steps_measured, measured = _points(rows, f"eval/{name}")
    if steps_measured:
        own = line.get_color() if steps else colour
        axis.plot(steps_measured, measured, color=own, linestyle="--", marker="o", markersize=4, label=f"eval/{name}")


def _points(rows: list[dict[str, float]], name: str) -> tuple[list[float], list[float]]:
    found = [(row["step"], row[name]) for row in rows if name in row]
    return [step for step, _ in found], [value for _, value in found]
