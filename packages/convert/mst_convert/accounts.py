"""What is wrong with what is there: faults of tensors, collected so that all come in one error. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from mst_core.errors import InputError, MstError
from mst_core.tensors import WEIGHT_DTYPES, TensorRef

CASTS = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
LM_HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def check_config(config: Mapping[str, object], where: Path) -> None:
    """Refuse a Megatron checkpoint whose config.json says quantised: its weights are plain, or they are not known."""
    quantization = config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, Mapping) else "unknown"
        raise InputError(
            f"says that the weights are quantised ({method}), and Megatron's can only be plain",
            where=where,
            hint="give the config.json of the unquantised model, or remove quantization_config if they are plain",
        )


def tensor_faults(ref: TensorRef, shape: tuple[int, ...]) -> list[MstError]:
    """A dtype that is no weight's, or another shape than the architecture's."""
    if ref.dtype not in WEIGHT_DTYPES:
        return [InputError(f"has the dtype {ref.dtype}, which is no plain weight's", where=ref.name)]
    if ref.shape != shape:
        return [InputError(f"{list(ref.shape)}, expected {list(shape)}", where=ref.name)]
    return []


def known_faults(unknown: Iterable[str], *, tied: bool = False) -> list[MstError]:
    """Tensors that the architecture does not have."""
    return [
        InputError(
            "not known to this architecture"
            + (" (config.json says tied)" if tied and name == "output_layer.weight" else ""),
            where=name,
        )
        for name in sorted(unknown)
    ]


def uneven(dtypes: Mapping[str, Iterable[str]]) -> list[MstError]:
    """Keys whose tensors have several dtypes."""
    return [
        InputError(f"its sources have several dtypes: {', '.join(sorted(set(found)))}", where=key)
        for key, found in dtypes.items()
        if len(set(found)) > 1
    ]
