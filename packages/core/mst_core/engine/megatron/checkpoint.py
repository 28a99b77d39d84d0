"""Weights in and out of a Megatron directory: in by megatron-core's own loader, out tensor by tensor to rank 0 and our
one writer.

Megatron's writer puts a random id, and an order that depends on the ranks, into its files. A finished checkpoint of
ours is the same bytes under any layout, so it goes through mst_core.torch_dist.TorchDistWriter.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mst_core import families, megatron_names, tensors, torch_dist
from mst_core.checkpoint import Staging
from mst_core.engine.megatron import shards, view
from mst_core.errors import InputError


class MegatronDir:
    """A Megatron directory as where the weights come from, and what they are written as."""

    def __init__(self, model_dir: Path) -> None:
        self.model_dir, self.hf = model_dir, model_dir / "hf"
        self.config = json.loads((self.hf / "config.json").read_text())
        self.family = families.family_for(self.config, str(self.hf))
        self.stored = torch_dist.metadata(torch_dist.checkpoint_dir(model_dir))
        self.model = megatron_names.model_of(self.family, self.config, self.stored, str(self.hf))
        self.naming = megatron_names.detect(self.model, families.tasks(self.model), self.stored)
        if self.naming.spec != "te" or self.naming.fsdp or self.naming.prefix:
            hint = f"mst-convert --model {model_dir} --to megatron --out {model_dir}-te"
            raise InputError("its tensors are not named as by TransformerEngine's spec", where=model_dir, hint=hint)
        self.per_layer = self.naming.form == "per-layer"

    def vocab_rows(self, tp: int) -> int:
        """Rows of the embedding: those of the directory, rounded up to a multiple of the tensor parallel size."""
        return families.padded_vocab(self.stored["embedding.word_embeddings.weight"].shape[0], tp)

    def load(self, chunks: Sequence[Any]) -> None:
        """Every weight of this rank, with megatron-core's default strictness. InputError with what is missing."""
        directory = torch_dist.checkpoint_dir(self.model_dir)
        state = view.load(shards.state_of(chunks, self.per_layer), self.stored, directory)
        for number, chunk in enumerate(chunks):
            missing, unexpected = chunk.load_state_dict(state[f"model{number}"], strict=False)
            unloaded = [name for name in missing if "_extra_state" not in name]
            if unloaded or unexpected:
                raise InputError(f"not loaded: {', '.join([*unloaded, *unexpected])}", where=directory)

    def save(self, chunks: Sequence[Any], staging: Staging | None) -> None:
        """A Megatron directory with the dtypes, the vocabulary padding, the keys and the ``hf/`` of this one."""
        writer = None if staging is None else torch_dist.TorchDistWriter(staging)
        for key, lead, full in shards.gather(chunks, self.per_layer):
            if writer is None or full is None:
                continue
            found, axes = self.stored[key], len(lead)
            shape = found.shape[axes:]
            # The engine may pad the vocabulary further than the directory it came from: those rows are dropped again.
            kept = full[: shape[0]].to(tensors.torch_dtype(found.dtype)).contiguous()
            chunk = torch_dist.Written(
                key, found.dtype, found.shape, (*lead, *(0 for _ in shape)), (*(1 for _ in lead), *shape)
            )
            writer.put(chunk, kept)
        if staging is None or writer is None:
            return
        rows = self.stored["embedding.word_embeddings.weight"].shape[0]
        named = [(task, *self.naming.key(task)) for task in families.tasks(self.model)]
        state = torch_dist.release_state(self.family, self.config, rows, self.hf)
        writer.finish(torch_dist.objects(named, state))
        files = {path.name: path for path in sorted(self.hf.iterdir()) if path.is_file()}
        torch_dist.write_megatron_sidecar(staging, files)
