"""mst-train: which settings, which plan, which work."""

from __future__ import annotations

from mst_core.cli import run
from mst_train.spec import TrainSpec


def main() -> None:
    """Entry point of the console script."""
    run(
        {"train": (TrainSpec, "mst_train.plan:plan", "mst_train.work:work")},
        prog="mst-train",
        description="Train a language model on your rows.",
        default="train",
    )


if __name__ == "__main__":
    main()
