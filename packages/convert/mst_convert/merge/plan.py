"""What a merge will do, from settings, configs, headers and manifests alone. No torch, nothing written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ConfigDict, Field

from mst_convert.accounts import LM_HEAD
from mst_convert.merge import adapter as peft
from mst_convert.merge.adapter import Adapter
from mst_convert.merge.base import open_base, wanted
from mst_convert.merge.edits import Delta, Edit, Matcher, Whole, conflicts
from mst_convert.merge.megatron import Layout
from mst_convert.merge.spec import MergeSpec
from mst_convert.merge.tying import embedding_of, settle, untied
from mst_convert.plan import SLACK
from mst_convert.sources import Source
from mst_core import checkpoint, console, hub, lineage, manifest, torch_dist, vocabulary
from mst_core.errors import InputError, many
from mst_core.families import Model
from mst_core.manifest import Manifest
from mst_core.spec import Plan
from mst_core.tensors import TORCH_NAMES, TensorRef, Wanted, wanted_bytes


@dataclass
class Matched:
    """What the adapters do to the base.

    edits   by tensor, in the order of the adapters
    twins   two edits of which one is done, and that must say the same
    copies  tensors of the base that an adapter repeats, to be compared
    """

    edits: dict[str, list[Edit]] = field(default_factory=dict)
    twins: list[tuple[Edit, Edit]] = field(default_factory=list)
    copies: list[tuple[str, TensorRef]] = field(default_factory=list)

    def spread(self, model: Model, targets: Iterable[Wanted]) -> None:
        """Copies of a tensor that the base holds (a tied head, embeddings of extra layers) change with it."""
        stored = {name for name, _, _ in targets}
        for copy, original in model.duplicates().items():
            if copy in stored and original in self.edits:
                self.edits.setdefault(copy, self.edits[original])


class MergePlan(Plan):
    """The table of a merge."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    base: str
    layout: str
    adapter: list[str]
    weights: list[float]
    out: str
    to: str
    architecture: str
    edited: list[str]
    """The base's tensors that change."""
    kinds: dict[str, int]
    """How many tensors of each name: {"q_proj": 32, ...}."""
    ranks: list[int]
    scales: list[float]
    untie: bool
    tensors: int
    dtype: str
    bytes_out: int
    trained_on: list[str]
    """The id that each adapter says it adapts, or "unverified"."""
    job: Source = Field(exclude=True, repr=False)
    model: Model = Field(exclude=True, repr=False)
    """The model that comes out: the base's, or that untied."""
    targets: list[Wanted] = Field(exclude=True, repr=False)
    brings: Path | None = Field(exclude=True, repr=False)
    """The adapter that has new tokens (mst-train --add-tokens): its tokenizer and its rows belong to the model."""
    grows: set[str] = Field(exclude=True, repr=False)
    """Tensors that get rows for them."""
    new_head: str | None = Field(exclude=True, repr=False)
    """The embedding that an untied head is made of and written after, where the base ships no head."""
    native: Layout | None = Field(exclude=True, repr=False)
    """Of --to megatron: where each tensor goes."""
    loras: list[Adapter] = Field(exclude=True, repr=False)
    matched: Matched = Field(exclude=True, repr=False)

    def rows(self) -> list[tuple[str, str]]:
        """The plan for a person."""
        return [
            ("base", f"{self.base} ({self.layout})"),
            *(
                row
                for adapter, weight, base in zip(self.adapter, self.weights, self.trained_on, strict=True)
                for row in (("adapter", adapter + (f" * {weight:g}" if weight != 1 else "")), ("adapts", base))
            ),
            ("to", f"{self.out} ({self.to})"),
            ("model", self.architecture),
            ("merges", f"{len(self.edited)} of {self.tensors} tensors: {_counts(self.kinds)}"),
            *([("rank", _several(self.ranks)), ("scale", _several(self.scales))] if self.ranks else []),
            ("dtype", f"{self.dtype}; the delta in float32, one rounding"),
            ("bytes", console.size(self.bytes_out)),
            *([("tokens", f"{self.model.dims.vocab} rows, tokenizer of {self.brings.name}")] if self.brings else []),
            *([("head", "untied: tie_word_embeddings becomes false")] if self.untie else []),
        ]


def plan(spec: MergeSpec) -> MergePlan:
    """Plan a merge. InputError for all that headers and manifests can tell; see docs/merge.md."""
    source, directories = hub.resolve(spec.model), [hub.resolve(adapter) for adapter in spec.adapter]
    for place in (source, *directories):
        if spec.out.absolute() == place.absolute():
            raise InputError("--out is one of the inputs", where=spec.out, hint="choose another --out")
    checkpoint.check_out(spec.out, spec.overwrite)
    manifests = [adapter_manifest(directory) for directory in directories]
    job = open_base(source)
    for made, directory in zip(manifests, directories, strict=True):
        if made is not None and job.parent is not None:
            check_base(made, directory, job.parent, source)
    loras = [peft.read(directory) for directory in directories]
    check_several(loras, spec.factors)
    brings, rows = _new_tokens(loras, manifests)
    model, targets, new_head = _outcome(job, rows, untie=spec.untie)
    matched = match_all(loras, spec.factors, targets, job.model, untie=spec.untie)
    if brings:
        _check_rows(brings, matched, vocabulary.tables(job.model))
    matched.spread(model, targets)
    size = sum(map(wanted_bytes, targets))
    checkpoint.check_free(spec.out, size + SLACK)
    parents = [made.parent("base") if made else None for made in manifests]
    deltas = [edit for edits in matched.edits.values() for edit in edits if isinstance(edit, Delta)]
    return MergePlan(
        title="mst-merge",
        base=str(source),
        layout="megatron" if torch_dist.is_megatron(source) else "hf",
        adapter=[str(directory) for directory in directories],
        weights=list(spec.factors),
        out=str(spec.out),
        to=spec.to,
        architecture=job.family.architecture,
        edited=[name for name, _, _ in targets if name in matched.edits],
        kinds=_kinds(matched.edits),
        ranks=sorted({delta.rank for delta in deltas}),
        scales=sorted({delta.scale for delta in deltas}),
        untie=spec.untie,
        tensors=len(targets),
        dtype=_dtypes(targets),
        bytes_out=size,
        trained_on=[parent.id if parent else "unverified" for parent in parents],
        job=job,
        model=model,
        targets=targets,
        brings=brings.directory if brings else None,
        grows=vocabulary.by_vocab(job.model) if rows > job.model.dims.vocab else set(),
        new_head=new_head,
        native=Layout(job, model, targets) if spec.to == "megatron" else None,
        loras=loras,
        matched=matched,
    )


def _new_tokens(loras: Sequence[Adapter], manifests: Sequence[Manifest | None]) -> tuple[Adapter | None, int]:
    """The adapter that has new tokens, of which there is one at most (check_several), and the rows that the vocabulary
    needs for them."""
    for lora, made in zip(loras, manifests, strict=True):
        if made is not None and lineage.grown_from(made, lineage.ancestors(lora.directory)):
            named = lora.config.get("trainable_token_indices")
            rows = [row for rows in named.values() for row in rows] if isinstance(named, dict) else []
            return lora, 1 + max(rows, default=-1)
    return None, 0


def _check_rows(lora: Adapter, matched: Matched, tables: Iterable[str]) -> None:
    """The adapter replaces the rows of its tokens in each of ``tables``: what it did not would be rows of zeros."""
    for name in tables:
        if not any(isinstance(edit, Whole) and edit.rows for edit in matched.edits.get(name, ())):
            what = f"was trained with new tokens, and has no rows of them for the base's {name}"
            hint = "give the base it was trained on, and the adapter as it was written"
            raise InputError(what, where=lora.directory, hint=hint)


def _outcome(job: Source, rows: int, *, untie: bool) -> tuple[Model, list[Wanted], str | None]:
    """The model to write, with ``rows`` of the vocabulary at least, its tensors, and the embedding that a new head
    follows."""
    targets, model, config = wanted(job), job.model, job.config
    if rows > model.dims.vocab:
        longer = vocabulary.by_vocab(model)
        targets = [(name, dtype, (rows, *shape[1:]) if name in longer else shape) for name, dtype, shape in targets]
        config = {**config, "vocab_size": rows}
        model = job.family.model(config, job.hf_dir / "config.json", names=[name for name, _, _ in targets])
    if not untie:
        return model, targets, None
    if not job.model.tied:
        raise InputError("--untie: its head is not tied", where=job.directory, hint="leave --untie out")
    names = [name for name, _, _ in targets]
    model = job.family.model(untied(config), job.hf_dir / "config.json", names=names)
    if LM_HEAD in names:
        return model, targets, None
    place = names.index(embedding_of(names))
    targets.insert(place + 1, (LM_HEAD, *targets[place][1:]))
    return model, targets, names[place]


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


def match_all(
    loras: Sequence[Adapter], weights: Sequence[float], targets: Iterable[Wanted], model: Model, *, untie: bool
) -> Matched:
    """Every adapter's edits by the tensor of the base. One InputError lists all that does not fit."""
    shapes: dict[str, Sequence[int]] = {name: shape for name, _, shape in targets}
    embedding = embedding_of(shapes)
    if model.tied and embedding in shapes:
        shapes.setdefault(LM_HEAD, shapes[embedding])
    matched = Matched()
    for lora, weight in zip(loras, weights, strict=True):
        one = Matcher(lora, shapes, embedding, weight)
        one.match()
        edits, faults = one.edits, one.faults
        if model.tied:
            edits, twins, more = settle(edits, embedding, lora.config, untie=untie)
            matched.twins += twins
            faults = faults + more
        if faults:
            raise many(
                faults,
                what=f"{lora.directory} does not fit the base, in {len(faults)} place{'s' if len(faults) > 1 else ''}:",
                hint="give the base it was trained on, and the adapter as PEFT saved it",
            )
        for name, edit in edits:
            matched.edits.setdefault(name, []).append(edit)
        for name, ref in one.copies.items():
            matched.copies.append((embedding if name == LM_HEAD and model.tied else name, ref))
    clashes = list(conflicts(matched.edits))
    if clashes:
        raise many(
            clashes, what="the changes cannot be combined:", hint="merge one adapter, and train the other on that"
        )
    return matched


def check_several(loras: Sequence[Adapter], weights: Sequence[float]) -> None:
    """Only what is a sum can be summed and weighted."""
    for lora, weight in zip(loras, weights, strict=True):
        if lora.config.get("use_dora") and (len(loras) > 1 or weight != 1):
            raise InputError(
                "use_dora: DoRA rescales every row of the merged weight: it cannot be weighted or summed with others",
                where=lora.directory,
                hint="merge it alone",
            )
    whole = [lora.directory for lora in loras if lora.parts.whole or lora.parts.rows]
    if len(whole) > 1:
        names = " and ".join(directory.name for directory in whole)
        reason = "replace tensors (modules_to_save, bias, trained tokens): only one adapter can"
        raise InputError(f"{names} {reason}", hint="merge them one after the other, each trained on the merge before")
    for number, lora in enumerate(loras):
        if any(lora.directory.samefile(other.directory) for other in loras[:number]):
            raise InputError("is given twice", where=lora.directory, hint="--weights weighs an adapter")


def _kinds(edits: Mapping[str, Sequence[Edit]]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for name in edits:
        kind = name.removesuffix(".weight").rpartition(".")[2]
        counts[kind] = counts.get(kind, 0) + 1
    return counts


def _counts(kinds: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in kinds.items())


def _several(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.6g}" for value in values)


def _dtypes(targets: Iterable[Wanted]) -> str:
    return ", ".join(sorted({TORCH_NAMES[dtype] for _, dtype, _ in targets}))
