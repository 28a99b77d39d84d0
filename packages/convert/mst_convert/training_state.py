"""Training state of a torch_dist checkpoint: what goes along to another torch_dist, and what cannot.

State that Megatron loads at any parallel layout is kept in tensors ``optimizer.state.NAME.KEY`` with the shape, the cut
and the padding of the parameter KEY: by all optimizers but the distributed one (dist_checkpointing/optimizer.py), and
by that one as ``fully_reshardable`` (distrib_optimizer.py). Each is one more task of the parameter's form whose key has
a prefix. State in buckets of data parallel ranks (``dp_reshardable``, ``dp_zero_gather_scatter``) is laid out by what
the ranks had, and is refused.

What is no tensor (common state: step, parameter groups, scheduler, iteration, args; each rank's random and rerun state)
goes along byte for byte, but for what it says of the form. Megatron itself leaves random and rerun state aside where
the ranks differ from those that saved it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mst_core import torch_dist, torch_pickle
from mst_core.errors import InputError
from mst_core.families import Task, tasks
from mst_core.megatron_names import Naming, Part, hybrid_pattern
from mst_core.torch_dist import StoredObject, StoredTensor
from mst_core.untrusted import read_bytes

if TYPE_CHECKING:
    from mst_convert.sources import Source

STATE = re.compile(r"((?:chained_\d+\.)?optimizer\.state\.([^.]+)\.)(.+)")
"""Prefix, name of the state and key of the parameter. Chains of optimizers were once numbered."""
OPTIMIZER = ("optimizer.", "chained_")
COMMON, COMMON_FILE = "common_state/shard_0_1", "common.pt"
MAX_ITERATION = 10**9
HINT = "--weights-only leaves it behind"


@dataclass(frozen=True)
class TrainingState:
    """What there is beside the weights.

    of        native name of each parameter's state: the prefix of its key, and the parameter's native name
    tensors   how many are stored
    fault     why it cannot be carried, if so
    """

    naming: Naming
    of: Mapping[str, tuple[str, str]]
    tensors: int
    fault: str | None

    @property
    def names(self) -> list[str]:
        """Of each kind of state, as exp_avg."""
        found = (STATE.match(f"{prefix}x") for prefix, _ in self.of.values())
        return sorted({match[2] for match in found if match})


@dataclass(frozen=True)
class Rest:
    """What is no tensor: objects of the .distcp files, and files (Megatron before 0.19 has common.pt).

    extra   each module's _extra_state (of FP8), under the name that it has in the output
    """

    iteration: int
    objects: dict[str, bytes]
    extra: dict[str, bytes]
    files: dict[str, bytes]

    @property
    def where(self) -> str:
        """The directory: Megatron loads no training state from release/."""
        return f"iter_{self.iteration:07d}"


Found = dict[str, list[tuple[Part, StoredTensor]]]


def match(
    weights: Found, naming: Naming, stored: Mapping[str, StoredTensor], left: Iterable[str], objects: Iterable[str]
) -> tuple[TrainingState, Found] | None:
    """The state among the keys ``left`` over by the weights, and the stored tensors of each; None if there is none."""
    keys = [key for key in left if key.startswith(OPTIMIZER)]
    odd = [name for name in objects if name.startswith(OPTIMIZER)]
    if not keys and not odd:
        return None
    parameters: dict[str, list[tuple[str, Part]]] = {}
    for native, parts in weights.items():
        for part, _ in parts:
            parameters.setdefault(part.key, []).append((native, part))
    found: Found = {}
    of: dict[str, tuple[str, str]] = {}
    for key in keys:
        named = STATE.match(key)
        if named is None or named[3] not in parameters or stored[key].shape != stored[named[3]].shape:
            odd.append(key)
            continue
        for native, part in parameters[named[3]]:
            of[named[1] + native] = (named[1], native)
            found[named[1] + native] = [(part._replace(key=key), stored[key])]
    fault = None
    if naming.prefix or naming.fsdp:
        fault = f"another writer than Megatron-LM's torch_dist kept it ({keys[0] if keys else odd[0]})"
    elif odd:
        fault = (
            f"{len(odd)} entries of it, like {sorted(odd)[0]}, are not by parameter (what is laid out by data parallel"
            " ranks, a run with --dist-ckpt-optim-fully-reshardable saves by parameter)"
        )
    return TrainingState(naming, of, len(keys), fault), found


def carry(source: Source, rows: int) -> Source:
    """The source with its training state as further tasks, for an output of ``rows`` rows of vocabulary.

    Padding of the vocabulary was trained too (its logits are part of Megatron's softmax), so it stays, as far as there
    is room. InputError if there is state that cannot be carried.
    """
    state = source.training
    if state is None:
        return source
    if state.fault:
        raise InputError(f"holds optimizer state: {state.fault}", where=source.directory, hint=HINT)
    kept = min(rows, source.vocab_rows)
    mapped = {task.native: task for task in tasks(source.model, kept)}
    work = [mapped.get(task.native, task) for task in source.tasks]
    by_native = {task.native: task for task in work}
    cut = source.vocab_rows - kept
    return replace(
        source,
        tasks=work + [task_of(by_native[parameter], prefix) for prefix, parameter in state.of.values()],
        carried_rows=kept,
        tensors=source.tensors + state.tensors,
        left=[f"{cut} rows of vocabulary padding"] if cut else [],
        _last=None,
    )


def task_of(task: Task, prefix: str) -> Task:
    """The task of a parameter's state."""
    return replace(task, native=prefix + task.native, key=prefix + task.key)


def rest(source: Source, naming: Naming, rows: int) -> Rest:
    """What is no tensor, for an output named by ``naming``. InputError if it is not what Megatron-LM writes."""
    directory = torch_dist.checkpoint_dir(source.directory)
    stored = torch_dist.contents(source.directory).objects
    raw = {name: _archive(one) for name, one in stored.items() if "._extra_state/" not in name}
    files = {}
    if (directory / COMMON_FILE).is_file():
        files[COMMON_FILE] = read_bytes(directory / COMMON_FILE, torch_pickle.MAX_PICKLE, source.directory)
    common = files.get(COMMON_FILE, raw.get(COMMON))
    if common is None:
        raise InputError("holds optimizer state but no common state", where=directory, hint=HINT)
    iteration: list[int] = []

    def changes(value: Any) -> list[tuple[Any, dict[str, Any]]]:
        state = value[0] if isinstance(value, list) and len(value) == 1 else value
        number = state.get("iteration") if isinstance(state, dict) and "optimizer" in state else None
        if type(number) is not int or not 0 <= number < MAX_ITERATION:
            what = "holds optimizer state, but its common state names no iteration or no optimizer"
            raise InputError(what, where=directory, hint=HINT)
        iteration.append(number)
        return _changes(state, source, naming, rows)

    made = torch_pickle.amended_archive(common, changes, str(directory))
    raw.pop(COMMON, None)  # Megatron reads the file where there is one
    if files:
        files[COMMON_FILE] = made
    else:
        raw[COMMON] = made
    return Rest(iteration[0], raw, _extra(source, naming, stored), files)


def _archive(stored: StoredObject) -> bytes:
    """An object as it is. InputError if its pickle asks for what no checkpoint needs: Megatron would run it."""
    data = torch_dist.object_bytes(stored)
    torch_pickle.load_archive(data, f"{stored.file}@{stored.file_offset}")
    return data


def _extra(source: Source, naming: Naming, stored: Mapping[str, StoredObject]) -> dict[str, bytes]:
    """Of each extra state of the output, what the source has."""
    found = {}
    state = source.training
    for task in source.tasks if state else ():
        if state is None or task.native in state.of:
            continue
        made, had = (torch_dist.extra_states([(task, *each.key(task))]) for each in (naming, state.naming))
        for (name, _), (old, _) in zip(made, had, strict=True):
            if old in stored:
                found[name] = _archive(stored[old])
    return found


def _changes(state: dict[str, Any], source: Source, naming: Naming, rows: int) -> list[tuple[Any, dict[str, Any]]]:
    """What the common state says of the form and is no longer so: (dictionary or object in it, new values)."""
    found: list[tuple[Any, dict[str, Any]]] = []
    content = state.get("content_metadata")
    apart = naming.form == "per-layer" and naming.spec != "hybrid"
    if isinstance(content, dict) and bool(content.get("non_homogeneous_layers")) != apart:
        found.append((content, {"non_homogeneous_layers": apart}))
    args = state.get("args")
    known = args.state if isinstance(args, torch_pickle.Stub) and isinstance(args.state, dict) else {}
    new: dict[str, Any] = {}
    if known.get("padded_vocab_size", rows) != rows:
        new["padded_vocab_size"] = rows
    was = source.training is not None and source.training.naming.spec == "hybrid"
    if known and was != (naming.spec == "hybrid"):  # a HybridModel counts attention and MLP as two layers
        pattern = hybrid_pattern(source.model)
        layers = source.model.dims.layers if was else len(pattern)
        new |= {"num_layers": layers, "hybrid_layer_pattern": None if was else pattern}
    return [*found, (args, new)] if new else found
