"""The one writer of Megatron checkpoints in the house: torch_dist, stacked, streamed one tensor at a time.

Layout (MEGATRON.md): ``PREFIX/__0_0.distcp`` holds one ``torch.save`` archive a chunk, one chunk ``(1, ...)`` a layer
of ``decoder.layers.<param>``; ``.metadata``, ``metadata.json``; the tracker file and ``hf/`` beside. Nothing in the
bytes depends on time, path, process or the version of torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mst_core import archive, torch_pickle
from mst_core.errors import InputError
from mst_core.tensors import dtype_name, raw
from mst_core.torch_pickle import Call, Instance

if TYPE_CHECKING:
    import torch

    from mst_core.checkpoint import HashingFile, Staging
    from mst_core.families import Config, Family

DATA = "__0_0.distcp"
META = "torch.distributed.checkpoint.metadata"
STORAGE_INFO = "torch.distributed.checkpoint.filesystem._StorageInfo"

LAYER_EXTRA_STATE = (
    "self_attention.linear_qkv",
    "self_attention.linear_proj",
    "self_attention.core_attention",
    "self_attention.q_layernorm",
    "self_attention.k_layernorm",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)
"""Modules with an ``_extra_state`` object in the local or the TransformerEngine spec. A missing one fails Megatron's
default strict load and a surplus one is ignored, so all are written."""
FINAL_EXTRA_STATE = "decoder.final_layernorm"


class TorchDistWriter:
    """``put`` every tensor, then ``finish``. Files go through ``staging`` (hashed while written) under ``prefix``/."""

    def __init__(self, staging: Staging, prefix: str = "release") -> None:
        self._staging = staging
        self.prefix = prefix
        self._context = staging.open(f"{prefix}/{DATA}")
        self._file: HashingFile = self._context.__enter__()
        self._position = 0
        self._tensors: dict[str, tuple[str, tuple[int, ...], list[tuple[tuple[int, ...], tuple[int, ...]]]]] = {}
        self._objects: list[str] = []
        self._storage: list[tuple[str, tuple[int, ...] | None, int, int]] = []
        self._layers = 0

    def put(self, key: str, tensor: torch.Tensor, layer: tuple[int, int] | None = None) -> None:
        """Append a tensor; ``layer=(i, L)``: as layer i of the stacked key, which has L layers in all.

        InputError: a layer or key twice, or a shape or dtype unlike that of the other layers.
        """
        shape = tuple(tensor.shape) if layer is None else (1, *tensor.shape)
        whole = shape if layer is None else (layer[1], *tensor.shape)
        offsets = (0,) * len(shape) if layer is None else (layer[0], *(0 for _ in tensor.shape))
        dtype = dtype_name(tensor.dtype)
        known = self._tensors.setdefault(key, (dtype, whole, []))
        if known[:2] != (dtype, whole) or any(offsets == other for other, _ in known[2]):
            raise InputError(f"{dtype} {list(whole)} at {list(offsets)} does not fit what was written", where=key)
        known[2].append((offsets, shape))
        if layer is not None:
            self._layers = layer[1]
        entries = archive.tensor_entries(torch_pickle.pickled_tensor(dtype, shape), [archive.whole(key, dtype, shape)])
        length = archive.write(self._file, entries, raw(tensor))
        self._append(key, offsets, length)

    def _append(self, key: str, offsets: tuple[int, ...] | None, length: int) -> None:
        self._storage.append((key, offsets, self._position, length))
        self._position += length

    def _put_object(self, key: str, value: Any) -> None:
        # megatron-core keeps every object in a list of one.
        self._objects.append(key)
        entries = archive.object_entries(torch_pickle.dumps([value]))
        self._append(key, None, archive.write(self._file, entries))

    def finish(self, common_state: Mapping[str, Any]) -> None:
        """Write objects, ``.metadata`` and ``metadata.json``. InputError if a stacked key lacks layers."""
        for key, (_, whole, chunks) in self._tensors.items():
            if len(chunks) != (whole[0] if len(chunks) > 1 or chunks[0][1] != whole else 1):
                raise InputError(f"{len(chunks)} of {whole[0]} layers were written", where=key)
        for module in LAYER_EXTRA_STATE:
            for layer in range(self._layers):
                self._put_object(f"decoder.layers.{module}._extra_state/shard_{layer}_{self._layers}", None)
        self._put_object(f"{FINAL_EXTRA_STATE}._extra_state/shard_0_1", None)
        self._put_object("common_state/shard_0_1", dict(common_state))
        self._context.__exit__(None, None, None)
        self._staging.write(f"{self.prefix}/.metadata", torch_pickle.dumps(self._metadata()))
        backend = json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1})
        self._staging.write(f"{self.prefix}/metadata.json", backend)

    def _metadata(self) -> Instance:
        entries: dict[str, Any] = {}
        for key, (dtype, whole, chunks) in self._tensors.items():
            listed = [
                Instance(f"{META}.ChunkStorageMetadata", {"offsets": _size(offsets), "sizes": _size(sizes)})
                for offsets, sizes in chunks
            ]
            properties = Instance(f"{META}.TensorProperties", _properties(dtype))
            state = {"properties": properties, "size": _size(whole), "chunks": listed}
            entries[key] = Instance(f"{META}.TensorStorageMetadata", state)
        for key in self._objects:
            entries[key] = Instance(f"{META}.BytesStorageMetadata", {})
        storage: list[tuple[Instance, Instance]] = []
        for key, offsets, start, length in self._storage:
            where = None if offsets is None else _size(offsets)
            index = Instance(f"{META}.MetadataIndex", {"fqn": key, "index": None, "offset": where})
            info = Instance(STORAGE_INFO, {"relative_path": DATA, "offset": start, "length": length})
            storage.append((index, info))
        state = {
            "state_dict_metadata": entries,
            "planner_data": None,
            "storage_data": torch_pickle.Pairs(storage),
            "storage_meta": None,
            "version": "1.0.0",
        }
        return Instance(f"{META}.Metadata", state)


def _size(values: tuple[int, ...]) -> Call:
    return Call("torch.Size", (tuple(values),))


def _properties(dtype: str) -> tuple[Any, ...]:
    """The state of TensorProperties: dtype, layout, requires_grad, memory format, pin_memory."""
    layout = Call("torch.serialization._get_layout", ("torch.strided",))
    contiguous = Call(f"{META}._MEM_FORMAT_ENCODING", (0,))
    return (torch_pickle.torch_dtype_global(dtype), layout, False, contiguous, False)


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


def release_state(family: Family, config: Config, vocab_rows: int, where: Path) -> dict[str, Any]:
    """The ``common_state`` of a ``release/`` directory: what Megatron-LM's training reads (MEGATRON.md).

    ``args`` lets ``--use-checkpoint-args`` build the model; it is left out where Megatron's arguments cannot say what
    config.json says (a rope scaling of its own), for a wrong model is worse than a question.
    ``vocab_rows``   rows of the embedding as written, padding included
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
        "rotary_interleaved": False,
        "add_bias_linear": False,
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
    return {**state, "args": Instance("argparse.Namespace", arguments)}
