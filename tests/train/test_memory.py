"""The loop holds nothing that grows with the steps it has done."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.launch import alone


def grows(model: Path, where: Path, steps: int) -> dict[str, float]:
    found = alone("tests.train.memory_process", {"model": str(model), "steps": steps}, where)
    print(found)
    return {name: found["late"][name] - found["early"][name] for name in ("objects", "peak")}


def test_memory_is_flat(tiny_hf: Callable[..., Path], tmp_path: Path) -> None:
    """100 steps more; a metrics row that is kept would be 700 bytes a step."""
    grown = grows(tiny_hf("llama", num_hidden_layers=1), tmp_path, 200)
    assert grown["objects"] < 30_000
    assert grown["peak"] < 4 << 20


@pytest.mark.slow
def test_memory_is_flat_over_500_steps(tiny_hf: Callable[..., Path], tmp_path: Path) -> None:
    grown = grows(tiny_hf("llama", num_hidden_layers=1), tmp_path, 550)
    assert grown["objects"] < 30_000
    assert grown["peak"] < 4 << 20
