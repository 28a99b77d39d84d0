"""What a merge will do, from settings, configs, headers and manifests alone. No torch, nothing written."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from pydantic import ConfigDict, Field

from mst_convert.accounts import EMBEDDING, LM_HEAD
from mst_convert.merge import adapter as peft
from mst_convert.merge.adapter import Adapter, Pair
from mst_convert.merge.base import open_base, wanted
from mst_convert.merge.spec import MergeSpec
from mst_convert.plan import SLACK, Job
from mst_core import checkpoint, console, hub, lineage, manifest, torch_dist
from mst_core.errors import InputError, MstError, many
from mst_core.manifest import Manifest
from mst_core.spec import Plan
from mst_core.tensors import TORCH_NAMES, Wanted, wanted_bytes

Shapes = Mapping[str, Sequence[int]]


class MergePlan(Plan):
    """The table of a merge."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    base: str
    layout: str
    adapter: str
    out: str
    to: str
    architecture: str
    modules: list[str]
    kinds: dict[str, int]
    """How many modules of each name: {"q_proj": 32, ...}."""
    ranks: list[int]
    scales: list[float]
    tensors: int
    dtype: str
    bytes_out: int
    trained_on: str
    """The id that the adapter says it adapts, or "unverified"."""
    job: Job = Field(exclude=True, repr=False)
    lora: Adapter = Field(exclude=True, repr=False)

    def rows(self) -> list[tuple[str, str]]:
        """The plan for a person."""
        return [
            ("base", f"{self.base} ({self.layout})"),
            ("adapter", self.adapter),
            ("adapts", self.trained_on),
            ("to", f"{self.out} ({self.to})"),
            ("model", self.architecture),
            ("merges", f"{len(self.modules)} of {self.tensors} tensors: {_counts(self.kinds)}"),
            ("rank", _several(self.ranks)),
            ("scale", _several(self.scales)),
            ("dtype", f"{self.dtype}; the delta in float32, one rounding"),
            ("bytes", console.size(self.bytes_out)),
        ]


def plan(spec: MergeSpec) -> MergePlan:
    """Plan a merge. InputError for all that headers and manifests can tell; see docs/merge.md."""
    source, adapter_dir = hub.resolve(spec.model), hub.resolve(spec.adapter)
    for place in (source, adapter_dir):
        if spec.out.absolute() == place.absolute():
            raise InputError("--out is one of the inputs", where=spec.out, hint="choose another --out")
    checkpoint.check_out(spec.out, spec.overwrite)
    made = adapter_manifest(adapter_dir)
    job = open_base(source)
    if made is not None and job.parent is not None:
        check_base(made, adapter_dir, job.parent, source)
    lora = peft.read(adapter_dir)
    targets = wanted(job)
    check_match(lora, {name: shape for name, _, shape in targets}, tied=job.model.tied)
    size = sum(map(wanted_bytes, targets))
    checkpoint.check_free(spec.out, size + SLACK)
    parent = made.parent("base") if made else None
    return MergePlan(
        title="mst-merge",
        base=str(source),
        layout="megatron" if torch_dist.is_megatron(source) else "hf",
        adapter=str(adapter_dir),
        out=str(spec.out),
        to=spec.to,
        architecture=job.family.architecture,
        modules=[pair.module for pair in lora.pairs],
        kinds=_kinds(lora.pairs),
        ranks=sorted({pair.rank for pair in lora.pairs}),
        scales=sorted({pair.scale for pair in lora.pairs}),
        tensors=len(targets),
        dtype=_dtypes(targets),
        bytes_out=size,
        trained_on=parent.id if parent else "unverified",
        job=job,
        lora=lora,
    )


def adapter_manifest(directory: Path) -> Manifest | None:
    """The adapter's manifest if an mst tool made it."""
    if directory.name.endswith(".partial"):
        raise InputError("this is a work in progress, not an adapter", where=directory)
    if not (directory / manifest.NAME).is_file():
        return None
    made = manifest.read(directory)
    if made.kind != "adapter":
        raise InputError(f"holds a {made.kind}, not an adapter", where=directory)
    return made


def check_base(adapter: Manifest, adapter_dir: Path, base: Manifest, base_dir: Path) -> bool:
    """Refuse an adapter of other weights than the base's. False: the adapter does not say what it was trained on."""
    fits = lineage.adapts(adapter, adapter_dir, base, base_dir)
    if fits is None:
        return False
    parent = adapter.parent("base")
    if fits or parent is None:
        return True
    raise other_base(adapter_dir, parent.id, base_dir, base.id)


def other_base(adapter_dir: Path, trained_on: str, base_dir: Path, given: str) -> InputError:
    """The error for an adapter of another base."""
    known = lineage.ancestors(adapter_dir).get(trained_on)
    origin = known.notes.get("origin") if known else None
    return InputError(
        f"{adapter_dir.name} adapts {manifest.short(trained_on)}, but {base_dir.name} is {manifest.short(given)}",
        hint="give the base it was trained on" + (f"; its lineage calls it {origin}" if origin else ""),
    )


def check_match(lora: Adapter, base: Shapes, *, tied: bool) -> None:
    """Every pair fits exactly one tensor of the base, and every module that the config targets has a pair.

    Raises one InputError that lists all that do not.
    """
    faults: list[MstError] = [
        InputError(reason, where=pair.module) for pair in lora.pairs if (reason := misfit(pair, base, tied=tied))
    ]
    have = {pair.module for pair in lora.pairs}
    faults += [
        InputError("target_modules names it, but the adapter has no tensors for it", where=module)
        for module in _linears(base)
        if module not in have and peft.is_target(lora.config, module)
    ]
    if faults:
        raise many(
            faults,
            what=f"{lora.directory} does not fit the base, in {len(faults)} place{'s' if len(faults) > 1 else ''}:",
            hint="give the base it was trained on, and the adapter as PEFT saved it",
        )


def misfit(pair: Pair, base: Shapes, *, tied: bool) -> str | None:
    """Why ``pair`` cannot be added to the base, or None."""
    name = f"{pair.module}.weight"
    if f"{pair.module}.weight" == LM_HEAD and tied:
        return (
            "the head is tied to the embedding: merged into one it would change the other, and a reload would lose it;"
            " mst-merge does not untie yet"
        )
    if name == EMBEDDING:
        return "is an embedding, not a linear layer; mst-merge does not do this yet"
    if name not in base:
        close = difflib.get_close_matches(name, base, n=1, cutoff=0.8)
        return "the base has no such layer" + (f"; did you mean {close[0].removesuffix('.weight')}?" if close else "")
    shape = tuple(base[name])
    if len(shape) != 2:
        return f"is no linear layer: its weight is {list(shape)}"
    made = (pair.b.shape[0], pair.a.shape[1])
    if made != shape:
        return f"B {list(pair.b.shape)} times A {list(pair.a.shape)} is {list(made)}, the base's weight {list(shape)}"
    return None


def _linears(base: Shapes) -> Iterable[str]:
    """Modules with a two-dimensional weight, embeddings aside."""
    for name, shape in base.items():
        if name.endswith(".weight") and len(shape) == 2 and name != EMBEDDING:
            yield name.removesuffix(".weight")


def _kinds(pairs: Iterable[Pair]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for pair in pairs:
        kind = pair.module.rpartition(".")[2]
        counts[kind] = counts.get(kind, 0) + 1
    return counts


def _counts(kinds: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in kinds.items())


def _several(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.6g}" for value in values)


def _dtypes(targets: Iterable[Wanted]) -> str:
    return ", ".join(sorted({TORCH_NAMES[dtype] for _, dtype, _ in targets}))
