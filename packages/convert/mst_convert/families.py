"""mst-convert families: the architectures that are known, and how each is proved."""

from __future__ import annotations

from mst_core.families import FAMILIES, PROOFS, Family
from mst_core.spec import Plan, Result, Settings


class FamiliesSpec(Settings):
    """List the architectures that can be converted, and what each is proved by."""


class FamiliesPlan(Plan):
    """Nothing is written."""


def plan(spec: FamiliesSpec) -> FamiliesPlan:
    """Listing needs no preparation."""
    return FamiliesPlan(title="families")


def work(spec: FamiliesSpec, plan: FamiliesPlan) -> Result:
    """The table."""
    rows = [{"family": f.name, "architecture": f.architecture, "proof": PROOFS[f.name]} for f in FAMILIES]
    return Result(text=table(FAMILIES), data={"families": rows})


def table(families: tuple[Family, ...]) -> str:
    """The table as Markdown, which is read well in a terminal too."""
    rows = [("architecture", "family", "proved by"), *((f.architecture, f.name, PROOFS[f.name]) for f in families)]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)
