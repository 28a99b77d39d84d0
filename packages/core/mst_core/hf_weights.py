"""The weights of a Hugging Face directory, safetensors or pickled: where each tensor's bytes are.

Pickled weights (pytorch_model.bin, one file or indexed) are read with the restricted unpickler of torch_pickle: nothing
in them runs, and the tensors' bytes are copied from their archive like any others.
"""

from __future__ import annotations

from pathlib import Path

from mst_core import tensors, torch_pickle
from mst_core.errors import InputError, MstError, many
from mst_core.tensors import TensorRef

BIN = "pytorch_model.bin"
BIN_INDEX = "pytorch_model.bin.index.json"


def headers(directory: Path) -> dict[str, TensorRef]:
    """Every tensor by name; safetensors first, where both are there. All faults in one InputError."""
    safe = any((directory / name).is_file() for name in (tensors.SINGLE, tensors.INDEX))
    if safe or not any((directory / name).is_file() for name in (BIN, BIN_INDEX)):
        return tensors.headers(directory)
    if not (directory / BIN_INDEX).is_file():
        return bin_headers(directory / BIN)
    index = directory / BIN_INDEX
    weight_map = tensors.read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError("has no weight_map", where=index)
    found: dict[str, TensorRef] = {}
    faults: list[MstError] = []
    for shard in sorted(set(map(str, weight_map.values()))):
        if Path(shard).name != shard or shard in (".", ".."):
            faults.append(InputError(f"names a shard outside the directory: {shard}", where=index))
            continue
        try:
            for name, ref in bin_headers(directory / shard).items():
                if name in found or weight_map.get(name) != shard:
                    faults.append(InputError(f"holds {name}, which the index does not put there", where=ref.file))
                found[name] = ref
        except InputError as error:
            faults.append(error)
    faults += [
        InputError(f"puts {name} in {shard}, which does not hold it", where=index)
        for name, shard in weight_map.items()
        if name not in found and not faults
    ]
    if faults:
        raise many(faults, what=f"{directory} cannot be read:", hint="download the directory again")
    return found


def bin_headers(path: Path) -> dict[str, TensorRef]:
    """Every tensor of one pickled file. InputError: missing, damaged, not a dictionary of dense tensors."""
    if not path.is_file():
        raise InputError("this shard is missing", where=path, hint="download the directory again")
    tree, storages = torch_pickle.open_archive(path)
    if not isinstance(tree, dict):
        raise InputError("is not a dictionary of tensors", where=path)
    found = {}
    for name, value in tree.items():
        if name == "_metadata":
            continue
        dtype, shape, offset, nbytes = torch_pickle.stored_tensor(value, storages, f"{path}: {name}")
        found[str(name)] = TensorRef(str(name), dtype, shape, path, offset, nbytes)
    return found
