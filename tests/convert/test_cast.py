"""Casts by numpy against torch's, every value of 16 bits and every kind of fp32."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch

from mst_convert.reading import cast
from mst_core.tensors import DTYPE_BYTES, torch_dtype


@pytest.mark.parametrize(("source", "target"), permutations(("BF16", "F16", "F32"), 2))
def test_a_cast_is_torchs(source: str, target: str) -> None:
    if source == "F32":
        generator = torch.Generator().manual_seed(0)
        bits = torch.randint(-(2**31), 2**31, (1 << 20,), generator=generator, dtype=torch.int64).to(torch.int32)
        halves = torch.arange(1 << 16, dtype=torch.int64)
        near = torch.cat([(halves << 16) + edge for edge in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)])
        values = torch.cat([bits, near.to(torch.int32)]).view(torch.float32)
        values = torch.cat([values, torch.randn(1 << 16, generator=generator) * 1e-6, torch.tensor([65519.0, 65520.0])])
    else:
        values = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch_dtype(source))
    raw = bytearray(values.view(torch.uint8).numpy().tobytes())
    into = bytearray(values.numel() * DTYPE_BYTES[target])
    cast(raw, source, target, memoryview(into))
    made = torch.frombuffer(into, dtype=torch_dtype(target))
    wanted = values.to(torch_dtype(target))
    assert torch.equal(made.isnan(), wanted.isnan())
    numbers = ~wanted.isnan()
    kind = torch.int32 if target == "F32" else torch.int16
    assert torch.equal(made.view(kind)[numbers], wanted.view(kind)[numbers])
