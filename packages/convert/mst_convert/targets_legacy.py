"""Legacy checkpoints as a target: a file a rank, for any TP, PP, VPP and EP that divide the model (MAPPINGS.md 1.9)."""

from __future__ import annotations

from functools import partial
from typing import Any

from mst_convert.recipe import OutFile, Recipe
from mst_convert.sources import EMBEDDING, Source
from mst_convert.spec import ConvertSpec
from mst_convert.targets import Feed, Target, dtype_of
from mst_core import archive, legacy, megatron_names, pickling, torch_dist
from mst_core.blocks import Array, Block
from mst_core.errors import InputError, MstError, many
from mst_core.families import Task, padded_vocab, tasks
from mst_core.pickling import Instance
from mst_core.tensors import Wanted

HEAD = "output_layer.weight"


def to_legacy(source: Source, spec: ConvertSpec) -> Target:
    """``release/mp_rank_*/model_optim_rng.pt`` for every rank."""
    split = _split(source, spec)
    ranks = _Ranks(source, spec, split)
    rows = padded_vocab(source.model.dims.vocab, spec.vocab_padding * spec.tp)
    state = _state(source, spec, rows, ranks.mtp)
    files: list[OutFile] = []
    wanted: list[Wanted] = []
    for tp, ep in sorted(legacy.meeting(spec.tp, spec.ep, spec.expert_tp)):
        for pp in range(spec.pp):
            where = legacy.rank_dir(tp, pp, ep, spec.pp > 1, spec.ep > 1)
            stages = [ranks.stage(tp, ep, split[vp, pp], (vp, pp), f"{where}/{vp}") for vp in range(spec.vp)]
            entries = _entries(state, stages, spec.spec)
            files.append(OutFile(f"release/{where}/{legacy.FILE}", partial(archive.segments, entries)))
            wanted += [(each[0].name, each[0].dtype, shape) for stage in stages for each, shape in stage.values()]
    target = Target(Recipe(files, ranks.feed.moves), wanted, dict, rows - source.model.dims.vocab)
    target.repeats = True
    return target


def _state(source: Source, spec: ConvertSpec, rows: int, mtp: int) -> dict[str, Any]:
    """What stands beside the model. Of ``args``, where there are any, Megatron-LM's load compares TP and PP too."""
    state = torch_dist.release_state(source.family, source.config, rows, source.hf_dir)
    if "args" in state:
        sizes = {
            "tensor_model_parallel_size": spec.tp,
            "pipeline_model_parallel_size": spec.pp,
            "virtual_pipeline_model_parallel_size": spec.vp if spec.vp > 1 else None,
            "expert_model_parallel_size": spec.ep,
            "expert_tensor_parallel_size": spec.expert_tp,
            "decoder_first_pipeline_num_layers": spec.first_stage_layers,
            "decoder_last_pipeline_num_layers": spec.last_stage_layers,
            "account_for_embedding_in_pipeline_split": spec.account_for_embedding,
            "account_for_loss_in_pipeline_split": spec.account_for_loss,
            "mtp_num_layers": mtp or None,
        }
        state["args"] = Instance(state["args"].cls, {**state["args"].state, **sizes})
    return state


def _split(source: Source, spec: ConvertSpec) -> dict[tuple[int, int], range]:
    """The layers of each (virtual stage, stage). InputError with all that does not fit the parallel sizes."""
    faults: list[MstError] = []
    if source.model.scores:
        faults.append(InputError("a reward model's head has no place in legacy files", hint="--to megatron has it"))
    split = {}
    try:
        split = legacy.deal(
            source.model.dims.layers,
            spec.pp,
            spec.vp,
            first=spec.first_stage_layers,
            last=spec.last_stage_layers,
            embedding=spec.account_for_embedding,
            loss=spec.account_for_loss,
        )
    except InputError as error:
        faults.append(error)
    experts = source.model.dims.more.get("experts", 1)
    if experts % spec.ep:
        faults.append(InputError(f"--ep {spec.ep} does not divide {experts} experts"))
    carried = [task.native for task in source.tasks if source.model.family.carried_native(task.hf[0].name)]
    if carried:
        said = f"{len(carried)} tensors that no layer of Megatron has, like {carried[0]}, have no place in legacy files"
        faults.append(InputError(said, hint="--to megatron carries them"))
    for task in source.tasks:
        axis = megatron_names.tensor_parallel_axis(task.native, spec.spec)
        size = (task.rows // (task.experts or 1), task.columns)[axis] if axis is not None else 0
        halves = 2 if "linear_fc1." in task.native else 1
        flag, parts = ("--etp", spec.expert_tp) if task.experts and spec.etp else ("--tp", spec.tp)
        if axis is not None and size % (parts * halves) and not task.native.endswith((EMBEDDING, HEAD)):
            faults.append(InputError(f"{flag} {parts} does not divide its {size // halves}", where=task.native))
    if any(task.native.endswith("experts.linear_fc2.bias") for task in source.tasks):
        if spec.expert_tp > 1:
            hint = "--etp 1 leaves them whole, or --to megatron"
            faults.append(InputError("its experts have biases, which Megatron does not cut", hint=hint))
        if spec.experts == "legacy-grouped":
            faults.append(InputError("its experts have biases, which GroupedMLP never had", hint="--experts grouped"))
    if faults:
        raise many(faults[:20], what=f"{source.directory} does not fit these parallel sizes:")
    return split


Stage = dict[str, tuple[list[Array], tuple[int, ...]]]
"""The state dict of a (virtual) stage: name to arrays, one behind the other in one tensor, and the tensor's shape."""


class _Ranks:
    """What each rank has of a model; ``feed`` gets to know where its elements come from."""

    def __init__(self, source: Source, spec: ConvertSpec, split: dict[tuple[int, int], range]) -> None:
        self.source, self.spec, self.feed = source, spec, Feed(source)
        self.work = tasks(source.model, spec.vocab_padding * spec.tp)
        self.mtp = len({task.native.split(".")[2] for task in self.work if task.native.startswith("mtp.")})
        self.first, self.last = min(split), max(split)
        layers = source.model.dims.layers
        # Megatron norms behind the last layer where MTP layers follow, else where the logits are made.
        self.norm = next(at for at, mine in split.items() if layers - 1 in mine) if self.mtp else self.last

    def stage(self, tp: int, ep: int, layers: range, at: tuple[int, int], where: str) -> Stage:
        """The state dict of tensor rank ``tp``, expert rank ``ep`` at the (virtual stage, stage) ``at``, in order."""
        found: Stage = {}
        for task in self.work:
            if not (task.layer in layers if task.layer is not None else at in self._places(task)):
                continue
            name = megatron_names.state_name(task.native, self.spec.spec)
            if self.spec.experts == "legacy-grouped":  # the same megatron-core 0.17 that removed it renamed this
                name = name.replace(".mtp_model_layer.", ".transformer_layer.")
            if task.layer is not None:
                local = task.layer - layers.start
                name = name.replace(f"decoder.layers.{task.layer}.", f"decoder.layers.{local}.", 1)
            elif task.native.endswith(EMBEDDING) and at == self.last != self.first:
                if self.source.model.tied:  # the last stage computes its logits with a copy of the embedding
                    head = name.replace(EMBEDDING, HEAD)
                    found[head] = self._tensor(task, 0, tp, f"{where}: {head}")
                if not self.mtp:
                    continue
            if task.experts is None:
                found[name] = self._tensor(task, 0, tp, f"{where}: {name}")
            else:
                found |= self._experts(task, name, tp % self.spec.expert_tp, ep, where)
        return found

    def _places(self, task: Task) -> set[tuple[int, int]]:
        """The stages of what belongs to no decoder layer. MTP layers are on the last one, and use the embedding."""
        if task.native.endswith(EMBEDDING):
            return {self.first, self.last}
        if task.native.startswith("mtp.") or task.native.endswith(HEAD):
            return {self.last}
        return {self.norm if task.native.endswith("final_layernorm.weight") else self.first}

    def _experts(self, task: Task, name: str, etp: int, ep: int, where: str) -> Stage:
        """The experts of expert rank ``ep``, cut for the tensor rank ``etp`` that experts have."""
        found: Stage = {}
        each = (task.experts or 1) // self.spec.ep
        if self.spec.experts == "legacy-grouped":
            # One flat buffer of all, each [in, out], seen as [in, all outs] or [all ins, out] (MAPPINGS.md 1.7).
            flat = name.replace(".experts.experts.linear_fc", ".experts.weight").removesuffix(".weight")
            found[flat] = self._grouped(task, range(ep * each, ep * each + each), etp, f"{where}: {flat}")
            return found
        for local in range(each):
            expert = megatron_names.expert_name(name, local, self.spec.experts == "grouped")
            found[expert] = self._tensor(task, ep * each + local, etp, f"{where}: {expert}")
        return found

    def _tensor(self, task: Task, expert: int, tp: int, name: str) -> tuple[list[Array], tuple[int, ...]]:
        """A rank's share of a task (of one expert of it)."""
        array = Array(name, self._dtype(task), *self._size(task))
        self._fill(array, task, expert, tp)
        vector = len(task.shape) == 1 + (task.experts is not None)
        return [array], (array.rows,) if vector else (array.rows, array.columns)

    def _grouped(self, task: Task, experts: range, tp: int, name: str) -> tuple[list[Array], tuple[int, ...]]:
        """A rank's share of some experts, each transposed, one behind the other."""
        dtype, (rows, columns) = self._dtype(task), self._size(task)
        arrays = []
        for expert in experts:
            goes_on = expert != experts[-1]
            arrays.append(Array(f"{name}[{expert}]", dtype, rows, columns, transposed=True, goes_on=goes_on))
            self._fill(arrays[-1], task, expert, tp)
        second = "linear_fc2." in task.native
        return arrays, (len(experts) * columns, rows) if second else (columns, len(experts) * rows)

    def _dtype(self, task: Task) -> str:
        return dtype_of(self.source, task, self.spec.dtype)

    def _parts(self, task: Task) -> int:
        return self.spec.tp if task.experts is None else self.spec.expert_tp

    def _size(self, task: Task) -> tuple[int, int]:
        """Rows and columns of a rank's share."""
        axis, parts = megatron_names.tensor_parallel_axis(task.native, self.spec.spec), self._parts(task)
        rows, columns = task.rows // (task.experts or 1), task.columns
        return rows // (parts if axis == 0 else 1), columns // (parts if axis == 1 else 1)

    def _fill(self, array: Array, task: Task, expert: int, tp: int) -> None:
        """Feed ``array`` with the share that tensor rank ``tp`` has of a task (of one expert of it)."""
        axis = megatron_names.tensor_parallel_axis(task.native, self.spec.spec) if self._parts(task) > 1 else None
        rows, (height, width) = task.rows // (task.experts or 1), (array.rows, array.columns)
        base = expert * rows
        if axis == 0 and "linear_fc1." in task.native:
            half = height // 2
            blocks = [
                Block(base + side * rows // 2 + tp * half, half, 0, width, array, at_row=side * half) for side in (0, 1)
            ]
        else:
            row, column = (tp * height, 0) if axis == 0 else (0, tp * width if axis == 1 else 0)
            blocks = [Block(base + row, height, column, width, array)]
        self.feed.add(task, blocks)


def _entries(state: dict[str, Any], stages: list[Stage], spec: str) -> list[archive.Entry]:
    """The entries of a rank's archive."""
    storages: list[list[Array]] = []
    tree: dict[str, Any] = {name: value for name, value in state.items() if name != "content_metadata"}
    for number, stage in enumerate(stages):
        values: dict[str, Any] = {}
        for name, (arrays, shape) in stage.items():
            values[name] = pickling.tensor_value(arrays[0].dtype, shape, str(len(storages)))
            storages.append(arrays)
        values |= dict.fromkeys(_extra_states(stage, spec))
        tree["model" if len(stages) == 1 else f"model{number}"] = values
    return archive.tensor_entries(pickling.dumps(tree), storages)


def _extra_states(stage: dict[str, Any], spec: str) -> list[str]:
    """The ``_extra_state`` entries (None: nothing in it) that a strict load of a state dict takes.

    The local spec's linear layers have one, and its other modules refuse one. TransformerEngine
    gives one to core attentions too, and to norms that are modules of their own (ops/op.py, read, not run).
    """
    modules = dict.fromkeys(name.rpartition(".")[0] for name in stage)
    linear = [module for module in modules if ".linear_" in module or module.endswith(".eh_proj")]
    if spec == "local":
        return [f"{module}._extra_state" for module in linear]
    attention = [m.replace(".linear_proj", ".core_attention") for m in linear if m.endswith(".linear_proj")]
    norms = [module for module in modules if module.endswith("norm")]
    return [f"{module}._extra_state" for module in (*linear, *attention, *norms)]
