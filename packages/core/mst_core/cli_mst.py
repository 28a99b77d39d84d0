"""The command ``mst``: what belongs to checkpoints and not to one tool."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field
from pydantic_settings import CliPositionalArg

from mst_core.cli import run
from mst_core.spec import Plan, Settings


class InspectSpec(Settings):
    """What a checkpoint directory holds: model, layout, files, id."""

    directory: CliPositionalArg[str] = Field(description="a checkpoint directory, hf:// or ms:// name")


class VerifySpec(Settings):
    """Compare every file of a directory with its manifest."""

    directory: CliPositionalArg[Path] = Field(description="a directory made by an mst tool")


class LineageSpec(Settings):
    """The chain of parents a directory was made from."""

    directory: CliPositionalArg[Path] = Field(description="a checkpoint directory")


class LookPlan(Plan):
    """Nothing is written."""

    directory: str


def plan(spec: InspectSpec | VerifySpec | LineageSpec) -> LookPlan:
    """Looking needs no preparation."""
    return LookPlan(title="look", directory=str(spec.directory))


def main() -> None:
    """Entry point of the console script."""
    run(
        {
            "inspect": (InspectSpec, plan, "mst_core.look:inspect"),
            "verify": (VerifySpec, plan, "mst_core.look:verify"),
            "lineage": (LineageSpec, plan, "mst_core.look:lineage"),
        },
        prog="mst",
        description="Look at checkpoints of the mst tools.",
    )


if __name__ == "__main__":
    main()
