"""The one writer of Megatron's torch_dist checkpoints in the house, one tensor at a time.

Layout (MEGATRON.md): ``PREFIX/__0_*.distcp`` hold one ``torch.save`` archive a chunk, one chunk a layer (and expert);
``.metadata``, ``metadata.json``; the tracker file and ``hf/`` beside. Nothing in the bytes depends on time, path,
process or the version of torch. ``Layout`` is for copying from files, ``TorchDistWriter`` for tensors in memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mst_core import archive, pickling
from mst_core.blocks import Array
from mst_core.errors import InputError
from mst_core.pickling import Call, Instance
from mst_core.tensors import dtype_name, raw

if TYPE_CHECKING:
    import torch

    from mst_core.checkpoint import HashingFile, Staging
    from mst_core.families import Config, Family, Task

META = "torch.distributed.checkpoint.metadata"
EMBEDDING = "embedding.word_embeddings.weight"
STORAGE_INFO = "torch.distributed.checkpoint.filesystem._StorageInfo"


@dataclass(frozen=True)
class Written:
    """A chunk of a tensor: the key, dtype and shape of the whole, where this chunk begins and how large it is."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def chunk_of(task: Task, key: str, dtype: str, stacked: bool, expert: int = 0) -> Written:
    """The chunk of a native tensor, or of one expert of it: [layer,] [expert,] rows, columns."""
    lead = ((task.layers,) if stacked else ()) + ((task.experts,) if task.experts else ())
    at = ((task.layer or 0,) if stacked else ()) + ((expert,) if task.experts else ())
    inner = task.shape[1:] if task.experts else task.shape
    return Written(key, dtype, (*lead, *inner), (*at, *(0 for _ in inner)), (*(1 for _ in lead), *inner))


def data_name(number: int) -> str:
    """The name of a data file."""
    return f"__0_{number}.distcp"


class Layout:
    """Where every chunk and object stands in which file, known before a byte of weights is read.

    chunks    each with the array that is copied into it, in order
    objects   (key, value) of what is no tensor, or bytes that are its archive; they follow the chunks in the last file
    """

    def __init__(
        self, chunks: Sequence[tuple[Written, Array]], objects: Iterable[tuple[str, Any]], max_file_bytes: int
    ) -> None:
        parts: list[list[list[archive.Entry] | bytes]] = [[]]
        lengths: dict[tuple[str, tuple[int, ...]], int] = {}
        self._places: list[Place] = []
        self._chunks = [chunk for chunk, _ in chunks]
        self._objects: list[str] = []
        check_filled(self._chunks)
        position = 0
        for chunk, array in chunks:
            if position and position + array.nbytes > max_file_bytes:
                parts.append([])
                position = 0
            entries = archive.tensor_entries(pickling.pickled_tensor(chunk.dtype, chunk.sizes), [array])
            alike = chunk.dtype, chunk.sizes
            length = lengths[alike] = lengths.get(alike) or archive.length(entries)
            self._places.append((chunk.key, chunk.offsets, data_name(len(parts) - 1), position, length))
            parts[-1].append(entries)
            position += length
        for key, value in objects:
            # megatron-core keeps every object in a list of one.
            held = value if isinstance(value, bytes) else archive.object_entries(pickling.dumps([value]))
            length = len(held) if isinstance(held, bytes) else archive.length(held)
            self._objects.append(key)
            self._places.append((key, None, data_name(len(parts) - 1), position, length))
            parts[-1].append(held)
            position += length
        self._parts = {data_name(number): part for number, part in enumerate(parts)}

    @property
    def files(self) -> list[str]:
        """The data files, in order."""
        return list(self._parts)

    def segments(self, file: str) -> Iterator[archive.Segment]:
        """A data file."""
        for held in self._parts[file]:
            if isinstance(held, bytes):
                yield held
            else:
                yield from archive.segments(held)

    def index(self) -> dict[str, bytes]:
        """``.metadata`` and ``metadata.json``."""
        return index(self._chunks, self._objects, self._places)


Place = tuple[str, tuple[int, ...] | None, str, int, int]
"""Key, offsets (None: an object), file, position in it, length."""


def check_filled(chunks: Iterable[Written]) -> dict[str, list[Written]]:
    """The chunks of each key. InputError if they do not fill it."""
    grouped: dict[str, list[Written]] = {}
    for chunk in chunks:
        grouped.setdefault(chunk.key, []).append(chunk)
    for key, parts in grouped.items():
        if sum(prod(part.sizes) for part in parts) != prod(parts[0].shape):
            raise InputError(f"{len(parts)} chunks do not fill {list(parts[0].shape)}", where=key)
    return grouped


def index(chunks: Iterable[Written], objects: Iterable[str], places: Iterable[Place]) -> dict[str, bytes]:
    """``.metadata`` and ``metadata.json``. InputError if a key's chunks do not fill it."""
    entries: dict[str, Any] = {}
    for key, parts in check_filled(chunks).items():
        first = parts[0]
        listed = [
            Instance(f"{META}.ChunkStorageMetadata", {"offsets": _size(part.offsets), "sizes": _size(part.sizes)})
            for part in parts
        ]
        properties = Instance(f"{META}.TensorProperties", _properties(first.dtype))
        state = {"properties": properties, "size": _size(first.shape), "chunks": listed}
        entries[key] = Instance(f"{META}.TensorStorageMetadata", state)
    for key in objects:
        entries[key] = Instance(f"{META}.BytesStorageMetadata", {})
    storage: list[tuple[Instance, Instance]] = []
    for key, offsets, file, start, length in places:
        where = None if offsets is None else _size(offsets)
        found = Instance(f"{META}.MetadataIndex", {"fqn": key, "index": None, "offset": where})
        info = Instance(STORAGE_INFO, {"relative_path": file, "offset": start, "length": length})
        storage.append((found, info))
    state = {
        "state_dict_metadata": entries,
        "planner_data": None,
        "storage_data": pickling.Pairs(storage),
        "storage_meta": None,
        "version": "1.0.0",
    }
    backend = json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1})
    return {
        ".metadata": pickling.dumps(Instance(f"{META}.Metadata", state)),
        "metadata.json": backend.encode(),
    }


def extra_states(named: Iterable[tuple[Task, str, bool]]) -> list[tuple[str, Any]]:
    """The ``_extra_state`` objects of a model: one for each module that has a weight, and for each core attention.

    Megatron's default strict load fails for a missing one and ignores a surplus one, so all that the local or the
    TransformerEngine spec could ask for are written. ``named`` are tasks with their key and whether it is stacked.
    """
    modules: dict[str, None] = {}
    for task, key, stacked in named:
        module = key.rpartition(".")[0]
        count = task.experts or 1
        for expert in range(count):
            at = ([task.layer] if stacked else []) + ([expert] if task.experts else [])
            of = ([task.layers] if stacked else []) + ([count] if task.experts else [])
            shard = f"{'.'.join(map(str, at)) or 0}_{'.'.join(map(str, of)) or 1}"
            modules[f"{module}._extra_state/shard_{shard}"] = None
            inside, found, _ = module.partition(".self_attention.")
            if found:
                modules[f"{inside}.self_attention.core_attention._extra_state/shard_{shard}"] = None
            if key.endswith(EMBEDDING):  # a tied output layer has no weight, but a HybridModel asks for its state
                modules[f"{key.removesuffix(EMBEDDING)}output_layer._extra_state/shard_0_1"] = None
    return [(key, None) for key in modules]


def objects(named: Iterable[tuple[Task, str, bool]], state: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """All objects of a checkpoint: extra states, and ``state`` as the common state."""
    return [*extra_states(named), ("common_state/shard_0_1", dict(state))]


class TorchDistWriter:
    """``put`` every tensor, then ``finish``: for engines, which have tensors and not files to copy from."""

    def __init__(self, staging: Staging, prefix: str = "release") -> None:
        self._staging = staging
        self.prefix = prefix
        self._context = staging.open(f"{prefix}/{data_name(0)}")
        self._file: HashingFile = self._context.__enter__()
        self._position = 0
        self._chunks: list[Written] = []
        self._whole: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._seen: set[tuple[str, tuple[int, ...]]] = set()
        self._objects: list[str] = []
        self._places: list[Place] = []

    def put(self, chunk: Written, tensor: torch.Tensor) -> None:
        """Append a chunk. InputError: twice, or a shape or dtype unlike the other chunks of its key."""
        whole = (dtype_name(tensor.dtype), chunk.shape)
        fits = self._whole.setdefault(chunk.key, whole) == whole == (chunk.dtype, chunk.shape)
        if not fits or (chunk.key, chunk.offsets) in self._seen or tensor.numel() != prod(chunk.sizes):
            raise InputError(
                f"{whole[0]} {list(chunk.shape)} at {list(chunk.offsets)} does not fit what was written",
                where=chunk.key,
            )
        self._seen.add((chunk.key, chunk.offsets))
        self._chunks.append(chunk)
        pickled = pickling.pickled_tensor(chunk.dtype, chunk.sizes)
        entries = archive.tensor_entries(pickled, [archive.whole(chunk.key, chunk.dtype, chunk.sizes)])
        self._append(chunk.key, chunk.offsets, archive.write(self._file, entries, raw(tensor)))

    def finish(self, objects: Iterable[tuple[str, Any]]) -> None:
        """Write objects, ``.metadata`` and ``metadata.json``. InputError if a key lacks chunks."""
        for key, value in objects:
            self._objects.append(key)
            self._append(key, None, archive.write(self._file, archive.object_entries(pickling.dumps([value]))))
        self._context.__exit__(None, None, None)
        for name, data in index(self._chunks, self._objects, self._places).items():
            self._staging.write(f"{self.prefix}/{name}", data)

    def _append(self, key: str, offsets: tuple[int, ...] | None, length: int) -> None:
        self._places.append((key, offsets, data_name(0), self._position, length))
        self._position += length


def _size(values: tuple[int, ...]) -> Call:
    return Call("torch.Size", (tuple(values),))


def _properties(dtype: str) -> tuple[Any, ...]:
    """The state of TensorProperties: dtype, layout, requires_grad, memory format, pin_memory."""
    layout = Call("torch.serialization._get_layout", ("torch.strided",))
    contiguous = Call(f"{META}._MEM_FORMAT_ENCODING", (0,))
    return (pickling.torch_dtype_global(dtype), layout, False, contiguous, False)


def write_megatron_sidecar(staging: Staging, hf_files: Mapping[str, Path | bytes], tracker: str = "release") -> None:
    """The tracker file, and ``hf/`` with config.json, generation_config.json and the tokenizer, byte for byte.

    ``hf_files``   name to the file to copy, or its content
    """
    staging.write("latest_checkpointed_iteration.txt", tracker)
    for name, source in sorted(hf_files.items()):
        if isinstance(source, bytes):
            staging.write(f"hf/{name}", source)
        else:
            staging.copy(source, f"hf/{name}")


def release_state(
    family: Family, config: Config, vocab_rows: int, where: Path, hybrid_pattern: str = ""
) -> dict[str, Any]:
    """The ``common_state`` of a ``release/`` directory: what Megatron-LM's training reads (MEGATRON.md).

    ``args`` lets ``--use-checkpoint-args`` build the model; it is left out where Megatron's arguments cannot say what
    config.json says (a rope scaling of its own), for a wrong model is worse than a question.
    ``vocab_rows``       rows of the embedding as written, padding included
    ``hybrid_pattern``   of a HybridModel, which counts attention and MLP as layers of their own
    """
    state: dict[str, Any] = {
        "checkpoint_version": 3.0,
        "iteration": 0,
        "content_metadata": {"singleton_local_shards": False, "chained_optim_avoid_prefix": True},
    }
    try:
        groups = family.megatron(config, where)
    except InputError:
        return state
    transformer, gpt = groups["transformer"], groups["gpt"]
    if groups["rope"]:
        return state
    layers, heads = transformer["num_layers"], transformer["num_attention_heads"]
    arguments = {
        "num_layers": layers,
        "hidden_size": transformer["hidden_size"],
        "ffn_hidden_size": transformer["ffn_hidden_size"],
        "num_attention_heads": heads,
        "num_query_groups": transformer["num_query_groups"],
        "group_query_attention": transformer["num_query_groups"] != heads,
        "kv_channels": transformer["kv_channels"],
        "max_position_embeddings": gpt["max_sequence_length"],
        "seq_length": gpt["max_sequence_length"],
        "position_embedding_type": "rope",
        "add_position_embedding": True,
        "use_rotary_position_embeddings": True,
        "rotary_base": gpt["rotary_base"],
        "rotary_percent": gpt["rotary_percent"],
        "rotary_interleaved": transformer.get("rotary_interleaved", False),
        "add_bias_linear": transformer["add_bias_linear"],
        "add_qkv_bias": transformer.get("add_qkv_bias", False),
        "qk_layernorm": transformer.get("qk_layernorm", False),
        "swiglu": True,
        "normalization": transformer["normalization"],
        "norm_epsilon": transformer["layernorm_epsilon"],
        "attention_dropout": transformer["attention_dropout"],
        "hidden_dropout": 0.0,
        "untie_embeddings_and_output_weights": not gpt["share_embeddings_and_output_weights"],
        "padded_vocab_size": vocab_rows,
        "iteration": 0,
    }
    if hybrid_pattern:
        arguments |= {"num_layers": len(hybrid_pattern), "hybrid_layer_pattern": hybrid_pattern}
    return {**state, "args": Instance("argparse.Namespace", arguments)}
