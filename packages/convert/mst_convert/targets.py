"""The files of an output, as recipes: which arrays each file holds, and which blocks of native matrices each array is.

hf        safetensors, one file or shards, in the order of the architecture
megatron  torch_dist: one chunk a layer (and expert), stacked or per layer, in one or more .distcp files
legacy    targets_legacy.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from mst_convert import training_state
from mst_convert.accounts import CASTS, uneven
from mst_convert.recipe import OutFile, Recipe
from mst_convert.sources import Source, arrays_of, hf_blocks
from mst_convert.training_state import Rest, task_of
from mst_core import tensors, torch_dist_write
from mst_core.archive import Segment
from mst_core.blocks import Array, Block, Move, moves
from mst_core.errors import many
from mst_core.families import Task, padded_vocab, tasks
from mst_core.megatron_names import Naming
from mst_core.tensors import Wanted
from mst_core.torch_dist_write import Written

KEPT_FP32 = ("router.expert_bias",)
"""Buffers that stay what they are under --dtype: a rounded bias selects other experts (MAPPINGS.md 1.7)."""


@dataclass
class Target:
    """An output.

    wanted   every tensor of it: name, dtype, shape
    last     makes the small files that say what stands where, written after the weights
    """

    recipe: Recipe
    wanted: list[Wanted]
    last: Callable[[], Mapping[str, bytes]]
    padding_rows: int = 0
    arrays: Mapping[str, Sequence[Array]] = field(default_factory=dict)
    """Of Hugging Face tensors: the arrays of each, by name."""
    form: str | None = None
    """Of torch_dist: stacked or per-layer."""
    tracker: str = "release"
    """Of Megatron: what latest_checkpointed_iteration.txt says."""
    repeats: bool = False
    """Whether elements are written more than once: legacy ranks keep copies of what is not cut."""

    @property
    def nbytes(self) -> int:
        return sum(map(tensors.wanted_bytes, self.wanted))


def dtype_of(source: Source, task: Task, cast: str | None) -> str:
    """The dtype in which a task is written."""
    if cast is None or task.native.endswith(KEPT_FP32) or training_state.STATE.match(task.native):
        return source.dtypes[task.native][0]
    return CASTS[cast]


class Feed:
    """The moves of each array of an output, made when they are asked for."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._blocks: dict[str, tuple[Task, list[Block]]] = {}

    def add(self, task: Task, blocks: Iterable[Block]) -> None:
        for block in blocks:
            self._blocks.setdefault(block.array.name, (task, []))[1].append(block)

    def alias(self, name: str, other: str) -> None:
        """An array whose elements are another one's."""
        self._blocks[name] = self._blocks[other]

    def moves(self, array: Array) -> list[Move]:
        task, blocks = self._blocks[array.name]
        return moves(blocks, self._source.side(task))


# --- Hugging Face ------------------------------------------------------------------------------------------------


def to_hf(source: Source, cast: str | None, max_shard_size: int) -> Target:
    """safetensors in the order of the architecture, a copy that the source shipped behind its original."""
    feed = Feed(source)
    arrays: dict[str, list[Array]] = {}
    wanted: dict[str, Wanted] = {}
    for task in source.tasks:
        dtype = dtype_of(source, task, cast)
        dtypes = [dtype if cast else source.hf_dtypes.get(spec.name, dtype) for spec in task.hf]
        each = [arrays_of(task, number, found, None) for number, found in enumerate(dtypes)]
        feed.add(task, hf_blocks(task, each))
        for spec, parts, found in zip(task.hf, each, dtypes, strict=True):
            arrays[spec.name] = parts
            wanted[spec.name] = (spec.name, found, spec.shape)
    order = list(wanted)
    duplicates = source.model.duplicates()
    for copy in source.copies:
        original = duplicates[copy]
        parts = [Array(copy, a.dtype, a.rows, a.columns, transposed=a.transposed) for a in arrays[original]]
        feed.alias(copy, arrays[original][0].name)
        arrays[copy] = parts
        wanted[copy] = (copy, *wanted[original][1:])
        order.insert(order.index(original) + 1, copy)
    files, index = [], {}
    parts_of = tensors.shards([wanted[name] for name in order], max_shard_size)
    for number, part in enumerate(parts_of):
        name = tensors.shard_name(number, len(parts_of))
        index.update({item[0]: name for item in part})
        files.append(OutFile(name, partial(_safetensors, part, arrays)))
    written = [wanted[name] for name in order]
    nbytes = sum(map(tensors.wanted_bytes, written))

    def last() -> dict[str, bytes]:
        return {tensors.INDEX: tensors.index_json(index, nbytes)} if len(files) > 1 else {}

    return Target(Recipe(files, feed.moves, source.copies), written, last, arrays=arrays)


def _safetensors(part: Sequence[Wanted], arrays: Mapping[str, Sequence[Array]]) -> Iterator[Segment]:
    yield tensors.safetensors_header(part)
    for name, _, _ in part:
        yield from arrays[name]


# --- torch_dist ----------------------------------------------------------------------------------------------------


def to_torch_dist(
    source: Source,
    cast: str | None,
    naming: Naming,
    vocab_padding: int,
    max_shard_size: int,
    state: Mapping[str, Any],
    rest: Rest | None = None,
) -> Target:
    """torch_dist as megatron-core writes it; ``state`` is its common_state, unless training state is carried.

    rest   what belongs to the training state and is no tensor
    """
    feed = Feed(source)
    mapped = tasks(source.model, vocab_padding)
    named = [(task, *naming.key(task)) for task in mapped]
    state_of = source.kept.of if source.kept else {}
    mine = {*(task.native for task in mapped), *state_of}
    named += [(task, task.native, False) for task in source.tasks if task.native not in mine]  # carried as they are
    known = {entry[0].native: entry for entry in named}
    objects = torch_dist_write.objects(named, state)
    if rest is not None:
        extra = [(name, rest.extra.get(name, none)) for name, none in torch_dist_write.extra_states(named)]
        objects = [*extra, *sorted(rest.objects.items())]
    for prefix, parameter in state_of.values():
        task, key, stacked = known[parameter]
        named.append((task_of(task, prefix), prefix + key, stacked))
    dtypes: dict[str, list[str]] = {}
    chunks: list[tuple[Written, Array]] = []
    for task, key, stacked in named:
        dtype = dtype_of(source, task, cast)
        dtypes.setdefault(key, []).extend([dtype] if cast else source.dtypes[task.native])
        rows = task.rows // (task.experts or 1)
        for expert in range(task.experts or 1):
            array = Array(f"{task.native}[{expert}]", dtype, rows, task.columns)
            feed.add(task, [Block(expert * rows, rows, 0, task.columns, array)])
            chunks.append((torch_dist_write.chunk_of(task, key, dtype, stacked, expert), array))
    if faults := uneven(dtypes):
        raise many(faults, what="Megatron keeps one dtype for all of a tensor:", hint="--dtype makes them one")
    layout = torch_dist_write.Layout(chunks, objects, max_shard_size)
    where = rest.where if rest else "release"
    files = [OutFile(f"{where}/{name}", partial(layout.segments, name)) for name in layout.files]
    wanted: dict[str, Wanted] = {chunk.key: (chunk.key, chunk.dtype, chunk.shape) for chunk, _ in chunks}

    def last() -> dict[str, bytes]:
        found = {**layout.index(), **(rest.files if rest else {})}
        return {f"{where}/{name}": data for name, data in found.items()}

    vocab = source.model.dims.vocab
    return Target(
        Recipe(files, feed.moves),
        list(wanted.values()),
        last,
        padded_vocab(vocab, vocab_padding) - vocab,
        form=naming.form,
        tracker=str(rest.iteration) if rest else "release",
    )
