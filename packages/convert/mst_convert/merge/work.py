"""Merge: look at every factor first, then stream the base tensor by tensor into a staged directory, count, commit."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mst_convert.accounts import LM_HEAD
from mst_convert.merge import sidecar
from mst_convert.merge.applying import Applier, check_copy, check_parts, check_twin
from mst_convert.merge.base import stream
from mst_convert.merge.edits import Edit
from mst_convert.merge.megatron import VOCAB_PADDING, MegatronWriter
from mst_convert.merge.plan import MergePlan, adapter_manifest, check_base, other_base
from mst_convert.merge.spec import MergeSpec
from mst_convert.merge.tying import untied
from mst_convert.sources import Source
from mst_convert.work import carried_files, parent_of, write_files, written_dtype
from mst_core import checkpoint, console, manifest, tensors, torch_dist
from mst_core.checkpoint import Staging
from mst_core.errors import InputError, MstError
from mst_core.files import TOKENIZER_FILES
from mst_core.manifest import Manifest, Parent
from mst_core.spec import Result
from mst_core.tensors import TORCH_NAMES

TOOL = "mst-merge"
REPORT = "merge.json"


@dataclass
class Ledger:
    """What became of each tensor that the adapter names."""

    merged: dict[str, dict[str, Any]] = field(default_factory=dict)
    written: int = 0

    @property
    def changed(self) -> list[str]:
        return [name for name, entry in self.merged.items() if entry["changed"]]

    @property
    def unchanged(self) -> list[str]:
        return [name for name, entry in self.merged.items() if not entry["changed"]]


def work(spec: MergeSpec, plan: MergePlan) -> Result:
    """Do what ``plan`` says."""
    verified, parents, directories = _lineage(plan)
    _check(plan)
    carried = _carried(spec, plan)
    ledger = Ledger()
    with checkpoint.stage(spec.out, spec.overwrite) as staging:
        if plan.native is None:
            writer = tensors.write_hf(staging, plan.targets, int(spec.max_shard_size))
            _merge_all(plan, writer, ledger)
            writer.finish()
        else:
            native = MegatronWriter(staging, plan.native)
            _merge_all(plan, native, ledger)
            native.finish(_config(plan, carried), plan.job.hf_dir)
        if set(ledger.merged) != set(plan.matched.edits) or ledger.written != len(plan.targets):
            raise MstError("the counts of merged and written tensors do not add up", where=spec.out)
        if plan.native is None:
            write_files(staging, carried)
        else:
            torch_dist.write_megatron_sidecar(staging, carried)
        _report(staging, ledger)
        made = staging.commit(
            kind=plan.model.kind,
            layout=spec.to,
            encoding=_encoding(plan) | ({} if verified else {"base": "unverified"}),
            model=plan.model.info(TORCH_NAMES[plan.targets[0][1]]),
            parents=parents,
            parent_dirs=directories,
            tool=TOOL,
            settings={**spec.effective(), "weights": plan.weights},
            notes=_notes(ledger, verified),
        )
    return _result(spec, plan, made, ledger, verified)


def _config(plan: MergePlan, carried: dict[str, Path | bytes]) -> dict[str, Any]:
    """config.json as it is written."""
    text = carried["config.json"]
    found: dict[str, Any] = json.loads(text if isinstance(text, bytes) else text.read_bytes())
    return found


def _encoding(plan: MergePlan) -> dict[str, Any]:
    """What the layout leaves open, as mst-convert says it."""
    dialect = {"dialect": plan.job.dialect} if plan.job.dialect else {}
    if plan.native is None:
        return dialect
    copies = [name for name in plan.job.copies if name in plan.model.duplicates()]
    return {
        "spec": "te",
        "form": plan.native.form,
        "vocab_padding": VOCAB_PADDING,
        "vocab_rows": plan.native.vocab_rows,
        "vocab_fill": "zeros",
        **({"duplicates": copies} if copies else {}),
        **dialect,
    }


def _lineage(plan: MergePlan) -> tuple[bool, list[Parent], list[Path]]:
    """(were all adapters trained on this base, for all that manifests tell; the parents; their directories)."""
    parent, directories = parent_of(plan.job, lossless=False, role="base")
    verified = [_trained_on(lora.directory, plan.job, parent, known=bool(directories)) for lora in plan.loras]
    parents, adapters = [parent], [lora.directory for lora in plan.loras]
    for directory in adapters:
        made = manifest.identify(directory)
        parents.append(Parent(role="adapter", id=made.id, weights=made.digests.weights))
    return all(verified), parents, [*directories, *adapters]


def _trained_on(directory: Path, job: Source, base: Parent, *, known: bool) -> bool:
    """Was the adapter trained on ``base``? False if it does not say, InputError if on another."""
    made = adapter_manifest(directory)
    parent = made.parent("base") if made else None
    if made is None or parent is None:
        console.warn(f"{directory.name} does not say what it was trained on: only names and shapes were checked")
        return False
    if known:
        return check_base(made, directory, manifest.identify(job.directory), job.directory)
    if parent.id != base.id:  # a Megatron directory that mst did not write has an id but no lineage
        raise other_base(directory, parent.id, job.directory, base.id)
    return True


def _check(plan: MergePlan) -> None:
    """Look at every part of the adapters before anything is written."""
    for twins in plan.matched.twins:
        check_twin(*twins)
    if not check_parts([edit for edits in plan.matched.edits.values() for edit in edits]):
        console.warn(f"{plan.loras[0].directory.name} changes nothing: every delta is zero; was it trained?")
    if any(lora.config.get("fan_in_fan_out") for lora in plan.loras):
        console.warn("fan_in_fan_out is ignored, as PEFT ignores it: these layers are Linear, with [out, in] weights")


def _merge_all(plan: MergePlan, writer: tensors.HFWriter | MegatronWriter, ledger: Ledger) -> None:
    applier = Applier(kept=4 * len(plan.loras))
    with console.progress("merging", plan.bytes_out, "B") as bar:
        for name, tensor in _sources(plan):
            edits = plan.matched.edits.get(name)
            if edits:
                tensor = _merged(name, tensor, edits, applier, ledger)
            writer.put(name, tensor)
            ledger.written += 1
            bar.advance(tensor.nbytes)
            del tensor  # or it would live on while the next one is read


def _sources(plan: MergePlan) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor to write before it is changed: the base's, compared with copies, and a head that is untied."""
    for name, tensor in stream(plan.job):
        for known, ref in plan.matched.copies:
            if known == name:
                check_copy(tensor, ref)
        if name in plan.grows:  # the adapter has each of these rows
            more = plan.model.dims.vocab - len(tensor)
            tensor = torch.cat([tensor, tensor.new_zeros(more, *tensor.shape[1:])])
        yield name, tensor
        if name == plan.new_head:
            yield LM_HEAD, tensor
        del tensor  # or it would live on while the next one is read


def _merged(name: str, base: torch.Tensor, edits: Sequence[Edit], applier: Applier, ledger: Ledger) -> torch.Tensor:
    outcome = applier.apply(base, edits)
    if outcome.not_finite:
        raise InputError(
            f"{outcome.not_finite} of {base.numel()} merged values are not finite in {str(base.dtype)[6:]}",
            where=name,
            hint="the base holds such values, or the delta is too large for its dtype (mst-convert --dtype)",
        )
    told = [edit.told() for edit in edits]
    ledger.merged[name] = {"edits": told, "changed": outcome.changed, "elements": base.numel()}
    return outcome.tensor


def _carried(spec: MergeSpec, plan: MergePlan) -> dict[str, Path | bytes]:
    """config.json and generation_config.json of the base, and the tokenizer files that ``sidecar`` chooses."""
    job = plan.job
    carried = carried_files(job, written_dtype(job) if job.layout != "hf" else None)
    kept: dict[str, Path | bytes] = {name: source for name, source in carried.items() if name not in TOKENIZER_FILES}
    if plan.untie or plan.grows:
        config = _config(plan, kept)
        config = untied(config) if plan.untie else config
        config |= {"vocab_size": plan.model.dims.vocab} if plan.grows else {}
        kept["config.json"] = (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
    adapters = [plan.brings] if plan.brings else [lora.directory for lora in plan.loras]
    choice = spec.tokenizer or ("adapter" if plan.brings else None)
    chosen, differing = sidecar.tokenizer_files(job.hf_dir, adapters, choice)
    if differing:
        console.warn(
            f"the base's tokenizer is taken; the adapter's differs in {', '.join(differing)}"
            " (--tokenizer adapter takes that one)"
        )
    elif chosen and next(iter(chosen.values())).parent != job.hf_dir and choice is None:
        console.warn("the base has no tokenizer: the adapter's is taken")
    return kept | chosen


def _report(staging: Staging, ledger: Ledger) -> None:
    """merge.json: every merged tensor with what was done to it and how many of its elements changed."""
    (staging.path / REPORT).write_text(json.dumps(ledger.merged, indent=1) + "\n", encoding="utf-8")
    staging.attach(REPORT)


def _notes(ledger: Ledger, verified: bool) -> dict[str, Any]:
    return {
        "base": "verified" if verified else "unverified",
        "merged_tensors": len(ledger.merged),
        "changed_tensors": len(ledger.changed),
        "changed_elements": sum(entry["changed"] for entry in ledger.merged.values()),
        "unchanged": ledger.unchanged,
    }


def _result(spec: MergeSpec, plan: MergePlan, made: Manifest, ledger: Ledger, verified: bool) -> Result:
    changed, merged = len(ledger.changed), len(ledger.merged)
    console.say(f"{changed} of {plan.tensors} tensors changed ({merged} merged), {manifest.short(made.id)}")
    if ledger.unchanged:
        console.warn(
            f"{merged - changed} merged tensors did not change, like {ledger.unchanged[0]}; {REPORT} lists them"
        )
    data = {
        "out": str(spec.out),
        "id": made.id,
        "base": "verified" if verified else "unverified",
        "merged": merged,
        "changed": changed,
        "changed_tensors": ledger.changed,
        "unchanged_tensors": ledger.unchanged,
    }
    return Result(text=str(spec.out), data=data)
