"""DeepSpeed's configuration of a run: from the flags, over a user's own JSON where one is given. Pure, no torch.

A user's JSON chooses what changes no number (buckets, offload, NVMe). What the flags say too must agree, and what would
change numbers without mst knowing is refused by name. "auto" leaves a value to the flags.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mst_core.errors import SettingsError, many
from mst_core.runspec import RunSpec

OWN = ("zero_optimization", "aio", "steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state",
       "comms_logger", "flops_profiler")  # fmt: skip
"""What a user's JSON may hold as it likes."""
SET = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping",
       "bf16", "bfloat16", "fp16", "amp", "optimizer", "scheduler", "activation_checkpointing")  # fmt: skip
"""What the flags say as well."""
ADAMW = {"lr": "lr", "weight_decay": "weight_decay", "eps": "adam_eps"}
OFFLOADS = {"none": (), "optimizer": ("offload_optimizer",), "all": ("offload_optimizer", "offload_param")}
REFUSED = ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients",
           "zeropp_loco_param", "zenflow", "cpu_offload", "cpu_offload_params")  # fmt: skip
"""Of zero_optimization: they change numbers, or are old names."""
DEFAULT_STAGE = 2


def configuration(spec: RunSpec) -> dict[str, Any]:
    """What deepspeed.initialize gets. Raises SettingsError with everything in the user's JSON that contradicts.

    Rows are counted as the flags count them: a pair is one. Precision is checked once it is known (None before).
    """
    given, where = _given(spec)
    found = [SettingsError(what) for what in _contradictions(spec, given)]
    if found:
        raise many(
            found, what=f"{where} and the flags contradict each other:", hint='"auto" leaves a value to the flags'
        )
    stage = _stage(spec, given)
    if spec.precision == "bf16" and stage == 0:
        what = "DeepSpeed's bf16 without sharding (ZeRO 0) accumulates gradients in bf16, and was seen to diverge"
        raise SettingsError(what, hint="--zero 1 (or 2, 3), or --precision fp32")
    if spec.qlora and stage == 3:
        what = "--qlora: ZeRO 3 cuts weights into parts, which 4-bit ones with their scales are not made for"
        raise SettingsError(what, hint="--zero 2 or less, or --engine plain")
    if spec.offload == "all" and stage != 3:
        raise SettingsError(
            f"--offload all keeps weights in CPU memory, which ZeRO {stage} does not shard", hint="--zero 3"
        )
    if spec.offload != "none" and stage == 0:
        raise SettingsError("--offload needs sharded optimizer state", hint="--zero 1, 2 or 3")
    zero = {**given.get("zero_optimization", {}), "stage": stage}
    for name in OFFLOADS[spec.offload]:
        zero.setdefault(name, {"device": "cpu"})
    if spec.async_save and "nvme" in (_device(zero, name) for name in OFFLOADS["all"]):
        raise SettingsError("--async-save: what is on NVMe DeepSpeed writes itself, while the training waits")
    return {
        **{name: value for name, value in given.items() if name in OWN and value != "auto"},
        **_batches(spec),
        # Without sharding DeepSpeed steps whether or not the norm is finite, so mst clips (engine/deepspeed.py).
        "gradient_clipping": spec.clip_grad if stage else 0.0,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": spec.precision == "bf16"},
        "zero_optimization": {name: value for name, value in zero.items() if value != "auto"},
    }


def told(spec: RunSpec) -> dict[str, Any]:
    """What of it the manifest keeps: the stage, and the device of what is offloaded (``offload_optimizer``)."""
    zero = configuration(spec)["zero_optimization"]
    places = {name: _device(zero, name) for name in OFFLOADS["all"]}
    return {"zero": zero["stage"], **{name: device for name, device in places.items() if device != "none"}}


def _device(zero: dict[str, Any], name: str) -> str:
    return str((zero.get(name) or {}).get("device") or "none")


def _given(spec: RunSpec) -> tuple[dict[str, Any], str]:
    """The user's JSON, and what to call it."""
    if spec.deepspeed is None:
        return {}, ""
    if isinstance(spec.deepspeed, dict):
        return spec.deepspeed, "deepspeed:"
    path = Path(spec.deepspeed)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"--deepspeed: {error.strerror}", where=path) from error
    except ValueError as error:
        raise SettingsError(f"--deepspeed: is not JSON: {error}", where=path) from error
    if not isinstance(found, dict):
        raise SettingsError("--deepspeed: must hold names and values", where=path)
    return found, str(path)


def _batches(spec: RunSpec) -> dict[str, int]:
    return {
        "train_batch_size": spec.global_batch,
        "train_micro_batch_size_per_gpu": spec.micro_batch,
        "gradient_accumulation_steps": spec.global_batch // (spec.micro_batch * spec.dp),
    }


def _stage(spec: RunSpec, given: dict[str, Any]) -> int:
    named = given.get("zero_optimization", {}).get("stage", "auto")
    if spec.zero is not None:
        return spec.zero
    return DEFAULT_STAGE if named == "auto" else int(named)


def _contradictions(spec: RunSpec, given: dict[str, Any]) -> Iterator[str]:
    for name in given:
        if name not in OWN and name not in SET:
            yield f"{name}: mst does not know what it does to a run; remove it"
    for name in ("zero_optimization", "bf16", "bfloat16", "fp16", "amp", "optimizer"):
        if not isinstance(given.get(name, {}), dict):
            yield f"{name}: must hold names and values"
            return
    for name, value in {**_batches(spec), "gradient_clipping": spec.clip_grad}.items():
        if given.get(name, "auto") not in ("auto", value):
            yield f"{name} is {given[name]}, the flags make it {value}"
    if given.get("activation_checkpointing"):
        yield "activation_checkpointing: --recompute full is mst's; remove it"
    zero = given.get("zero_optimization", {})
    for name in REFUSED:
        if zero.get(name):
            yield f"zero_optimization.{name}: mst does not know what it does to a run; remove it"
    for name in OFFLOADS[spec.offload]:
        if name in zero and _device(zero, name) == "none":
            yield f"zero_optimization.{name} is on no device, --offload is {spec.offload}"
    stage = zero.get("stage", "auto")
    if stage not in ("auto", 0, 1, 2, 3):
        yield f"zero_optimization.stage is {stage!r}: it takes 0, 1, 2 or 3"
    elif stage != "auto" and spec.zero not in (None, stage):
        yield f"zero_optimization.stage is {stage}, --zero is {spec.zero}"
    yield from _precisions(spec, given)
    yield from _optimizers(spec, given)


def _precisions(spec: RunSpec, given: dict[str, Any]) -> Iterator[str]:
    for name in ("fp16", "amp"):
        if given.get(name, {}).get("enabled", False) not in (False, "auto"):
            yield f"{name} is enabled: --precision is fp32 or bf16"
    bf16 = {**given.get("bfloat16", {}), **given.get("bf16", {})}
    for name in bf16.keys() - {"enabled"}:
        yield f"bf16.{name}: mst does not know what it does to a run; remove it"
    half = bf16.get("enabled", "auto")
    if half != "auto" and spec.precision is not None and half != (spec.precision == "bf16"):
        yield f"bf16.enabled is {json.dumps(half)}, the precision is {spec.precision}"


def _optimizers(spec: RunSpec, given: dict[str, Any]) -> Iterator[str]:
    if given.get("scheduler"):
        yield "scheduler: --lr, --min-lr, --warmup and --schedule make the learning rate; remove it"
    optimizer = given.get("optimizer", {})
    if optimizer.get("type", "AdamW") != "AdamW":
        yield f"optimizer.type is {optimizer['type']}: mst trains with AdamW"
    wanted = {name: getattr(spec, field) for name, field in ADAMW.items()}
    wanted["betas"] = [spec.adam_beta1, spec.adam_beta2]
    for name, value in optimizer.get("params", {}).items():
        if name not in wanted:
            yield f"optimizer.params.{name}: mst does not know what it does to a run; remove it"
        elif value not in ("auto", wanted[name]):
            yield f"optimizer.params.{name} is {value}, the flags make it {wanted[name]}"
