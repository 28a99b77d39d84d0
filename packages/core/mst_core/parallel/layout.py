"""What divides what: whether a model fits a parallel layout. Pure arithmetic, so that a plan can refuse."""

from __future__ import annotations

from pathlib import Path

from mst_core.errors import InputError, many
from mst_core.families.rules import Model
from mst_core.runspec import RunSpec


def check_layout(model: Model, spec: RunSpec, where: str | Path) -> None:
    """Raises InputError with every size that tensor or pipeline parallelism does not divide, and what would."""
    dims, found = model.dims, []
    for name, size in (
        ("attention heads", dims.heads),
        ("key-value heads", dims.groups),
        ("ffn neurons", dims.ffn),
    ):
        if size % spec.tp:
            fits = [n for n in divisors(dims.heads) if dims.groups % n == 0 and dims.ffn % n == 0]
            found.append(InputError(f"--tp {spec.tp} does not divide {size} {name}", hint=f"--tp of {_list(fits)}"))
    if spec.pp > dims.layers:
        found.append(InputError(f"--pp {spec.pp} needs as many layers, the model has {dims.layers}"))
    elif dims.layers % spec.pp:
        fits = divisors(dims.layers)
        found.append(InputError(f"--pp {spec.pp} does not divide {dims.layers} layers", hint=f"--pp of {_list(fits)}"))
    if len(found) == 1:
        raise InputError(found[0].what, where=where, hint=found[0].hint)
    if found:
        raise many(found, what=f"{where}: the model does not fit this layout:")


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    return [n for n in range(1, number + 1) if number % n == 0]


def _list(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:8]))
