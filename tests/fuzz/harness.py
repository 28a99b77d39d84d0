"""What the fuzzers share: valid tiny files by kind, and the reader that has to take or refuse what becomes of each."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mst_core import hf_weights, legacy, pickling, tensors, torch_dist, torch_pickle
from mst_core.errors import InputError
from mst_core.pickling import Global, Instance, Pairs
from mst_core.torch_dist_write import META

TENSORS: list[tensors.Wanted] = [("a", "BF16", (2, 3)), ("b.weight", "F32", (4,)), ("c", "I8", ())]


def archive(tree: Any, count: int = len(TENSORS)) -> bytes:
    """A torch.save archive of a tree with one storage for each of the first of TENSORS."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as zipped:
        zipped.writestr("archive/data.pkl", pickling.dumps(tree))
        zipped.writestr("archive/byteorder", b"little")
        for i, item in enumerate(TENSORS[:count]):
            zipped.writestr(f"archive/data/{i}", bytes(tensors.wanted_bytes(item)))
    return out.getvalue()


def state() -> dict[str, Any]:
    return {
        name: pickling.tensor_value(dtype, shape, str(i))
        for i, (name, dtype, shape) in enumerate(TENSORS)
        if shape and dtype in torch_pickle.STORAGES
    }


def metadata() -> bytes:
    """A ``.metadata`` of two tensors, one in two chunks, and an object."""
    chunks: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = [
        ("w", (0, 0), (1, 4)),
        ("w", (1, 0), (1, 4)),
        ("n", (0,), (3,)),
    ]
    shapes = {"w": (2, 4), "n": (3,)}
    entries: dict[str, Any] = {
        key: Instance(
            f"{META}.TensorStorageMetadata",
            {
                "properties": Instance(
                    f"{META}.TensorProperties", (Global("torch.bfloat16"), None, False, None, False)
                ),
                "size": shape,
                "chunks": [
                    Instance(f"{META}.ChunkStorageMetadata", {"offsets": offsets, "sizes": sizes})
                    for name, offsets, sizes in chunks
                    if name == key
                ],
            },
        )
        for key, shape in shapes.items()
    }
    entries["x"] = Instance(f"{META}.BytesStorageMetadata", {})
    places: list[tuple[Any, Any]] = []
    for number, (key, offset) in enumerate([*((c[0], c[1]) for c in chunks), ("x", None)]):
        index = Instance(f"{META}.MetadataIndex", {"fqn": key, "offset": offset, "index": None})
        info = {"relative_path": "__0_0.distcp", "offset": 100 * number, "length": 100}
        places.append((index, Instance("torch.distributed.checkpoint.filesystem._StorageInfo", info)))
    return pickling.dumps(Instance(f"{META}.Metadata", {"state_dict_metadata": entries, "storage_data": Pairs(places)}))


def read_metadata(data: bytes, directory: Path) -> object:
    (directory / ".metadata").write_bytes(data)
    torch_dist._contents.cache_clear()
    return torch_dist.contents(directory)


def written(name: str, read: Callable[[Path], object]) -> Callable[[bytes, Path], object]:
    def attempt(data: bytes, directory: Path) -> object:
        (directory / name).write_bytes(data)
        return read(directory)

    return attempt


def chunk(data: bytes, _: Path) -> object:
    return torch_pickle.tensor_data(lambda offset, count: data[offset : offset + count], len(data), "chunk")


Target = tuple[bytes, Callable[[bytes, Path], object]]
TARGETS: dict[str, Target] = {
    "safetensors": (
        tensors.safetensors_header(TENSORS) + bytes(sum(map(tensors.wanted_bytes, TENSORS))),
        written(tensors.SINGLE, tensors.headers),
    ),
    "index": (
        json.dumps({"weight_map": {name: "s.safetensors" for name, _, _ in TENSORS}}).encode(),
        written(tensors.INDEX, hf_weights.headers),
    ),
    "bin": (archive(state()), written(hf_weights.BIN, hf_weights.headers)),
    "mp_rank": (
        archive({"model": state(), "args": Instance("argparse.Namespace", {"x": 1}), "iteration": 2}),
        written("release/mp_rank_00/model_optim_rng.pt", legacy.read),
    ),
    "metadata": (metadata(), read_metadata),
    "chunk": (archive(state()["a"], 1), chunk),
    "pickle": (
        pickling.dumps([state(), {"k": (1, 2.5, None, True)}]),
        lambda data, _: torch_pickle.loads(data, "x"),
    ),
    "config": (b'{"hidden_size": 8, "rope": {"a": [1, 2.5]}}', written("config.json", tensors.config)),
    "tracker": (b"release", written(torch_dist.TRACKER, torch_dist.iteration_dir)),
}


def prepare(directory: Path) -> Path:
    """The files that stand beside those that are fuzzed."""
    (directory / "release" / "mp_rank_00").mkdir(parents=True)
    (directory / torch_dist.TRACKER).write_text("release")
    (directory / "s.safetensors").write_bytes(TARGETS["safetensors"][0])
    (directory / "__0_0.distcp").write_bytes(bytes(400))
    return directory


def attempt(kind: str, data: bytes, directory: Path) -> bool:
    """Whether ``data`` was taken; any exception but InputError is a fault."""
    for name in (tensors.SINGLE, tensors.INDEX, hf_weights.BIN):
        (directory / name).unlink(missing_ok=True)
    if kind != "tracker":
        (directory / torch_dist.TRACKER).write_text("release")
    try:
        TARGETS[kind][1](data, directory)
    except InputError as error:
        str(error)
        return False
    return True
