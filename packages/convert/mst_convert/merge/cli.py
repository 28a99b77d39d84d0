"""mst-merge: which settings, which plan, which work."""

from __future__ import annotations

from mst_convert.merge.spec import MergeSpec
from mst_core.cli import run


def main() -> None:
    run(
        {"merge": (MergeSpec, "mst_convert.merge.plan:plan", "mst_convert.merge.work:work")},
        prog="mst-merge",
        description="Merge LoRA adapters (PEFT format) into their base, a Hugging Face or Megatron directory.",
        default="merge",
    )


if __name__ == "__main__":
    main()
