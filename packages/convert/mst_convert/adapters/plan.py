"""What converting an adapter will do, from settings, configs and headers alone. No torch, nothing written."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path

from pydantic import ConfigDict, Field

from mst_convert.adapters import read_megatron, read_peft
from mst_convert.adapters.lora import Lora
from mst_convert.adapters.names import Site, sites
from mst_convert.adapters.spec import AdapterSpec
from mst_convert.merge.plan import adapter_manifest, check_base
from mst_core import checkpoint, hub, manifest, tensors, torch_dist
from mst_core.errors import InputError
from mst_core.families import Config, Model, family_for
from mst_core.manifest import Manifest
from mst_core.spec import Plan
from mst_core.tensors import DTYPE_BYTES, TORCH_NAMES

SLACK = 1 << 20
"""Bytes for what is not weights."""


@dataclass(frozen=True)
class Base:
    """The base's config.json and what it means."""

    path: Path
    config: Config
    model: Model


class AdapterPlan(Plan):
    """The table of a conversion."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    source: str
    layout: str
    to: str
    out: str
    architecture: str
    modules: int
    kinds: list[str]
    ranks: list[int]
    scales: list[float]
    dtype: str
    trained_on: str
    left_out: list[str]
    lora: Lora = Field(exclude=True, repr=False)
    base: Base = Field(exclude=True, repr=False)
    sites: list[Site] = Field(exclude=True, repr=False)
    everywhere: list[Site] = Field(exclude=True, repr=False)
    made: Manifest | None = Field(exclude=True, repr=False)

    def rows(self) -> list[tuple[str, str]]:
        """The plan for a person."""
        return [
            ("from", f"{self.source} ({self.layout})"),
            ("to", f"{self.out} ({self.to})"),
            ("base", f"{self.architecture}, {self.trained_on}"),
            ("adapts", f"{self.modules} modules: {', '.join(self.kinds)}"),
            ("rank", ", ".join(map(str, self.ranks))),
            ("scale", ", ".join(f"{scale:.6g}" for scale in self.scales)),
            ("dtype", self.dtype),
            *(("left out", text) for text in self.left_out),
        ]


def plan(spec: AdapterSpec) -> AdapterPlan:
    """Plan a conversion. InputError for all that headers can tell; see docs/adapters.md."""
    place = hub.resolve(spec.model)
    if spec.out.absolute() == place.absolute():
        raise InputError("--out is the adapter itself", where=spec.out, hint="choose another --out")
    checkpoint.check_out(spec.out, spec.overwrite)
    layout = layout_of(place)
    made = adapter_manifest(place)
    base = open_base(spec, place, layout)
    everywhere = sites(base.model, spec.vocab_padding)
    if layout == "peft":
        if spec.alpha is not None:
            raise InputError("--alpha: its adapter_config.json says lora_alpha already", where=place)
        lora = read_peft.read(place, everywhere)
    else:
        lora = read_megatron.read(place, everywhere, spec.alpha)
    if lora.layout == spec.to and spec.form in (None, *(["separate"] if spec.to == "peft" else [])):
        raise InputError(f"is in the layout of {spec.to} already", where=place, hint="--form says how else it can be")
    _check_parent(spec, place, made)
    _check_place(spec, place, everywhere, lora)
    kinds = {site.kind for site in everywhere if any(module in lora.pairs for module in site.hf)}
    checkpoint.check_free(spec.out, 3 * _bytes(lora) + SLACK)
    parent = made.parent("base") if made else None
    return AdapterPlan(
        title="mst-convert adapter",
        source=str(place),
        layout=lora.layout,
        to=spec.to,
        out=str(spec.out),
        architecture=base.model.family.architecture,
        modules=len(lora.pairs),
        kinds=list(dict.fromkeys(module.rpartition(".")[2] for module in lora.pairs)),
        ranks=sorted({pair.rank for pair in lora.pairs.values()}),
        scales=sorted({pair.scale for pair in lora.pairs.values()}),
        dtype=TORCH_NAMES[lora.dtype],
        trained_on=manifest.short(parent.id) if parent else "unverified",
        left_out=lora.left,
        lora=lora,
        base=base,
        sites=[site for site in everywhere if site.kind in kinds],
        everywhere=everywhere,
        made=made,
    )


def _check_place(spec: AdapterSpec, place: Path, everywhere: list[Site], lora: Lora) -> None:
    """Refuse what the other side has no module for."""
    for site in everywhere:
        adapted = next((module for module in site.hf if module in lora.pairs), None)
        if adapted and spec.to == "mcore-bridge" and site.leaf == "output_layer":
            what = f"{adapted} is adapted: mcore-bridge adapts layers of TransformerEngine, which output_layer is not"
            raise InputError(what, where=place, hint="--to megatron-bridge has a place for it; or merge it: mst-merge")
        if adapted and spec.to == "peft" and site.stacked and spec.experts == "modules":
            what = f"--experts modules: {site.specs[0].name} was one tensor of all experts in every transformers"
            raise InputError(what, where=place, hint="--experts parameters")


def layout_of(place: Path) -> str:
    """peft or megatron."""
    if (place / "adapter_config.json").is_file():
        return "peft"
    if torch_dist.is_megatron(place):
        return "megatron"
    if (place / "config.json").is_file():
        raise InputError("is a whole model, not an adapter", where=place, hint="mst-convert --model converts models")
    raise InputError("is neither a PEFT directory nor a torch_dist checkpoint", where=place)


def open_base(spec: AdapterSpec, place: Path, layout: str) -> Base:
    """config.json of ``--base``, or the one that mst put beside a Megatron adapter."""
    if spec.base is None:
        own = place / "hf" / "config.json"
        if not own.is_file():
            hint = "--base MODEL_DIR, the model it was trained on; only its config.json is read"
            raise InputError("does not hold its base's config.json", where=place, hint=hint)
        path = own
    else:
        given = hub.resolve(spec.base)
        path = (
            given
            if given.is_file()
            else next(
                (found for found in (given / "config.json", given / "hf" / "config.json") if found.is_file()),
                given / "config.json",
            )
        )
    config = tensors.read_json(path) if path.is_file() else tensors.config(path.parent)
    family = family_for(config, path)
    return Base(path, config, family.model(config, path, names=_names(place, layout)))


def _names(place: Path, layout: str) -> list[str]:
    """What the adapter calls the base's weights, where a family has several dialects."""
    if layout != "peft" or not (place / "adapter_model.safetensors").is_file():
        return []
    found = tensors.file_headers(place / "adapter_model.safetensors")
    return sorted({name.removeprefix("base_model.model.").partition(".lora_")[0] + ".weight" for name in found})


def _check_parent(spec: AdapterSpec, place: Path, made: Manifest | None) -> None:
    """Refuse a base whose manifest says that it is another than the adapter's."""
    if made is None or spec.base is None:
        return
    base = hub.resolve(spec.base)
    if base.is_dir() and manifest.is_finished(base):
        check_base(made, place, manifest.read(base), base)


def _bytes(lora: Lora) -> int:
    factors = [factor for pair in lora.pairs.values() for factor in (pair.a, pair.b)]
    return sum(prod(factor.shape) * DTYPE_BYTES[factor.dtype] for factor in factors)
