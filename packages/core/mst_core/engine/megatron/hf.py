"""Weights in and out of a Hugging Face directory, through the family's rows.

Each rank reads only the bytes of its own slices: for every block it holds, the rows say which rectangle of which
Hugging Face tensor goes where (mst_core.blocks). Nothing is converted on disk, and no rank holds the whole model.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mst_core import families, megatron_names, tensors
from mst_core.blocks import Array, Block, Move, Place, Side, moves, of_regions
from mst_core.checkpoint import TOKENIZER_FILES, Staging
from mst_core.engine.megatron import shards
from mst_core.errors import InputError
from mst_core.families import Task


class HFDir:
    """A Hugging Face directory as where the weights come from, and what they are written as."""

    def __init__(self, model_dir: Path) -> None:
        self.model_dir = self.hf = model_dir
        self.config = tensors.config(model_dir)
        self.family = families.family_for(self.config, str(model_dir))
        self.stored = tensors.headers(model_dir)
        self.model = self.family.model(self.config, str(model_dir), names=self.stored)
        self.per_layer = not self.model.uniform
        naming = megatron_names.naming(self.model, "te", "per-layer" if self.per_layer else "stacked")
        self.tasks = {
            (key, task.layer if stacked else None): task
            for task in families.tasks(self.model)
            for key, stacked in [naming.key(task)]
        }

    def vocab_rows(self, tp: int) -> int:
        """Rows of the embedding: the vocabulary, rounded up to a multiple of the tensor parallel size."""
        return families.padded_vocab(self.model.dims.vocab, tp)

    def load(self, chunks: Sequence[Any]) -> None:
        """Every weight of this rank. InputError for a tensor that the family's rows do not know."""
        with torch.no_grad(), _Files() as files:
            for piece, data in shards.pieces(chunks, self.per_layer, main=False):
                task, row = self._task(piece.key, piece.lead)
                rows, columns = piece.shape[0], piece.shape[1] if len(piece.shape) > 1 else 1
                column = piece.offset[1] if len(piece.shape) > 1 else 0
                target = Block(row + piece.offset[0], rows, column, columns, Array(piece.key, "", rows, columns))
                data.zero_()  # rows of the padded vocabulary come from nowhere
                for move in moves([target], self._side(task)):
                    _copy(move, files, data.view(rows, columns))

    def save(self, chunks: Sequence[Any], staging: Staging | None) -> None:
        """A Hugging Face directory with the names, dtypes and configuration of this one."""
        copies = {original: copy for copy, original in self.model.duplicates().items() if copy in self.stored}
        order = sorted(self.tasks.items(), key=lambda item: (item[0][0], -1 if item[0][1] is None else item[0][1]))
        names = [spec.name for _, task in order for spec in task.hf]
        refs = [self.stored[name] for name in (*names, *(copies[name] for name in names if name in copies))]
        writer = None if staging is None else tensors.write_hf(staging, [(r.name, r.dtype, r.shape) for r in refs])
        parts: list[Tensor] = []
        last: dict[str, Tensor] = {}
        for key, lead, full in shards.gather(chunks, self.per_layer):
            if writer is None or full is None:
                continue
            task, _ = self._task(key, lead)
            parts.append(full)
            if len(parts) < (task.experts or 1):
                continue
            native = parts[0][: task.rows] if task.experts is None else torch.stack(parts)
            parts = []
            for spec, tensor in zip(task.hf, families.unpack(task, native), strict=True):
                made = tensor.to(tensors.torch_dtype(self.stored[spec.name].dtype)).contiguous()
                writer.put(spec.name, made)
                if spec.name in copies:
                    last[copies[spec.name]] = made
        if staging is None or writer is None:
            return
        for name, made in last.items():
            writer.put(name, made)
        writer.finish()
        for name in ("config.json", "generation_config.json", *TOKENIZER_FILES):
            if (self.model_dir / name).is_file():
                staging.copy(self.model_dir / name, name)

    def _task(self, key: str, lead: tuple[int, ...]) -> tuple[Task, int]:
        """The row of a block, and where in its native matrix the block's expert begins."""
        layer = None if self.per_layer or not key.startswith("decoder.layers.") else lead[0]
        task = self.tasks.get((key, layer))
        if task is None:
            raise InputError(f"no row of {self.family.name} gives {key}", where=self.model_dir)
        return task, lead[-1] * task.shape[1] if task.experts else 0

    def _side(self, task: Task) -> Side:
        if task.native not in self._sides:
            arrays = []
            for spec in task.hf:
                ref = self.stored[spec.name]
                if task.transposed:
                    raise InputError("is stored transposed, which is not read slice by slice", where=spec.name)
                arrays.append(Array(spec.name, ref.dtype, spec.rows, spec.columns, Place(ref.file, ref.offset)))
            self._sides[task.native] = Side(of_regions(task, arrays))
        return self._sides[task.native]

    @cached_property
    def _sides(self) -> dict[str, Side]:
        return {}


class _Files(ExitStack):
    """Files mapped into memory: only the pages that are copied from are read."""

    def __init__(self) -> None:
        super().__init__()
        self.maps: dict[Path, mmap.mmap] = {}

    def matrix(self, array: Array) -> Tensor:
        """(rows, columns), a view of the file."""
        place = array.place
        if place is None:
            raise InputError("has no place in a file", where=array.name)
        if place.file not in self.maps:
            file = self.enter_context(place.file.open("rb"))
            # A private map: torch has no tensor that refuses to be written to.
            self.maps[place.file] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        dtype, count = tensors.torch_dtype(array.dtype), array.rows * array.columns
        flat = torch.frombuffer(self.maps[place.file], dtype=dtype, count=count, offset=place.offset)
        return flat.view(array.rows, array.columns)


def _copy(move: Move, files: _Files, out: Tensor) -> None:
    """One rectangle into ``out`` (rows, columns), cast to its dtype."""
    source = files.matrix(move.source)
    rows = slice(move.from_row, move.from_row + move.rows * move.from_step, move.from_step)
    found = source[rows, move.from_column : move.from_column + move.columns]
    to = slice(move.to_row, move.to_row + move.rows * move.to_step, move.to_step)
    out[to, move.to_column : move.to_column + move.columns].copy_(found)
