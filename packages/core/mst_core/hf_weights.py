"""The weights of a Hugging Face directory, safetensors or pickled: where each tensor's bytes are.

Pickled weights (pytorch_model.bin, one file or indexed) are read with the restricted unpickler of torch_pickle: nothing
in them runs, and the tensors' bytes are copied from their archive like any others.
"""

from __future__ import annotations

from pathlib import Path

from mst_core import tensors, torch_pickle
from mst_core.errors import InputError
from mst_core.tensors import TensorRef

BIN = "pytorch_model.bin"
BIN_INDEX = "pytorch_model.bin.index.json"


def headers(directory: Path) -> dict[str, TensorRef]:
    """Every tensor by name; safetensors first, where both are there. All faults in one InputError."""
    safe = any((directory / name).exists() for name in (tensors.SINGLE, tensors.INDEX))
    if safe or not any((directory / name).exists() for name in (BIN, BIN_INDEX)):
        return tensors.headers(directory)
    if not (directory / BIN_INDEX).exists():
        return bin_headers(directory / BIN)
    return tensors.indexed(directory / BIN_INDEX, bin_headers)


def bin_headers(path: Path) -> dict[str, TensorRef]:
    """Every tensor of one pickled file. InputError: missing, damaged, not a dictionary of dense tensors."""
    tree, storages = torch_pickle.open_archive(path)
    if not isinstance(tree, dict):
        raise InputError("is not a dictionary of tensors", where=path)
    found = {}
    for name, value in tree.items():
        if name == "_metadata":
            continue
        if not isinstance(name, str):
            raise InputError(f"names a tensor {name!r:.100}", where=path)
        dtype, shape, offset, nbytes = torch_pickle.stored_tensor(value, storages, f"{path}: {name}")
        found[name] = TensorRef(name, dtype, shape, path, offset, nbytes)
    return found
