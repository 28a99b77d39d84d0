"""Convert an adapter: compare its A's, settle rank and alpha, write, commit."""

from __future__ import annotations

from pathlib import Path

from mst_convert.adapters import fusing, writing, writing_peft
from mst_convert.adapters.fusing import Shared
from mst_convert.adapters.lora import Lora
from mst_convert.adapters.plan import AdapterPlan
from mst_convert.adapters.spec import AdapterSpec
from mst_convert.adapters.writing import Recipe
from mst_core import checkpoint, console, files, manifest, torch_dist
from mst_core.errors import InputError
from mst_core.manifest import Parent
from mst_core.spec import Result

TOOL = "mst-convert"


def work(spec: AdapterSpec, plan: AdapterPlan) -> Result:
    """Do what ``plan`` says."""
    lora, model = plan.lora, plan.base.model
    recipe = None if spec.to == "peft" and spec.form != "fused" else settle(spec, plan)
    zeros = [] if recipe is None else _zeros(recipe, lora)
    parents, directories = _parents(plan)
    with checkpoint.stage(spec.out, spec.overwrite) as staging:
        if recipe is None or spec.to == "peft":
            writing_peft.write(staging, lora, model, plan.sites, recipe, spec.experts)
        else:
            if spec.to == "megatron-bridge":
                writing.write_bridge(staging, recipe, plan.everywhere, model)
            else:
                writing.write_mcore(staging, recipe, plan.everywhere, model)
            torch_dist.write_megatron_sidecar(staging, {"config.json": plan.base.path}, str(writing.ITERATION))
        form = recipe.form if recipe else "separate"
        encoding = {"form": form} if spec.to == "peft" else {"form": form, "writer": spec.to, "tp": spec.tp}
        made = staging.commit(
            kind="adapter",
            layout="peft" if spec.to == "peft" else "megatron",
            encoding=encoding,
            parents=parents,
            parent_dirs=directories,
            tool=TOOL,
            settings={"command": "adapter", **spec.effective("base"), "form": form},
            notes={"left_out": plan.left_out, "zeros": zeros},
        )
    if zeros:
        console.say(f"{len(zeros)} modules without an adapter were given one of zeros, like {zeros[0]}")
    rank = recipe.rank if recipe else plan.ranks[0]
    console.say(f"{plan.modules} modules, {form}, rank {rank}, {manifest.short(made.id)}")
    data = {"out": str(spec.out), "id": made.id, "form": form, "rank": rank, "zeros": zeros}
    if recipe:
        data["alpha"] = recipe.alpha
    return Result(text=str(spec.out), data=data)


def settle(spec: AdapterSpec, plan: AdapterPlan) -> Recipe:
    """The form, and one rank, scale and alpha for all layers. InputError where no exact ones exist."""
    lora = plan.lora
    scale = fusing.common_scale(lora.pairs)
    shared = fusing.share(plan.sites, lora)
    form = spec.form or "fused"
    if (
        spec.to == "megatron-bridge"
        and spec.form is None
        and any(len(o.ranks) > 1 and o.site.canonical for o in shared)
    ):
        form = "separate"
    if spec.to == "megatron-bridge" and form == "separate":
        _check_canonical(shared)
    rank = fusing.highest(shared, form)
    if spec.to == "megatron-bridge":
        rank = -(-rank // spec.tp) * spec.tp  # its A is cut along the rank
    rslora = lora.rslora and spec.to != "megatron-bridge"
    if spec.to == "mcore-bridge":
        # More zeros, where they make alpha the whole number that ms-swift wants.
        whole = (more for more in range(rank, 4 * rank + 1) if isinstance(fusing.alpha_of(scale, more, rslora), int))
        rank = next(whole, rank)
    return Recipe(shared, form, rank, scale, fusing.alpha_of(scale, rank, rslora), rslora, lora.dtype, spec.tp)


def _check_canonical(shared: list[Shared]) -> None:
    """CanonicalLoRA has an adapter of q, k, v, gate and up, and none of a linear_qkv or linear_fc1 as a whole."""
    for one in shared:
        if one.site.leaf in ("linear_qkv", "linear_fc1") and not one.site.canonical and one.site.expert is None:
            what = f"is one module here ({one.site.hf[0]}), which CanonicalLoRA has no name for"
            raise InputError(what, where=one.site.module, hint="--form fused")


def _zeros(recipe: Recipe, lora: Lora) -> list[str]:
    return [module for one in recipe.shared for module in one.site.hf if module not in lora.pairs]


def _parents(plan: AdapterPlan) -> tuple[list[Parent], list[Path]]:
    """The adapter itself, and the base that it says it was trained on."""
    directory = plan.lora.directory
    if plan.made is None and plan.layout != "peft":
        inner = torch_dist.checkpoint_dir(directory)
        names = sorted(path for path in inner.iterdir() if files.is_weights(path.name))
        digest = files.group_digest((path.name, files.hash_file(path)[1]) for path in names)
        return [Parent(role="source", id=f"blake3:{digest}", weights=digest, lossless=True)], []
    made = manifest.identify(directory)
    base = made.parent("base")
    source = Parent(role="source", id=made.id, weights=made.digests.weights, lossless=True)
    return [source, *([base] if base else [])], [directory]
