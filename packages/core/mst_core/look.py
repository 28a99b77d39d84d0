"""The work of ``mst inspect``, ``mst verify`` and ``mst lineage``."""

from __future__ import annotations

from mst_core import checkpoint, console, hub, manifest
from mst_core import lineage as chain
from mst_core.cli_mst import InspectSpec, LineageSpec, LookPlan, VerifySpec
from mst_core.errors import InputError
from mst_core.manifest import short
from mst_core.spec import Result


def inspect(spec: InspectSpec, plan: LookPlan) -> Result:
    """What a directory holds, with or without a manifest."""
    directory = hub.resolve(spec.directory)
    made = manifest.identify(directory)
    lines = [f"{directory}", f"  {made.kind}, layout {made.layout}, {made.id}"]
    if made.model is not None:
        model = made.model
        tied = ", tied embeddings" if model.tied else ""
        lines.append(
            f"  {model.family} ({model.architecture}), {model.parameters:,} parameters, {model.dtype or 'dtype?'}{tied}"
        )
        lines.append("  " + " ".join(f"{name}={value}" for name, value in model.dims.items()))
    for name, value in made.encoding.items():
        lines.append(f"  {name}: {value}")
    made_by = made.made_by
    lines.append(
        f"  made by {made_by.tool} {made_by.version}" if made_by else "  not made by mst: the id is of its files"
    )
    lines += [f"  {parent.role}: {parent.id}{' (lossless)' if parent.lossless else ''}" for parent in made.parents]
    for entry in [*made.files, *made.attachments]:
        lines.append(f"  {entry.blake3[:12]}  {console.size(entry.bytes):>8}  {entry.path}")
    return Result(text="\n".join(lines), data={"id": made.id, **made.model_dump(mode="json")})


def verify(spec: VerifySpec, plan: LookPlan) -> Result:
    """Raises InputError with every problem found."""
    made = manifest.read(spec.directory)
    problems = checkpoint.verify(spec.directory)
    if problems:
        raise InputError("\n  ".join(["is not what its manifest says:", *problems]), where=spec.directory)
    count = len(made.files) + len(made.attachments)
    return Result(text=f"{spec.directory}: {count} files as the manifest says, {made.id}", data={"id": made.id})


def lineage(spec: LineageSpec, plan: LookPlan) -> Result:
    """The tree of parents."""
    lines, data = [], []
    for depth, link, made, identity in chain.walk(spec.directory):
        what = f"{made.kind} ({made.layout})" if made else "not kept here"
        by = f", {made.made_by.tool}" if made and made.made_by else ""
        role = f"{link.role}{', lossless' if link.lossless else ''}: " if link else ""
        lines.append(f"{'  ' * depth}{role}{short(identity)} {what}{by}")
        data.append({"depth": depth, "role": link.role if link else None, "id": identity})
    return Result(text="\n".join(lines), data={"lineage": data})
