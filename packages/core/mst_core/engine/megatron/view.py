"""A torch_dist directory as megatron-core's own loader may see it: nothing in a foreign pickle runs.

megatron-core unpickles ``.metadata``, the common state and every object with full pickle. It gets a directory of links
to the data files with a table of contents of our own, written from the one that mst_core.torch_dist read by allow-list,
and is asked for tensors only.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from mst_core import torch_dist_write
from mst_core.errors import InputError
from mst_core.torch_dist import StoredTensor


def load(
    state: Mapping[str, Any], stored: Mapping[str, StoredTensor], where: Path, rename: Callable[[str], str] = str
) -> dict[str, Any]:
    """What megatron-core's default strictness loads into the sharded tensors of ``state`` ({name: sharded state}).

    Extra states are left out: they hold what FP8 keeps. ``rename`` gives a stored key the name that ``state`` asks for.
    InputError where megatron-core cannot load it.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.core import CheckpointingException
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    from torch.distributed.checkpoint.api import CheckpointException

    asked = {
        name: {key: entry for key, entry in part.items() if not isinstance(entry, ShardedObject)}
        for name, part in state.items()
    }
    with tempfile.TemporaryDirectory(prefix="mst-view-") as view:
        _write(stored, rename, Path(view))
        try:
            loaded: dict[str, Any] = dist_checkpointing.load(asked, view)
        except (CheckpointingException, CheckpointException, KeyError, ValueError) as error:
            raise InputError(f"megatron-core cannot load it: {error}", where=where) from error
    return loaded


def _write(stored: Mapping[str, StoredTensor], rename: Callable[[str], str], view: Path) -> None:
    chunks: list[torch_dist_write.Written] = []
    places: list[torch_dist_write.Place] = []
    for key, tensor in stored.items():
        name = rename(key)
        for chunk in tensor.chunks:
            chunks.append(torch_dist_write.Written(name, tensor.dtype, tensor.shape, chunk.offsets, chunk.sizes))
            places.append((name, chunk.offsets, chunk.file.name, chunk.file_offset, chunk.length))
            if not (view / chunk.file.name).exists():
                (view / chunk.file.name).symlink_to(chunk.file.absolute())
    for name, content in torch_dist_write.index(chunks, [], places).items():
        (view / name).write_bytes(content)
    torch.save({}, view / "common.pt")  # megatron-core wants a common state, and reads this one first
