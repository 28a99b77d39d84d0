"""The base of a merge, in any layout, as Hugging Face tensors: which there are (headers), and one after the other.

All layouts give the same tensors in the same order, so that a merge into one equals a merge into the other byte for
byte.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from mst_convert import targets
from mst_convert.plan import layout_of, open_source
from mst_convert.reading import Sources, stretches
from mst_convert.sources import Source
from mst_core import tensors
from mst_core.errors import InputError
from mst_core.tensors import Wanted

if TYPE_CHECKING:
    import torch

    from mst_convert.targets import Target

WHOLE = 1 << 62
"""No limit on a file's size: the merge shards by itself."""


def open_base(place: Path) -> Source:
    """The base in ``place``, its headers matched with its architecture. InputError for all that does not fit."""
    layout = layout_of(place)
    if layout == "gguf":
        hint = f"mst-convert --model {place} --to hf --out DIR, and merge into that"
        raise InputError("is a GGUF file; its weights are quantised and rounded again if they change", hint=hint)
    return open_source(place, layout)


def wanted(source: Source) -> list[Wanted]:
    """Name, dtype and shape of every tensor to write, in the order in which ``stream`` gives them."""
    return [*_target(source).wanted, *((ref.name, ref.dtype, ref.shape) for ref in source.buffers)]


def stream(source: Source) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of ``wanted``, read when its turn comes: one is in memory."""
    import torch

    target, reading = _target(source), Sources()
    for name, dtype, shape in target.wanted:
        data = bytearray(sum(array.nbytes for array in target.arrays[name]))
        view, position = memoryview(data), 0
        for array in target.arrays[name]:
            for made in stretches(array, target.recipe.moves(array), reading):
                view[position : position + len(made)] = made
                position += len(made)
        empty = torch.empty(0, dtype=tensors.torch_dtype(dtype))
        yield name, (torch.frombuffer(data, dtype=empty.dtype) if data else empty).reshape(shape)
        del data, view  # or they would live on while the next one is read
    reading.close()
    for ref in source.buffers:
        yield ref.name, tensors.read(ref)


def _target(source: Source) -> Target:
    return targets.to_hf(source, None, WHOLE)
