"""What is looked at before an output appears: the files read back, the way back, or the logits of both sides."""

from __future__ import annotations

import json
from typing import Any

from mst_convert import logits, targets, training_state
from mst_convert.copying import Copying
from mst_convert.reading import Sources, stretches
from mst_convert.sources import Source
from mst_convert.spec import ConvertSpec
from mst_convert.targets import Target
from mst_core import console, files
from mst_core.blocks import Array, Block, Side, moves
from mst_core.checkpoint import Staging
from mst_core.errors import MstError, RunError
from mst_core.families import Task

REPORT = "convert.json"


def settle(copy: Copying, source: Source, target: Target) -> dict[str, Any]:
    """Every source array used, every element moved once: the counts, or MstError if they do not add up."""
    blocks = {task.native: source.side(task).blocks for task in source.tasks}
    arrays = {block.array.name for found in blocks.values() for block in found}
    native = sum(block.rows * block.columns for found in blocks.values() for block in found)
    duplicates = source.model.duplicates()
    if target.recipe.copies:
        sizes = {spec.name: spec.rows * spec.columns for task in source.tasks for spec in task.hf}
        native += sum(sizes[duplicates[copied]] for copied in target.recipe.copies)
    short = copy.moved < native if target.repeats else copy.moved != native
    if short or copy.used != arrays:
        missing = sorted(arrays ^ copy.used)
        raise MstError(
            f"{copy.moved} of {native} elements were moved, {len(missing)} source tensors are not accounted for"
            + (f", like {missing[0]}" if missing else "")
        )
    return {"sources": source.tensors, "arrays": len(arrays), "elements": copy.moved}


def verify(spec: ConvertSpec, source: Source, target: Target, staging: Staging) -> dict[str, Any]:
    """Do what ``--verify`` asks for. RunError, before anything appears, if the output is not what it should be."""
    if spec.verify == "none":
        return {"verified": "none"}
    names = [file.name for file in target.recipe.files]
    sizes = {name: staging.entry(name) for name in names}
    with console.progress("verifying", sum(entry.bytes for entry in sizes.values()), "B") as bar:
        for name, entry in sizes.items():
            if files.hash_stored(staging.path / name) != (entry.bytes, entry.blake3):
                raise RunError(
                    f"{name} is not what was written: the disk or the memory is damaged", hint="convert to another disk"
                )
            bar.advance(entry.bytes)
    found: dict[str, Any] = {"verified": "hash", "files": len(names)}
    if spec.verify == "roundtrip":
        found |= {"verified": "roundtrip", "equal_elements": _round_trip(spec, source, staging)}
    if spec.verify == "logits":
        found |= {"verified": "logits", "logits": logits.compare(spec, source, target, staging)}
    return found


def write_report(staging: Staging, report: dict[str, Any]) -> None:
    """convert.json: what was counted and verified; beside the manifest's id, for it holds no weights."""
    (staging.path / REPORT).write_text(json.dumps(report, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    staging.attach(REPORT)


def _round_trip(spec: ConvertSpec, source: Source, staging: Staging) -> int:
    """Read every native matrix from both sides and compare; returns how many elements were equal (all)."""
    from mst_convert.plan import open_source

    written = open_source(staging.path, spec.to)
    if source.kept:
        written = training_state.carry(written, source.carried_rows)
    reading, total = Sources(), 0
    with console.progress("comparing", len(source.tasks), "tensor") as bar:
        for task in source.tasks:
            dtype = targets.dtype_of(source, task, spec.dtype)
            ours, theirs = (_matrix(side, task, dtype, reading) for side in (written.side(task), source.side(task)))
            for mine, its in zip(ours, theirs, strict=True):
                if mine != its:
                    raise RunError(f"{task.native} does not come back as it was: please report this")
            total += task.rows * task.columns
            bar.advance(1)
    reading.close()
    return total


def _matrix(side: Side, task: Task, dtype: str, reading: Sources) -> Any:
    array = Array(task.native, dtype, task.rows, task.columns)
    found = moves([Block(0, task.rows, 0, task.columns, array)], side)
    return stretches(array, found, reading)
