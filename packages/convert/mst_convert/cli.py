"""mst-convert: which settings, which plan, which work."""

from __future__ import annotations

from mst_convert.adapters.spec import AdapterSpec
from mst_convert.families import FamiliesSpec
from mst_convert.spec import ConvertSpec
from mst_core.cli import run


def main() -> None:
    run(
        {
            "convert": (ConvertSpec, "mst_convert.plan:plan", "mst_convert.work:work"),
            "families": (FamiliesSpec, "mst_convert.families:plan", "mst_convert.families:work"),
            "adapter": (AdapterSpec, "mst_convert.adapters.plan:plan", "mst_convert.adapters.work:work"),
        },
        prog="mst-convert",
        description="Convert a checkpoint between Hugging Face and Megatron, or a GGUF file to Hugging Face."
        " For LoRA adapters: mst-convert adapter --help. The architectures: mst-convert families.",
        default="convert",
    )


if __name__ == "__main__":
    main()
