"""What divides what: whether a model fits a parallel layout. Pure arithmetic, so that a plan can refuse."""

from __future__ import annotations

from pathlib import Path

from mst_core.errors import InputError, many
from mst_core.families.rules import Model
from mst_core.runspec import RunSpec


def check_layout(model: Model, spec: RunSpec, where: str | Path) -> None:
    """Raises InputError with everything of the layout that the model does not fit, and what would."""
    found = [*_tensor(model, spec), *_pipeline(model.dims.layers, spec), *_experts(model, spec), *_latent(model, spec)]
    if len(found) == 1:
        raise InputError(found[0].what, where=where, hint=found[0].hint)
    if found:
        raise many(found, what=f"{where}: the model does not fit this layout:")


def _tensor(model: Model, spec: RunSpec) -> list[InputError]:
    dims = model.dims
    sizes = {"attention heads": dims.heads, "key-value heads": dims.groups}
    if "experts" not in dims.more or any("moe" not in facts for facts in model.layer_facts):
        sizes["ffn neurons"] = dims.ffn
    if "shared_ffn" in dims.more:
        sizes["neurons of the shared expert"] = dims.more["shared_ffn"]
    fits = [n for n in divisors(dims.heads) if all(size % n == 0 for size in sizes.values())]
    return [
        InputError(f"--tp {spec.tp} does not divide {size} {name}", hint=f"--tp of {_list(fits)}")
        for name, size in sizes.items()
        if size % spec.tp
    ]


def _pipeline(layers: int, spec: RunSpec) -> list[InputError]:
    """Megatron cuts first and last stage apart from the others, and every stage into virtual ones."""
    if spec.pp > layers:
        return [InputError(f"--pp {spec.pp} needs as many layers, the model has {layers}")]
    first, last = spec.decoder_first_pipeline_num_layers, spec.decoder_last_pipeline_num_layers
    apart = [count for count in (first, last) if count is not None]
    if not apart:
        if layers % (spec.pp * spec.vp):
            stages = f"--pp {spec.pp}" + (f" times --vp {spec.vp}" if spec.vp > 1 else "")
            fits = [n for n in divisors(layers) if (layers // n) % spec.vp == 0]
            hint = f"--pp of {_list(fits)}" if fits else f"--vp of {_list(divisors(layers // spec.pp))}"
            return [InputError(f"{stages} does not divide {layers} layers", hint=hint)]
        return []
    left, stages_left = layers - sum(apart), spec.pp - len(apart)
    sizes = [*apart, left // stages_left] if stages_left else apart
    if left < stages_left or (left % stages_left if stages_left else left):
        what = f"{layers} layers less {' and '.join(map(str, apart))} do not divide into {stages_left} more stages"
        return [InputError(what, hint="change --decoder-first-pipeline-num-layers or --decoder-last-...")]
    if any(size % spec.vp for size in sizes):
        return [InputError(f"--vp {spec.vp} does not divide stages of {' and '.join(map(str, sizes))} layers")]
    return []


def _experts(model: Model, spec: RunSpec) -> list[InputError]:
    experts = model.dims.more.get("experts")
    if experts is None:
        flags = {"--ep": spec.ep > 1, "--etp": spec.etp is not None, "--moe-aux-loss-coeff": spec.moe_aux_loss_coeff}
        return [InputError(f"{flag} needs a model with experts, this has none") for flag, on in flags.items() if on]
    found, ffn = [], model.dims.more.get("moe_ffn", model.dims.ffn)
    if experts % spec.ep:
        hint = f"--ep of {_list(divisors(experts))}"
        found.append(InputError(f"--ep {spec.ep} does not divide {experts} experts", hint=hint))
    if ffn % spec.expert_tp:
        flag = "--etp" if spec.etp else "--tp"
        what = f"{flag} {spec.expert_tp} does not divide {ffn} neurons of an expert"
        found.append(InputError(what, hint=f"--etp of {_list(divisors(ffn))}"))
    if spec.tp > 1 and not spec.sp:
        found.append(InputError("Megatron trains experts under --tp with sequence parallelism only", hint="add --sp"))
    return found


def _latent(model: Model, spec: RunSpec) -> list[InputError]:
    """Multi-latent attention and what comes with it (DeepSeek)."""
    found = []
    if "mtp" in model.facts and model.dims.more.get("mtp"):
        found.append(InputError("multi-token-prediction layers are not trained, and would be lost"))
    if "kv_lora" not in model.dims.more:
        return found
    if spec.tp > 1:
        # Under --tp megatron-core 0.19.2's own layers sum the gradient of q_layernorm twice (MEGATRON.md).
        hint = "--tp 1, with --pp, --cp and --ep"
        found.append(InputError("models with latent attention train with --tp 1 only, for now", hint=hint))
    return found


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    return [n for n in range(1, number + 1) if number % n == 0]


def _list(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:8]))
