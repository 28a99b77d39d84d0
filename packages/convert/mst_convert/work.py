"""Convert: compare what must be equal, copy the recipe into a staged directory, read it back, commit."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from blake3 import blake3

from mst_convert import copying, reading, verifying
from mst_convert.accounts import CASTS
from mst_convert.copying import Copying
from mst_convert.plan import CARRIED, ConvertPlan
from mst_convert.reading import Sources
from mst_convert.recipe import Recipe
from mst_convert.sources import Source
from mst_convert.spec import STAGES, ConvertSpec
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
    part, parts = spec.parts
    check_replicas(source)
    keep = _kept if spec.resume else None
    with checkpoint.stage(spec.out, spec.overwrite, keep=keep, shared=parts > 1) as staging:
        mark, journals = _mark(spec, source), _journals(spec)
        mine = Recipe(target.recipe.files[part - 1 :: parts], target.recipe.moves, target.recipe.copies)
        with console.progress("converting", target.nbytes // parts, "B") as bar:
            copy = Copying(
                mine, staging, spec.workers, bar.advance, mark, journals[:1], resume=spec.resume or parts > 1
            )
            copy.run()
        if parts > 1:
            written = [*journals, *(file.name for file in target.recipe.files)]
            if not _all_there(target, staging, journals) or not staging.take_over(written):
                return Result(text=f"{spec.out}: part {spec.part} is done", data={"out": str(spec.out), "part": part})
            copy = Copying(target.recipe, staging, 1, lambda _: None, mark, journals, resume=True)
            copy.run()  # every file is there: it is entered and counted
        if _mark(spec, source) != mark:
            what = "changed while it was converted, so what was written may be of two models"
            raise InputError(what, where=source.directory, hint="convert it again when nobody writes to it")
        return _finish(spec, plan, source, target, staging, copy)


def _finish(
    spec: ConvertSpec, plan: ConvertPlan, source: Source, target: Target, staging: Staging, copy: Copying
) -> Result:
    """The weights are written: what belongs beside them, the verification, the manifest."""
    parent, parent_dirs = parent_of(source, plan.lossless)
    for name, content in target.last().items():
        staging.write(name, content)
    carried = carried_files(source, spec.dtype or written_dtype(source))
    if spec.to == "hf":
        write_files(staging, carried)
    else:
        torch_dist.write_megatron_sidecar(staging, carried, target.tracker)
    report = verifying.settle(copy, source, target) | verifying.verify(spec, source, target, staging)
    verifying.write_report(staging, report)
    for journal in _journals(spec):
        (staging.path / journal).unlink()
    made = staging.commit(
        kind=source.model.kind,
        layout=spec.to,
        encoding=_encoding(spec, source, target),
        model=source.model.info(TORCH_NAMES[target.wanted[0][1]]),
        parents=[parent],
        parent_dirs=parent_dirs,
        tool=TOOL,
        settings=spec.changing_bytes(),
        notes={**report, "left_out": plan.left_out},
    )
    console.say(
        f"{report['sources']} source tensors used once, {report['elements']:,} elements written once,"
        f" {manifest.short(made.id)}"
    )
    data = {"out": str(spec.out), "id": made.id, "lossless": plan.lossless, **report}
    return Result(text=str(spec.out), data=data)


def _journals(spec: ConvertSpec) -> list[str]:
    """This part's journal, and then the others'."""
    part, parts = spec.parts
    if parts == 1:
        return [copying.JOURNAL]
    numbers = [part, *(n for n in range(1, parts + 1) if n != part)]
    return [copying.PART_JOURNAL.format(n, parts) for n in numbers]


def _kept(staged: Path) -> Collection[str]:
    """What a run that resumes leaves in the staging directory: all that the journal knows."""
    return {copying.JOURNAL, *copying.read_journal(staged / copying.JOURNAL)} - {copying.MARK}


def _all_there(target: Target, staging: Staging, journals: Sequence[str]) -> bool:
    """Whether the journals of all parts have every file as finished."""
    known: dict[str, Any] = {}
    for journal in journals:
        known |= copying.read_journal(staging.path / journal)
    return all(known.get(file.name, {}).get("closed") for file in target.recipe.files)


def _mark(spec: ConvertSpec, source: Source) -> str:
    """The same for conversions that write the same: settings, and names, sizes and times of the source's files."""
    stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in source.weight_files()]
    told = json.dumps([VERSION, stats, source.config, spec.changing_bytes(), spec.parts[1]], sort_keys=True)
    return blake3(told.encode()).hexdigest()


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
        names = ("spec", "experts", "tp", "pp", "vp", "ep", "etp", *STAGES)
        told = {name: getattr(spec, name) for name in names}
        return {**{name: value for name, value in told.items() if value not in (None, False)}, **common}
    if source.kept:
        common |= {"vocab_fill": "as trained, then zeros", "optimizer": source.kept.names}
        common["iteration"] = int(target.tracker)
    return {"spec": spec.spec, "form": target.form, **common}


def check_replicas(source: Source) -> None:
    """What is there twice must be there twice the same, or something would be lost. Compared piece by piece."""
    sources = Sources()
    step = reading.PIECE
    for copy, original in source.replicas:
        for start in range(0, copy.nbytes, step):
            size = min(step, copy.nbytes - start)
            if _bytes(sources, copy, start, size) != _bytes(sources, original, start, size):
                raise InputError(
                    f"{copy.name} differs from {original.name}, which it should be a copy of",
                    where=copy.place.file if copy.place else None,
                    hint="if a tied head was trained apart, set tie_word_embeddings to false in config.json; else one"
                    " of the two is damaged",
                )
    sources.close()


def _bytes(sources: Sources, array: Array, start: int, size: int) -> bytearray:
    data = bytearray(size)
    sources.read(array, start, memoryview(data))
    return data


def written_dtype(source: Source) -> str | None:
    """The one dtype of all weights, or None where they differ."""
    return next((name for name, cast in CASTS.items() if source.weight_dtypes == {cast}), None)


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
