"""A model to read, whatever its layout: its tasks, and for each the blocks of files where its elements are.

Everything is matched before a byte of weights is read: a tensor that is missing, of another shape or dtype, or unknown,
is an error, and all such errors come at once. What is there and not converted is accounted for by name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from mst_convert import dequantise, training_state
from mst_convert.accounts import check_config, known_faults, tensor_faults
from mst_convert.adapters.names import is_adapter
from mst_convert.training_state import TrainingState
from mst_core import hf_weights, manifest, megatron_names, tensors, torch_dist
from mst_core.blocks import Array, Block, Coded, Place, Side, of_regions
from mst_core.errors import InputError, MstError, many
from mst_core.families import Family, Model, Region, Task, TensorSpec, family_for, tasks
from mst_core.megatron_names import Part
from mst_core.tensors import DTYPE_BYTES, TensorRef
from mst_core.torch_dist import StoredTensor


@dataclass
class Source:
    """A model that can be read.

    directory   where it is; ``hf_dir`` has its config.json and tokenizer
    dtypes      of each native tensor's sources, by Task.native
    left        sentences about what is there and not converted
    copies      duplicates that a Hugging Face directory ships (Model.duplicates), or that the manifest says it did
    replicas    pairs of arrays that must be equal: a copy, and what it is a copy of
    quantised   sentences about what is dequantised: then ``config`` is that of the plain model, the file's is not
    """

    layout: str
    directory: Path
    hf_dir: Path
    config: dict[str, Any]
    model: Model
    parent: manifest.Manifest | None
    tasks: list[Task]
    blocks: Callable[[Task], list[Block]]
    dtypes: dict[str, tuple[str, ...]]
    tensors: int
    weight_files: Callable[[], list[Path]]
    left: list[str] = field(default_factory=list)
    optimizer: bool = False
    """Whether there is optimizer state."""
    training: TrainingState | None = None
    """Of torch_dist: that state, and how it is called. ``training_state.carry`` makes tasks of it."""
    carried_rows: int = 0
    """Rows of the vocabulary that go along with the training state; 0 if it stays behind."""
    copies: tuple[str, ...] = ()
    replicas: list[tuple[Array, Array]] = field(default_factory=list)
    vocab_rows: int = 0
    dialect: str | None = None
    buffers: tuple[TensorRef, ...] = ()
    """Computed buffers of old Hugging Face checkpoints: a conversion leaves them out, a merge keeps them."""
    hf_dtypes: dict[str, str] = field(default_factory=dict)
    """Of a Hugging Face source: the dtype of each tensor (once dequantised)."""
    quantised: list[str] = field(default_factory=list)
    _last: tuple[str, Side] | None = None

    @property
    def family(self) -> Family:
        return self.model.family

    @property
    def weight_dtypes(self) -> set[str]:
        """The dtypes of the weights, whatever those of their training state."""
        state = self.training.of if self.training else {}
        return {dtype for native, found in self.dtypes.items() if native not in state for dtype in found}

    @property
    def kept(self) -> TrainingState | None:
        """The training state, if it is carried."""
        return self.training if self.carried_rows else None

    @cached_property
    def by_native(self) -> dict[str, Task]:
        return {task.native: task for task in self.tasks}

    def side(self, task: Task) -> Side:
        """The blocks of a task's matrix; rows of vocabulary padding are not among them."""
        known = self._last
        if known is not None and known[0] == task.native:  # the arrays of one task are asked for one after another
            return known[1]
        rows = self.by_native[task.native].rows
        blocks = self.blocks(self.by_native[task.native])
        side = Side(b._replace(rows=min(b.rows, rows - b.row)) for b in blocks if b.row < rows)
        self._last = (task.native, side)
        return side


EMBEDDING = "embedding.word_embeddings.weight"


def manifest_of(source: Path) -> manifest.Manifest | None:
    """The manifest, if the directory has one: it must be a model's."""
    if not (source / manifest.NAME).is_file():
        return None
    made = manifest.read(source)
    if made.kind not in ("model", "reward"):
        raise InputError(f"is no model but of the kind {made.kind}", where=source)
    return made


def read_model(where: Path, *, names: Collection[str] = (), dialect: str | None = None) -> tuple[dict[str, Any], Model]:
    """config.json and the model it describes."""
    config = tensors.config(where)
    check_config(config, where / "config.json")
    return config, model_of(config, where, names=names, dialect=dialect)


def model_of(config: dict[str, Any], where: Path, *, names: Collection[str], dialect: str | None = None) -> Model:
    """The model that the config.json in ``where`` describes."""
    path = where / "config.json"
    return family_for(config, path).model(config, path, names=names, dialect=dialect)


# --- Hugging Face ------------------------------------------------------------------------------------------------


def arrays_of(task: Task, spec_number: int, dtype: str, place: Place | None, coded: Coded | None = None) -> list[Array]:
    """The arrays of one Hugging Face tensor: one, or one an expert where a transposed tensor holds them all.

    A quantised tensor is one array of [out, in], transposed or not once it is plain.
    """
    spec = task.hf[spec_number]
    if coded is not None:
        return [Array(spec.name, dtype, spec.rows, spec.columns, place, coded=coded)]
    parts = spec.shape[0] if task.transposed and len(spec.shape) > 2 else 1
    rows = spec.rows // parts
    nbytes = rows * spec.columns * DTYPE_BYTES[dtype]
    return [
        Array(
            spec.name if parts == 1 else f"{spec.name}[{part}]",
            dtype,
            rows,
            spec.columns,
            place and Place(place.file, place.offset, skip=part * nbytes),
            task.transposed,
        )
        for part in range(parts)
    ]


def hf_blocks(task: Task, arrays: Sequence[Sequence[Array]]) -> list[Block]:
    """The blocks of a task's Hugging Face tensors, each given as its arrays."""
    found = []
    for block, region in zip(of_regions(task, [each[0] for each in arrays]), task.regions, strict=True):
        part, row = divmod(region.source_start, block.array.rows)
        found.append(block._replace(array=arrays[region.source][part], at_row=row))
    return found


def open_hf(directory: Path) -> Source:
    """A Hugging Face directory: safetensors, or pickled weights read without running them."""
    stored = hf_weights.headers(directory)
    config = tensors.config(directory)
    plain = dequantise.plain(stored, config, directory / "config.json")
    refs, coded = plain.refs, plain.coded
    config = {key: value for key, value in config.items() if key != "quantization_config"}
    model = model_of(config, directory, names=refs)
    work = tasks(model)
    wanted = {spec.name: spec.shape for task in work for spec in task.hf}
    buffers = sorted(name for name in refs if model.family.is_ignored(name, model.dims))
    duplicates = {copy: original for copy, original in model.duplicates().items() if copy in refs}
    faults = plain.faults
    for name, shape in wanted.items():
        if name not in refs:
            faults.append(InputError(f"missing, expected {list(shape)}", where=name))
        else:
            faults += tensor_faults(refs[name], shape)
    carried = [name for name in refs if name not in wanted and model.family.carried_native(name)]
    work += [carried_task(model, name, refs[name].shape) for name in sorted(carried)]
    known = {*wanted, *buffers, *duplicates, *carried}
    faults += known_faults(refs.keys() - known)
    for copy, original in duplicates.items():
        faults += tensor_faults(refs[copy], wanted[original])
    if faults:
        raise many(faults, what=f"{directory} does not hold a {model.family.architecture}:", hint=_hint(model))
    left = [f"{len(buffers)} computed buffers, like {buffers[0]}"] if buffers else []
    left += [
        f"{copy}, a copy of {original} (compared before anything is written)" for copy, original in duplicates.items()
    ]

    def blocks(task: Task) -> list[Block]:
        return hf_blocks(
            task,
            [
                arrays_of(task, n, refs[s.name].dtype, _place(refs[s.name]), coded.get(s.name))
                for n, s in enumerate(task.hf)
            ],
        )

    return Source(
        layout="hf",
        directory=directory,
        hf_dir=directory,
        config=config,
        model=model,
        parent=manifest_of(directory),
        tasks=work,
        blocks=blocks,
        dtypes={task.native: tuple(sorted({refs[spec.name].dtype for spec in task.hf})) for task in work},
        tensors=len(stored),
        weight_files=lambda: sorted({ref.file for ref in stored.values()}),
        left=left,
        copies=tuple(duplicates),
        replicas=[
            (_whole(refs[copy], coded.get(copy)), _whole(refs[original], coded.get(original)))
            for copy, original in duplicates.items()
        ],
        dialect=spoken(model),
        buffers=tuple(refs[name] for name in buffers),
        hf_dtypes={name: ref.dtype for name, ref in refs.items()},
        quantised=plain.sentences(),
    )


def spoken(model: Model) -> str | None:
    """The dialect of a model's Hugging Face names."""
    return next((name for name in model.family.dialects if model.facts.issuperset(name.split(" and "))), None)


def carried_task(model: Model, name: str, shape: tuple[int, ...]) -> Task:
    """A tensor that no rule maps and that passes as it is (a vision tower's), under its native name."""
    native = model.family.carried_native(name) or name
    rows = shape[0] if shape else 1
    spec = TensorSpec(name, shape, rows)
    return Task(native, native, None, model.dims.layers, None, (spec,), shape, (Region(0, 0, 0, rows),), "copy", False)


def _carried_back(model: Model, key: str) -> str | None:
    """The Hugging Face name of a carried native tensor; None if it is not one."""
    pairs = model.family.carried
    if len(pairs) > 1:
        pairs = pairs[list(model.family.dialects).index(spoken(model) or "") :][:1]
    for hf, native in pairs:
        if key.startswith(native):
            return hf + key.removeprefix(native)
    return None


def _place(ref: TensorRef) -> Place:
    return Place(ref.file, ref.offset)


def _whole(ref: TensorRef, coded: Coded | None) -> Array:
    return Array(ref.name, ref.dtype, prod(ref.shape[:1]), prod(ref.shape[1:]), _place(ref), coded=coded)


def _hint(model: Model) -> str:
    return f"config.json says {model.family.architecture}; is it the config.json of these weights?"


# --- Megatron ----------------------------------------------------------------------------------------------------


def config_dir(source: Path, hf_config: Path | None) -> Path:
    """Where config.json of a Megatron checkpoint is."""
    if hf_config is not None:
        return hf_config
    if not (source / "hf" / "config.json").is_file():
        raise InputError(
            "holds no hf/config.json, so the model is not known",
            where=source,
            hint="mst-convert --hf-config DIR: a Hugging Face directory of the same model (config.json and tokenizer)",
        )
    return source / "hf"


def open_torch_dist(source: Path, hf_config: Path | None = None) -> Source:
    """A torch_dist checkpoint of any parallel layout: stacked or per layer, of either spec, or a hybrid."""
    contents = torch_dist.contents(source)
    stored = contents.tensors
    if is_adapter(stored):
        hint = f"mst-convert adapter --model {source} --to peft --base BASE --out DIR"
        raise InputError("is an adapter of Megatron-Bridge or mcore-bridge, not a model", where=source, hint=hint)
    parent = manifest_of(source)
    hf_dir = config_dir(source, hf_config)
    encoding = parent.encoding if parent else {}
    config, model = read_model(hf_dir, dialect=encoding.get("dialect"))
    work = tasks(model)
    naming = megatron_names.detect(model, work, stored)
    carried = {key: name for key in sorted(stored) if (name := _carried_back(model, key))}
    work += [carried_task(model, name, stored[key].shape) for key, name in carried.items()]
    found: dict[str, list[tuple[Part, StoredTensor]]] = {}
    faults: list[MstError] = []
    for task in work:
        whole = Part(task.native, False, 0, task.rows)
        for part in [whole] if task.native in carried else naming.parts(task):
            if part.key not in stored:
                faults.append(InputError(f"missing, expected {list(_shape(task, part))}", where=part.key))
                continue
            found.setdefault(task.native, []).append((part, stored[part.key]))
            faults += _stored_faults(task, part, stored[part.key])
    used = {tensor.key for parts in found.values() for _, tensor in parts}
    left = sorted(stored.keys() - used)
    state = [key for key in left if key.startswith(("optimizer.", "rng_state", "rerun_state", "chained_"))]
    unknown = set(left) - set(state)
    faults += known_faults(unknown, tied=model.tied)
    if faults:
        raise many(faults, what=f"{source} does not hold a {model.family.architecture}:", hint=_hint(model))

    training = training_state.match(found, naming, stored, left, contents.objects)
    if training is not None:
        found |= training[1]

    def blocks(task: Task) -> list[Block]:
        made = []
        for part, tensor in found[task.native]:
            alone = task if part.rows == task.rows else replace(task, experts=None)
            placed = torch_dist.blocks(tensor, alone, task.layer if part.stacked else None)
            made += [block._replace(row=block.row + part.row) for block in placed]
        return made

    rows = next(parts[0][1].shape[0] for native, parts in found.items() if native.endswith(EMBEDDING))
    sentences = [f"{len(state)} tensors of training state"] if state or training else []
    if rows > model.dims.vocab:
        sentences.append(f"{rows - model.dims.vocab} rows of vocabulary padding")
    return Source(
        layout="megatron",
        directory=source,
        hf_dir=hf_dir,
        config=config,
        model=model,
        parent=parent,
        tasks=work,
        blocks=blocks,
        dtypes={native: tuple(sorted({t.dtype for _, t in parts})) for native, parts in found.items()},
        tensors=len(used),
        weight_files=lambda: _files(stored, source),
        left=sentences,
        optimizer=training is not None,
        training=training[0] if training else None,
        copies=shipped(model, encoding),
        vocab_rows=rows,
        dialect=encoding.get("dialect"),
    )


def _shape(task: Task, part: Part) -> tuple[int, ...]:
    """The shape of one part of a task, without a layer axis."""
    return task.shape if part.rows == task.rows else (part.rows, *task.shape[1 + (task.experts is not None) :])


def shipped(model: Model, encoding: Mapping[str, Any]) -> tuple[str, ...]:
    """The copies that the Hugging Face source had, so that the way back has them too."""
    shipped = encoding.get("duplicates", [])
    return tuple(name for name in model.duplicates() if name in shipped)


def _stored_faults(task: Task, part: Part, stored: StoredTensor) -> list[MstError]:
    shape, wanted = stored.shape[int(part.stacked) :], _shape(task, part)
    vocabulary = task.hf[0].shape[0] == task.rows and task.native.endswith(
        ("word_embeddings.weight", "output_layer.weight")
    )
    padded = vocabulary and shape[1:] == wanted[1:] and shape[:1] >= wanted[:1]
    layers = stored.shape[0] if part.stacked and stored.shape else task.layers
    if (shape != wanted and not padded) or layers != task.layers:
        expected = [task.layers, *wanted] if part.stacked else [*wanted]
        return [InputError(f"{list(stored.shape)}, expected {expected}", where=task.native)]
    if stored.dtype not in tensors.WEIGHT_DTYPES:
        return [InputError(f"has the dtype {stored.dtype}, which is no weight's", where=task.native)]
    return []


def _files(stored: Mapping[str, StoredTensor], source: Path) -> list[Path]:
    data = {chunk.file for tensor in stored.values() for chunk in tensor.chunks}
    return sorted({*data, torch_dist.checkpoint_dir(source) / ".metadata"})
