"""What a run measured: metrics.jsonl, TensorBoard, and loss.png. Attachments of the output, outside its id."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from mst_core import files
from mst_core.checkpoint import Staging
from mst_core.engine import reports
from mst_core.resume import HISTORY
from mst_core.runspec import RunSpec

LINES, PLOT, REPORTS = "metrics.jsonl", "loss.png", "reports.json"


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
        """loss.png as far as the run is."""
        if self._staging is not None:
            draw(_rows(self._staging.path / LINES), self._staging.path / PLOT)

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


def draw(rows: list[dict[str, float]], path: Path) -> None:
    """The loss over the steps, and the rewards' accuracy below it where there is one."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels: list[tuple[str, ...]] = [("loss", "eval/loss")]
    if any("rewards/accuracy" in row for row in rows):
        panels.append(("rewards/accuracy",))
    figure, axes = pyplot.subplots(len(panels), 1, figsize=(7, 3.2 * len(panels)), sharex=True, squeeze=False)
    for axis, names in zip(axes[:, 0], panels, strict=True):
        for name in names:
            points = [(row["step"], row[name]) for row in rows if name in row]
            if points:
                dots = "o" if len(points) < 40 else None
                axis.plot(*zip(*points, strict=True), marker=dots, markersize=3, label=name)
        axis.set_ylabel(names[0])
        axis.grid(alpha=0.3)
        axis.legend(frameon=False)
    axes[-1, 0].set_xlabel("step")
    figure.tight_layout()
    figure.savefig(path, dpi=120, metadata={"Software": None})
    pyplot.close(figure)
