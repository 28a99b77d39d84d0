"""Convert: compare what must be equal, copy the recipe into a staged directory, read it back, commit."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from blake3 import blake3

from mst_convert import copying, verifying
from mst_convert.accounts import CASTS
from mst_convert.copying import Copying, Sources
from mst_convert.plan import CARRIED, ConvertPlan
from mst_convert.sources import Source
from mst_convert.spec import ConvertSpec
from mst_convert.targets import Target
from mst_core import checkpoint, console, files, manifest, torch_dist, untrusted
from mst_core.blocks import Array
from mst_core.checkpoint import Staging
from mst_core.errors import InputError, MstError
from mst_core.manifest import Parent
from mst_core.spec import Result
from mst_core.tensors import TORCH_NAMES
from mst_core.version import VERSION

TOOL = "mst-convert"


def work(spec: ConvertSpec, plan: ConvertPlan) -> Result:
    """Do what ``plan`` says."""
    if plan.layout == "gguf":
        from mst_convert.gguf_work import convert

        return convert(spec, plan)
    source, target = plan.read, plan.made
    if source is None or target is None:
        raise MstError("the plan holds no files to write")
    check_replicas(source)
    parent, parent_dirs = parent_of(source, plan.lossless)
    settings = spec.changing_bytes()
    mark = blake3(json.dumps([VERSION, parent.id, settings], sort_keys=True).encode()).hexdigest()
    with checkpoint.stage(spec.out, spec.overwrite, keep=_resumed if spec.resume else None) as staging:
        with console.progress("converting", target.nbytes, "B") as bar:
            copy = Copying(target.recipe, staging, spec.workers, bar.advance, mark, spec.resume)
            copy.run()
        for name, content in target.last().items():
            staging.write(name, content)
        carried = carried_files(source, spec.dtype or written_dtype(source))
        if spec.to == "hf":
            write_files(staging, carried)
        else:
            torch_dist.write_megatron_sidecar(staging, carried)
        report = verifying.settle(copy, source, target) | verifying.verify(spec, source, target, staging)
        verifying.write_report(staging, report)
        made = staging.commit(
            kind="model",
            layout=spec.to,
            encoding=_encoding(spec, source, target),
            model=source.model.info(TORCH_NAMES[target.wanted[0][1]]),
            parents=[parent],
            parent_dirs=parent_dirs,
            tool=TOOL,
            settings=settings,
            notes={**report, "left_out": plan.left_out},
        )
    console.say(
        f"{report['sources']} source tensors used once, {report['elements']:,} elements written once,"
        f" {manifest.short(made.id)}"
    )
    data = {"out": str(spec.out), "id": made.id, "lossless": plan.lossless, **report}
    return Result(text=str(spec.out), data=data)


def _resumed(staged: Path) -> Collection[str]:
    return {copying.JOURNAL, *copying.read_journal(staged / copying.JOURNAL)} - {copying.MARK}


def _encoding(spec: ConvertSpec, source: Source, target: Target) -> dict[str, Any]:
    """What the layout leaves open."""
    kept: dict[str, Any] = {"dialect": source.dialect} if source.dialect else {}
    if spec.to == "hf":
        return kept
    if source.copies:
        kept["duplicates"] = list(source.copies)
    common = {
        "vocab_padding": spec.vocab_padding,
        "vocab_rows": source.model.dims.vocab + target.padding_rows,
        "vocab_fill": "zeros",
        **kept,
    }
    if spec.to == "megatron-legacy":
        sizes = {"tp": spec.tp, "pp": spec.pp, "vp": spec.vp, "ep": spec.ep}
        return {"spec": spec.spec, "experts": spec.experts, **sizes, **common}
    return {"spec": spec.spec, "form": target.form, **common}


def check_replicas(source: Source) -> None:
    """What is there twice must be there twice the same, or something would be lost. Compared piece by piece."""
    reading = Sources()
    step = copying.PIECE
    for copy, original in source.replicas:
        for start in range(0, copy.nbytes, step):
            size = min(step, copy.nbytes - start)
            if _bytes(reading, copy, start, size) != _bytes(reading, original, start, size):
                raise InputError(
                    f"{copy.name} differs from {original.name}, which it should be a copy of",
                    where=copy.place.file if copy.place else None,
                    hint="if a tied head was trained apart, set tie_word_embeddings to false in config.json; else one"
                    " of the two is damaged",
                )
    reading.close()


def _bytes(reading: Sources, array: Array, start: int, size: int) -> bytearray:
    data = bytearray(size)
    reading.read(array, start, memoryview(data))
    return data


def written_dtype(source: Source) -> str | None:
    """The one dtype of all weights, or None where they differ."""
    dtypes = {dtype for found in source.dtypes.values() for dtype in found}
    return next((name for name, cast in CASTS.items() if dtypes == {cast}), None)


def carried_files(source: Source, dtype: str | None) -> dict[str, Path | bytes]:
    """config.json and the files that travel with it; config.json is rewritten only where it names another dtype."""
    carried: dict[str, Path | bytes] = {
        name: source.hf_dir / name for name in ("config.json", *CARRIED) if (source.hf_dir / name).is_file()
    }
    for name in carried:
        untrusted.regular(source.hf_dir / name, source.hf_dir)  # a link out would carry a file of this machine along
    changed = dict(source.config)
    named = source.config.get("dtype", source.config.get("torch_dtype"))
    if (dtype is not None and source.layout != "hf") or (dtype is not None and dtype != written_dtype(source)):
        cast = TORCH_NAMES[CASTS[dtype or "fp32"]]
        if named is not None and named != cast:
            key = "dtype" if "dtype" in source.config else "torch_dtype"
            changed |= {key: cast}
    if changed != source.config or source.quantised:  # what was quantised is so no more, and source.config says so
        carried["config.json"] = (json.dumps(changed, indent=2, ensure_ascii=False) + "\n").encode()
    return carried


def write_files(staging: Staging, carried: dict[str, Path | bytes]) -> None:
    """Small files beside the weights."""
    for name, origin in carried.items():
        if isinstance(origin, bytes):
            staging.write(name, origin)
        else:
            staging.copy(origin, name)


def parent_of(source: Source, lossless: bool, role: manifest.Role = "source") -> tuple[Parent, list[Path]]:
    """The source as a parent. A Megatron directory that mst did not write is named by its files' hashes."""
    if source.parent is None and source.layout != "hf":
        entries = [(path.name, files.hash_file(path)[1]) for path in source.weight_files()]
        digest = files.group_digest(entries)
        return Parent(role=role, id=f"blake3:{digest}", weights=digest, lossless=lossless), []
    made = manifest.identify(source.directory)
    return Parent(role=role, id=made.id, weights=made.digests.weights, lossless=lossless), [source.directory]
