"""The command mst-eval."""

from mst_core.cli import run
from mst_evalkit.spec import EvalSpec


def main() -> None:
    """Entry point of ``mst-eval``."""
    run(
        {"eval": (EvalSpec, "mst_evalkit.plan:plan", "mst_evalkit.work:work")},
        prog="mst-eval",
        description="Measure a checkpoint on rows: choice accuracy and margin, perplexity.",
        default="eval",
    )


if __name__ == "__main__":
    main()
