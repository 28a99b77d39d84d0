"""Legacy Megatron checkpoints: one ``mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt`` a rank, read and named without torch.

A rank's file is a ``torch.save`` dictionary: ``model`` (``model0``, ``model1``, ... with virtual pipeline stages) and,
of runs, optimizer and random state. Layer and expert numbers in it start from 0 on each rank (MAPPINGS.md 1.9). Which
layers and which experts a rank has is said here too (``deal``, ``meeting``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from math import lcm
from pathlib import Path
from typing import Any

from mst_core import torch_dist, torch_pickle
from mst_core.errors import InputError
from mst_core.torch_pickle import Stub

FILE = "model_optim_rng.pt"
RANK = re.compile(r"mp_rank_(\d+)(?:_(\d{3}))?(?:_(\d{3}))?")
VIRTUAL = re.compile(r"model[0-9]{1,9}")
STATE = ("optimizer", "opt_param_scheduler", "rng_state", "rerun_state_machine", "num_floating_point_operations_so_far")
EMBEDDING = "embedding.word_embeddings.weight"
FINAL_NORM = "decoder.final_layernorm.weight"


@dataclass(frozen=True)
class RankTensor:
    """A tensor in a rank's file."""

    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int


@dataclass
class Rank:
    """One rank: its coordinates and, for each virtual stage, its tensors by name."""

    tp: int
    pp: int
    ep: int
    file: Path
    stages: list[dict[str, RankTensor]]
    training: list[str] = field(default_factory=list)


def is_legacy(model_dir: Path) -> bool:
    """Whether a Megatron directory holds ``mp_rank_*`` directories and no torch_dist checkpoint."""
    if (model_dir / ".metadata").is_file() or not (model_dir / torch_dist.TRACKER).is_file():
        return False
    try:
        found = torch_dist.iteration_dir(model_dir)
    except InputError:
        return False
    return not (found / ".metadata").is_file() and any(found.glob("mp_rank_*"))


def rank_dir(tp: int, pp: int, ep: int, pipeline: bool, experts: bool) -> str:
    """The directory of a rank: the pipeline's number only with pipeline stages, the experts' only with expert ranks."""
    return f"mp_rank_{tp:02d}" + (f"_{pp:03d}" if pipeline else "") + (f"_{ep:03d}" if experts else "")


def deal(
    layers: int,
    pp: int,
    vp: int,
    *,
    first: int | None = None,
    last: int | None = None,
    embedding: bool = False,
    loss: bool = False,
) -> dict[tuple[int, int], range]:
    """The decoder layers of each (virtual stage, stage), as megatron-core 0.19's ``get_num_layers_to_build`` and
    ``get_transformer_layer_offset`` deal them. InputError where they refuse.

    first, last       layers of the first and the last stage, all its virtual ones together; the rest is dealt evenly
    embedding, loss   the embedding and the loss take the place of a layer
    """
    fixed = {stage: count for stage, count in ((0, first), (pp - 1, last)) if count is not None}
    left, between = layers + embedding + loss - sum(fixed.values()), pp - len(fixed)
    each = left // between if between else 0
    counts = [fixed.get(stage, each) for stage in range(pp)]
    if left != each * between or (between and each < 1) or any(count % vp for count in counts):
        given = {"--first-stage-layers": first, "--last-stage-layers": last}
        given |= {"--account-for-embedding": embedding or None, "--account-for-loss": loss or None}
        said = "".join(f", {flag}{f' {n}' * (n is not True)}" for flag, n in given.items() if n is not None)
        raise InputError(
            f"{layers} layers do not divide into --pp {pp} times --vp {vp}{said}",
            hint=None if said else "--first-stage-layers and --last-stage-layers make stages uneven",
        )
    found, start = {}, 0
    for virtual in range(vp):
        for stage in range(pp):
            taken = (embedding and (virtual, stage) == (0, 0)) + (loss and (virtual, stage) == (vp - 1, pp - 1))
            found[virtual, stage] = range(start, start + counts[stage] // vp - taken)
            start = found[virtual, stage].stop
    return found


def meeting(tp: int, ep: int, etp: int) -> set[tuple[int, int]]:
    """The pairs of tensor and expert rank that a stage has: of its processes, number r is tensor rank r % TP and expert
    rank r // ETP % EP. All pairs where ETP is TP."""
    return {(rank % tp, rank // etp % ep) for rank in range(lcm(tp, etp * ep))}


def read(model_dir: Path) -> list[Rank]:
    """All ranks of a checkpoint. InputError: unreadable or missing files, formats before Megatron core's names."""
    directory = torch_dist.iteration_dir(model_dir)
    ranks, twos = [], []
    for path in sorted(directory.glob("mp_rank_*")):
        match = RANK.fullmatch(path.name)
        if match is None:
            raise InputError("is no rank's directory", where=path)
        tp, second, third = (int(part) if part else 0 for part in match.groups())
        rank = _rank(path / FILE, model_dir, tp, second, third)
        ranks.append(rank)
        if match[2] and not match[3]:
            twos.append(rank)
    if not ranks:
        raise InputError("holds no mp_rank_* directories", where=directory)
    # mp_rank_00_001 is the second stage, or the second expert rank: there every rank has both ends of the model.
    if twos and all(EMBEDDING in rank.stages[0] and FINAL_NORM in rank.stages[-1] for rank in twos):
        for rank in twos:
            rank.pp, rank.ep = 0, rank.pp
    _check_all_there({(rank.tp, rank.pp, rank.ep) for rank in ranks}, directory)
    return ranks


def _check_all_there(have: set[tuple[int, int, int]], directory: Path) -> None:
    """Refuse a missing rank. On each stage are all tensor times expert ranks or, with an expert tensor parallel size
    below TP, those that meet."""
    tps, pps, eps = (max(numbers) + 1 for numbers in zip(*have, strict=True))
    for etp in range(1, min(tps, len(have))):
        if tps % etp or lcm(tps, etp * eps) * pps != len(have):
            continue
        if have == {(tp, pp, ep) for tp, ep in meeting(tps, eps, etp) for pp in range(pps)}:
            return
    for tp in range(tps):
        for pp in range(pps):
            for ep in range(eps):
                if (tp, pp, ep) not in have:
                    raise InputError(f"tensor rank {tp}, stage {pp}, expert rank {ep} is missing", where=directory)


def _rank(path: Path, root: Path, tp: int, pp: int, ep: int) -> Rank:
    tree, storages = torch_pickle.open_archive(path, root)
    if not isinstance(tree, dict):
        raise InputError("is not a Megatron checkpoint: no dictionary", where=path)
    virtual = [name for name in tree if isinstance(name, str) and VIRTUAL.fullmatch(name)]
    names = ["model"] if "model" in tree else sorted(virtual, key=_number)
    if not names:
        raise InputError("holds no model", where=path)
    stages = []
    for name in names:
        if not isinstance(tree[name], dict) or "language_model" in tree[name]:
            hint = "load and save it with a Megatron-LM of 2023 to 2025 and --use-mcore-models"
            raise InputError("was written before Megatron core's names", where=path, hint=hint)
        tensors = {}
        for key, value in tree[name].items():
            if not isinstance(key, str):
                raise InputError(f"names a tensor {key!r:.100}", where=path)
            if not key.endswith("_extra_state"):
                dtype, shape, offset, _ = torch_pickle.stored_tensor(value, storages, f"{path}: {key}")
                tensors[key] = RankTensor(dtype, shape, path, offset)
        stages.append(tensors)
    return Rank(tp, pp, ep, path, stages, [str(name) for name in tree if name in STATE])


def _number(name: str) -> int:
    return int(name.removeprefix("model"))


def common(path: Path) -> dict[str, Any]:
    """What a rank's file holds beside the tensors, args as a dictionary; for people and tests."""
    tree, _ = torch_pickle.open_archive(path)
    if not isinstance(tree, dict):
        raise InputError("is not a Megatron checkpoint: no dictionary", where=path)
    args = tree.get("args")
    return {**tree, "args": args.state if isinstance(args, Stub) else args}
