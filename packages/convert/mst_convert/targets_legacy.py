"""Legacy checkpoints as a target: a file a rank, for any TP, PP, VPP and EP that divide the model (MAPPINGS.md 1.9)."""

from __future__ import annotations

from functools import partial
from typing import Any

from mst_convert.recipe import OutFile, Recipe
from mst_convert.sources import EMBEDDING, Source
from mst_convert.spec import ConvertSpec
from mst_convert.targets import Feed, Target, dtype_of
from mst_core import archive, legacy, megatron_names, torch_dist, torch_pickle
from mst_core.blocks import Array, Block
from mst_core.errors import InputError, many
from mst_core.families import Task, padded_vocab, tasks
from mst_core.tensors import Wanted
from mst_core.torch_pickle import Instance

HEAD = "output_layer.weight"
COLUMN_AND_ROW = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "core_attention")


def to_legacy(source: Source, spec: ConvertSpec) -> Target:
    """``release/mp_rank_*/model_optim_rng.pt`` for every rank."""
    _check(source, spec)
    padding = spec.vocab_padding * spec.tp
    work = tasks(source.model, padding)
    rows = padded_vocab(source.model.dims.vocab, padding)
    feed = Feed(source)
    state = _state(source, spec, rows)
    files: list[OutFile] = []
    wanted: list[Wanted] = []
    per = source.model.dims.layers // (spec.pp * spec.vp)
    for tp in range(spec.tp):
        for pp in range(spec.pp):
            for ep in range(spec.ep):
                where = legacy.rank_dir(tp, pp, ep, spec.pp > 1, spec.ep > 1)
                stages: list[dict[str, tuple[Array, tuple[int, ...]]]] = []
                for vp in range(spec.vp):
                    first = (vp * spec.pp + pp) * per
                    at = (first, per, first == 0, first + per == source.model.dims.layers)
                    stages.append(_stage(source, spec, feed, work, (tp, ep), at, f"{where}/{vp}"))
                entries = _entries(state, stages, spec.spec)
                files.append(OutFile(f"release/{where}/{legacy.FILE}", partial(archive.segments, entries)))
                wanted += [(a.name, a.dtype, (a.rows, a.columns)) for stage in stages for a, _ in stage.values()]
    target = Target(Recipe(files, feed.moves), wanted, dict, rows - source.model.dims.vocab)
    target.repeats = True
    return target


def _state(source: Source, spec: ConvertSpec, rows: int) -> dict[str, Any]:
    """What stands beside the model. Of ``args``, where there are any, Megatron-LM's load compares TP and PP too."""
    state = torch_dist.release_state(source.family, source.config, rows, source.hf_dir)
    if "args" in state:
        sizes = {
            "tensor_model_parallel_size": spec.tp,
            "pipeline_model_parallel_size": spec.pp,
            "virtual_pipeline_model_parallel_size": spec.vp if spec.vp > 1 else None,
            "expert_model_parallel_size": spec.ep,
        }
        state["args"] = Instance(state["args"].cls, {**state["args"].state, **sizes})
    return state


def _check(source: Source, spec: ConvertSpec) -> None:
    faults = []
    dims = source.model.dims
    if dims.layers % (spec.pp * spec.vp):
        faults.append(InputError(f"{dims.layers} layers do not divide into --pp {spec.pp} times --vp {spec.vp}"))
    if dims.more.get("mtp"):
        faults.append(InputError("multi-token-prediction layers have no legacy form here", hint="--to megatron"))
    experts = dims.more.get("experts", 1)
    if experts % spec.ep:
        faults.append(InputError(f"--ep {spec.ep} does not divide {experts} experts"))
    for task in source.tasks:
        axis = megatron_names.tensor_parallel_axis(task.native)
        size = (task.rows // (task.experts or 1), task.columns)[axis] if axis is not None else 0
        halves = 2 if "linear_fc1." in task.native else 1
        if axis is not None and size % (spec.tp * halves) and not task.native.endswith((EMBEDDING, HEAD)):
            faults.append(InputError(f"--tp {spec.tp} does not divide its {size // halves}", where=task.native))
    if spec.tp > 1 and any(task.native.endswith("experts.linear_fc2.bias") for task in source.tasks):
        faults.append(
            InputError("its experts have biases, which Megatron does not cut", hint="--tp 1, or --to megatron")
        )
    if faults:
        raise many(faults[:20], what=f"{source.directory} does not fit these parallel sizes:")


def _stage(
    source: Source,
    spec: ConvertSpec,
    feed: Feed,
    work: list[Task],
    rank: tuple[int, int],
    at: tuple[int, int, bool, bool],
    where: str,
) -> dict[str, tuple[Array, tuple[int, ...]]]:
    """The state dict of one (virtual) stage: name to array and shape, in order."""
    first, layers, begins, ends = at
    found: dict[str, tuple[Array, tuple[int, ...]]] = {}
    for task in work:
        head = task.native.endswith(("final_layernorm.weight", HEAD))
        if task.layer is None and not (ends if head else begins):
            if task.native.endswith(EMBEDDING) and source.model.tied and ends:
                # The last stage computes its logits with a copy of a tied embedding.
                name = task.native.replace(EMBEDDING, HEAD)
                found[name] = _part(source, spec, feed, task, 0, rank[0], f"{where}: {name}")
            continue
        if task.layer is not None and not first <= task.layer < first + layers:
            continue
        name = megatron_names.state_name(task.native, spec.spec)
        if task.layer is not None:
            name = name.replace(f"decoder.layers.{task.layer}.", f"decoder.layers.{task.layer - first}.", 1)
        if task.experts is None:
            found[name] = _part(source, spec, feed, task, 0, rank[0], f"{where}: {name}")
            continue
        each = task.experts // spec.ep
        for local in range(each):
            expert = megatron_names.expert_name(name, local, spec.experts == "grouped")
            number = rank[1] * each + local
            found[expert] = _part(source, spec, feed, task, number, rank[0], f"{where}: {expert}")
    return found


def _part(
    source: Source, spec: ConvertSpec, feed: Feed, task: Task, expert: int, tp: int, name: str
) -> tuple[Array, tuple[int, ...]]:
    """A rank's share of a task (of one expert of it)."""
    rows, columns = task.rows // (task.experts or 1), task.columns
    axis = megatron_names.tensor_parallel_axis(task.native) if spec.tp > 1 else None
    base, dtype = expert * rows, dtype_of(source, task, spec.dtype)
    if axis == 1:
        width = columns // spec.tp
        array = Array(name, dtype, rows, width)
        blocks = [Block(base, rows, tp * width, width, array)]
    elif axis == 0:
        height = rows // spec.tp
        array = Array(name, dtype, height, columns)
        if "linear_fc1." in task.native:
            half = height // 2
            blocks = [
                Block(base + side * rows // 2 + tp * half, half, 0, columns, array, at_row=side * half)
                for side in (0, 1)
            ]
        else:
            blocks = [Block(base + tp * height, height, 0, columns, array)]
    else:
        array = Array(name, dtype, rows, columns)
        blocks = [Block(base, rows, 0, columns, array)]
    feed.add(task, blocks)
    vector = len(task.shape) == 1 + (task.experts is not None)
    return array, (array.rows,) if vector else (array.rows, array.columns)


def _entries(
    state: dict[str, Any], stages: list[dict[str, tuple[Array, tuple[int, ...]]]], spec: str
) -> list[tuple[str, bytes | Array]]:
    """The entries of a rank's archive."""
    arrays: list[Array] = []
    tree: dict[str, Any] = {name: value for name, value in state.items() if name != "content_metadata"}
    for number, stage in enumerate(stages):
        values: dict[str, Any] = {}
        for name, (array, shape) in stage.items():
            values[name] = torch_pickle.tensor_value(array.dtype, shape, str(len(arrays)))
            arrays.append(array)
        values |= dict.fromkeys(_extra_states(stage, spec))
        tree["model" if len(stages) == 1 else f"model{number}"] = values
    return archive.tensor_entries(torch_pickle.dumps(tree), arrays)


def _extra_states(stage: dict[str, Any], spec: str) -> list[str]:
    """The ``_extra_state`` entries (None: nothing in it) that a strict load of a state dict takes.

    The local spec's linear layers have one, and its other modules refuse one. TransformerEngine
    gives one to core attentions too, and to norms that are modules of their own (ops/op.py, read, not run).
    """
    modules = dict.fromkeys(name.rpartition(".")[0] for name in stage)
    linear = [module for module in modules if ".linear_" in module]
    if spec == "local":
        return [f"{module}._extra_state" for module in linear]
    attention = [m.replace(".linear_proj", ".core_attention") for m in linear if m.endswith(".linear_proj")]
    norms = [module for module in modules if module.endswith("norm")]
    return [f"{module}._extra_state" for module in (*linear, *attention, *norms)]
