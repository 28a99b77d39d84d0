"""mst-align: which settings, which plan, which work."""

from __future__ import annotations

from mst_align.head import HeadSpec
from mst_align.spec import AlignSpec
from mst_core.cli import run


def main() -> None:
    """Entry point of the console script."""
    run(
        {
            "align": (AlignSpec, "mst_align.plan:plan", "mst_align.work:work"),
            "head": (HeadSpec, "mst_align.head:plan", "mst_align.scalar_base:work"),
        },
        prog="mst-align",
        description="Align a language model with preferences. A scalar head for reward models: mst-align head --help.",
        default="align",
    )


if __name__ == "__main__":
    main()
