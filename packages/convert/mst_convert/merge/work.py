"""Merge: look at every factor first, then stream the base tensor by tensor into a staged directory, count, commit."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mst_convert.merge import adapter as peft
from mst_convert.merge import merging, sidecar
from mst_convert.merge.base import stream, wanted
from mst_convert.merge.plan import MergePlan, adapter_manifest, check_base, other_base
from mst_convert.merge.spec import MergeSpec
from mst_convert.work import carried_files, parent_of, written_dtype
from mst_core import checkpoint, console, manifest, tensors
from mst_core.checkpoint import Staging
from mst_core.errors import InputError, MstError, many
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
    verified, base = _lineage(plan)
    check_factors(plan)
    carried = _carried(spec, plan)
    ledger = Ledger()
    targets = wanted(plan.job)
    with checkpoint.stage(spec.out, spec.overwrite) as staging:
        writer = tensors.write_hf(staging, targets, int(spec.max_shard_size))
        _merge_all(plan, writer, ledger)
        writer.finish()
        if set(ledger.merged) != {f"{module}.weight" for module in plan.modules} or ledger.written != len(targets):
            raise MstError("the counts of merged and written tensors do not add up", where=spec.out)
        for name, source in sorted(carried.items()):
            if isinstance(source, bytes):
                staging.write(name, source)
            else:
                staging.copy(source, name)
        _report(staging, ledger)
        adapter = manifest.identify(plan.lora.directory)
        made = staging.commit(
            kind="model",
            layout="hf",
            encoding={} if verified else {"base": "unverified"},
            model=plan.job.model.info(TORCH_NAMES[targets[0][1]]),
            parents=[base[0], Parent(role="adapter", id=adapter.id, weights=adapter.digests.weights)],
            parent_dirs=[*base[1], plan.lora.directory],
            tool=TOOL,
            settings=spec.effective(),
            notes=_notes(ledger, verified),
        )
    return _result(spec, plan, made, ledger, verified)


def _lineage(plan: MergePlan) -> tuple[bool, tuple[Parent, list[Path]]]:
    """(was the adapter trained on this base, for all that manifests tell; the base as a parent and its directory)."""
    source, directory = plan.job.source, plan.lora.directory
    base = parent_of(plan.job, lossless=False, role="base")
    made = adapter_manifest(directory)
    parent = made.parent("base") if made else None
    if made is None or parent is None:
        console.warn(f"{directory.name} does not say what it was trained on: only names and shapes were checked")
        return False, base
    if not base[1]:  # A Megatron directory that mst did not write: it has an id but no lineage.
        if parent.id != base[0].id:
            raise other_base(directory, parent.id, source, base[0].id)
        return True, base
    return check_base(made, directory, manifest.identify(source), source), base


def check_factors(plan: MergePlan) -> None:
    """Read every A and B once: refuse NaN and infinity, all in one error; warn if no B can change anything."""
    faults: list[MstError] = []
    moving = 0
    for pair in plan.lora.pairs:
        b = None
        for ref in (pair.a, pair.b):
            b = tensors.read(ref)
            bad = b.numel() - int(torch.count_nonzero(torch.isfinite(b)))
            if bad:
                faults.append(InputError(f"{bad} of {b.numel()} values are NaN or infinite", where=ref.name))
        moving += b is not None and bool(torch.count_nonzero(b))
    if faults:
        raise many(faults, what=f"{plan.lora.directory} is damaged:", hint="take an earlier checkpoint of the training")
    if plan.lora.config.get("fan_in_fan_out"):
        console.warn("fan_in_fan_out is ignored, as PEFT ignores it: these layers are Linear, with [out, in] weights")
    if not moving:
        console.warn(f"{plan.lora.directory.name} changes nothing: every B is zero; was it trained?")


def _merge_all(plan: MergePlan, writer: tensors.HFWriter, ledger: Ledger) -> None:
    pairs = {f"{pair.module}.weight": pair for pair in plan.lora.pairs}
    with console.progress("merging", plan.bytes_out, "B") as bar:
        for name, tensor in stream(plan.job):
            pair = pairs.get(name)
            if pair is not None:
                tensor = _merged(tensor, pair, ledger)
            writer.put(name, tensor)
            ledger.written += 1
            bar.advance(tensor.nbytes)
            del tensor  # or it would live on while the next one is read


def _merged(base: torch.Tensor, pair: peft.Pair, ledger: Ledger) -> torch.Tensor:
    outcome = merging.merge(base, tensors.read(pair.a), tensors.read(pair.b), pair.scale)
    if outcome.not_finite:
        raise InputError(
            f"{outcome.not_finite} of {base.numel()} merged values are not finite in {str(base.dtype)[6:]}",
            where=f"{pair.module}.weight",
            hint="the base holds such values, or the delta is too large for its dtype (mst-convert --dtype)",
        )
    ledger.merged[f"{pair.module}.weight"] = {
        "rank": pair.rank,
        "alpha": pair.alpha,
        "scale": pair.scale,
        "changed": outcome.changed,
        "elements": base.numel(),
    }
    return outcome.tensor


def _carried(spec: MergeSpec, plan: MergePlan) -> dict[str, Path | bytes]:
    """config.json and generation_config.json of the base, and the tokenizer files that ``sidecar`` chooses."""
    job = plan.job
    exports = None if job.source == job.hf_dir else job.exports
    carried = carried_files(job, written_dtype(exports) if exports else None)
    kept: dict[str, Path | bytes] = {name: source for name, source in carried.items() if name not in TOKENIZER_FILES}
    chosen, differing = sidecar.tokenizer_files(job.hf_dir, plan.lora.directory, spec.tokenizer)
    if differing:
        console.warn(
            f"the base's tokenizer is taken; the adapter's differs in {', '.join(differing)}"
            " (--tokenizer adapter takes that one)"
        )
    elif chosen and next(iter(chosen.values())).parent != job.hf_dir and spec.tokenizer is None:
        console.warn("the base has no tokenizer: the adapter's is taken")
    return kept | chosen


def _report(staging: Staging, ledger: Ledger) -> None:
    """merge.json: every merged tensor with its rank, scale and the number of elements that changed."""
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
