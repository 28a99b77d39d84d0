"""Legacy checkpoints as a source: every rank's tensors placed in native matrices (MAPPINGS.md 1.1, 1.2, 1.7, 1.9)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

from mst_convert.accounts import known_faults
from mst_convert.sources import EMBEDDING, Source, config_dir, manifest_of, read_model, shipped
from mst_core import legacy, megatron_names
from mst_core.blocks import Array, Block, Place, check_tiles
from mst_core.errors import InputError, MstError, many
from mst_core.families import Model, Task, tasks
from mst_core.legacy import Rank, RankTensor
from mst_core.tensors import DTYPE_BYTES, WEIGHT_DTYPES

HEAD = "output_layer.weight"
LAYER = re.compile(r"(decoder\.layers\.)(\d+)\.")


@dataclass(frozen=True)
class _Part:
    """What one rank holds of a task, or of one expert of it, as a matrix."""

    rank: Rank
    expert: int
    array: Array


def open_legacy(place: Path, hf_config: Path | None) -> Source:
    """``mp_rank_*`` files of any TP, PP, VPP and EP, with all three namings of experts."""
    ranks = legacy.read(place)
    parent = manifest_of(place)
    hf_dir = config_dir(place, hf_config)
    encoding = parent.encoding if parent else {}
    config, model = read_model(hf_dir, dialect=encoding.get("dialect"))
    work = tasks(model)
    parts, copies, faults = _sort(ranks, model, work)
    tp = max(rank.tp for rank in ranks) + 1
    blocks: dict[str, list[Block]] = {}
    replicas: list[tuple[Array, Array]] = []
    for task in work:
        try:
            blocks[task.native] = _place(task, parts.get(task.native, []), tp, replicas)
            check_tiles(blocks[task.native], task.rows, task.columns, task.native)
        except InputError as error:
            faults.append(error)
    if faults:
        raise many(faults, what=f"{place} does not hold a {model.family.architecture}:", hint="is it the right config?")
    embedding = next(task for task in work if task.native.endswith(EMBEDDING))
    replicas += [(copied, blocks[embedding.native][rank].array) for rank, copied in copies]
    rows = max(block.row + block.rows for block in blocks[embedding.native])
    training = sorted({name for rank in ranks for name in rank.training})
    left = [f"training state: {', '.join(training)}"] if training else []
    if rows > model.dims.vocab:
        left.append(f"{rows - model.dims.vocab} rows of vocabulary padding")
    if replicas:
        left.append(f"{len(replicas)} copies on other ranks (compared before anything is written)")
    return Source(
        layout="megatron-legacy",
        directory=place,
        hf_dir=hf_dir,
        config=config,
        model=model,
        parent=parent,
        tasks=work,
        blocks=lambda task: blocks[task.native],
        dtypes={native: tuple(sorted({b.array.dtype for b in found})) for native, found in blocks.items()},
        tensors=sum(len(stage) for rank in ranks for stage in rank.stages),
        weight_files=lambda: [rank.file for rank in ranks],
        left=left,
        optimizer="optimizer" in training,
        copies=shipped(model, encoding),
        replicas=replicas,
        vocab_rows=rows,
        dialect=encoding.get("dialect"),
    )


def _sort(
    ranks: list[Rank], model: Model, work: list[Task]
) -> tuple[dict[str, list[_Part]], list[tuple[int, Array]], list[MstError]]:
    """Which task each tensor of each rank belongs to; a tied embedding's copies, with their tensor rank; faults."""
    names: dict[str, Task] = {}
    for task in work:
        for spec in ("te", "local"):
            name = megatron_names.state_name(task.native, "te" if spec == "te" else "local")
            # Older megatron-core calls the body of an MTP layer what torch_dist keys still call it.
            names |= {name: task, name.replace(".mtp_model_layer.", ".transformer_layer."): task}
    first = _first_layers(ranks, model)
    experts = model.dims.more.get("experts", 0) // (max(rank.ep for rank in ranks) + 1)
    parts: dict[str, list[_Part]] = {}
    copies: list[tuple[int, Array]] = []
    unknown: list[str] = []
    for rank in ranks:
        for stage, tensors in enumerate(rank.stages):
            for key, tensor in sorted(tensors.items()):
                name = _globally(key, first[stage, rank.pp])
                for native, expert, array in _arrays(name, tensor, experts, f"{rank.file.parent.name}: {key}"):
                    if native in names:
                        task = names[native]
                        parts.setdefault(task.native, []).append(_Part(rank, rank.ep * experts + expert, array))
                    elif model.tied and native.endswith(HEAD):
                        copies.append((rank.tp, array))
                    else:
                        unknown.append(f"{rank.file.parent.name}: {key}")
    faults = known_faults(dict.fromkeys(unknown))
    for found in parts.values():
        faults += [
            InputError(f"has the dtype {part.array.dtype}, which is no weight's", where=part.array.name)
            for part in found
            if part.array.dtype not in WEIGHT_DTYPES
        ]
    return parts, copies, faults


def _globally(key: str, offset: int) -> str:
    """A name with the layer's number in the whole model."""
    return LAYER.sub(lambda match: f"{match[1]}{int(match[2]) + offset}.", key)


def _first_layers(ranks: list[Rank], model: Model) -> dict[tuple[int, int], int]:
    """The global number of each stage's first layer: stages follow one another, virtual ones outermost."""
    counts: dict[tuple[int, int], int] = {}
    for rank in ranks:
        for stage, tensors in enumerate(rank.stages):
            numbers = [int(match[2]) for key in tensors if (match := LAYER.search(key))]
            counts[stage, rank.pp] = max(numbers, default=-1) + 1
    first, total = {}, 0
    for place in sorted(counts):
        first[place] = total
        total += counts[place]
    if total != model.dims.layers:
        raise InputError(
            f"its stages hold {total} layers, config.json says {model.dims.layers}",
            where=ranks[0].file.parent.parent,
        )
    return first


def _arrays(name: str, tensor: RankTensor, experts: int, where: str) -> Iterator[tuple[str, int, Array]]:
    """(native name without expert, local expert, matrix) of a tensor; several of a legacy GroupedMLP's."""
    rows = tensor.shape[0] if tensor.shape else 1
    columns = prod(tensor.shape[1:])
    place = Place(tensor.file, tensor.offset)
    if match := re.fullmatch(r"(.*\.experts)\.local_experts\.(\d+)\.(.*)", name):
        yield f"{match[1]}.experts.{match[3]}", int(match[2]), Array(where, tensor.dtype, rows, columns, place)
    elif match := re.fullmatch(r"(.*\.experts)\.(linear_fc[12]\.(?:weight|bias))(\d+)", name):
        yield f"{match[1]}.experts.{match[2]}", int(match[3]), Array(where, tensor.dtype, rows, columns, place)
    elif match := re.fullmatch(r"(.*\.experts)\.weight([12])", name):
        # One flat buffer of experts, each stored [in, out] (megatron-core up to 0.16).
        shape = (rows, columns // experts) if match[2] == "1" else (rows // experts, columns)
        size = prod(shape) * DTYPE_BYTES[tensor.dtype]
        for expert in range(experts):
            at = Place(tensor.file, tensor.offset, skip=expert * size)
            array = Array(f"{where}[{expert}]", tensor.dtype, shape[1], shape[0], at, transposed=True)
            yield f"{match[1]}.experts.linear_fc{match[2]}.weight", expert, array
    else:
        yield name, 0, Array(where, tensor.dtype, rows, columns, place)


def _place(task: Task, parts: list[_Part], tp: int, replicas: list[tuple[Array, Array]]) -> list[Block]:
    """The blocks of a task. Copies on other ranks (tensor ranks of what is not cut, expert ranks of what is not an
    expert's) go to ``replicas``."""
    if not parts:
        raise InputError(f"missing, expected {list(task.shape)}", where=task.native)
    rows = task.rows // (task.experts or 1)
    found: list[Block] = []
    for expert in range(task.experts or 1):
        mine = [part for part in parts if task.experts is None or part.expert == expert]
        cuts = tp
        if task.experts and mine:  # an expert tensor parallel size of its own
            cuts = min(tp, rows * task.columns // max(1, mine[0].array.rows * mine[0].array.columns)) or 1
        shards: dict[int, Array] = {}
        for part in sorted(mine, key=lambda part: (part.rank.tp, part.rank.pp, part.rank.ep)):
            if part.rank.tp % cuts in shards:
                replicas.append((part.array, shards[part.rank.tp % cuts]))
            else:
                shards[part.rank.tp % cuts] = part.array
        if set(shards) != set(range(cuts)):
            raise InputError(f"{len(shards)} of {cuts} tensor parallel parts are there", where=task.native)
        found += _cut(task, expert * rows, rows, [shards[rank] for rank in range(cuts)], replicas)
    return found


def _cut(task: Task, base: int, rows: int, shards: list[Array], replicas: list[tuple[Array, Array]]) -> list[Block]:
    """One matrix from the shards of its tensor parallel ranks."""
    first, columns, tp = shards[0], task.columns, len(shards)
    axis = megatron_names.tensor_parallel_axis(task.native, "te")
    vocabulary = task.native.endswith((EMBEDDING, HEAD))
    if any((s.rows, s.columns) != (first.rows, first.columns) for s in shards):
        raise InputError("its tensor parallel parts differ in shape", where=task.native)
    whole = first.columns == columns and (first.rows == rows or (vocabulary and tp == 1 and first.rows >= rows))
    if whole and (tp == 1 or axis is None or not vocabulary):
        replicas += [(shard, first) for shard in shards[1:]]
        return [Block(base, first.rows, 0, columns, first)]
    if first.columns == columns and (first.rows * tp == rows or (vocabulary and first.rows * tp >= rows)):
        if task.native.endswith(("linear_fc1.weight", "linear_fc1.bias")):
            # Each rank holds its part of the gate above its part of the up projection (MAPPINGS.md 1.2).
            half = first.rows // 2
            return [
                Block(base + side * rows // 2 + rank * half, half, 0, columns, shard, at_row=side * half)
                for side in (0, 1)
                for rank, shard in enumerate(shards)
            ]
        return [Block(base + rank * first.rows, first.rows, 0, columns, s) for rank, s in enumerate(shards)]
    if axis == 1 and first.rows == rows and first.columns * tp == columns:
        return [Block(base, rows, rank * first.columns, first.columns, s) for rank, s in enumerate(shards)]
    raise InputError(
        f"{tp} parts of {[first.rows, first.columns]}, expected {[rows, columns]} in all", where=task.native
    )
