"""Which parameters of a transformers model the tensors of its directory are made of.

Most have one name in both. transformers 5 keeps the experts of a layer in one parameter, though its files have a matrix
for each: there the family's rows say what is what, those of the directory's names and those of the memory's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mst_core import families, tensors
from mst_core.errors import InputError
from mst_core.families import Task
from mst_core.tensors import TensorRef


@dataclass(frozen=True, eq=False)
class Unit:
    """Tensors of the directory that are made together, and the parameters that they are made of.

    tasks   the family's row in the directory's names and in the memory's; None where the names are the same
    """

    refs: tuple[TensorRef, ...]
    names: tuple[str, ...]
    tasks: tuple[Task, Task] | None = None

    def stored(self, whole: Sequence[Tensor]) -> list[Tensor]:
        """The tensors ``refs`` of the parameters ``names``."""
        if self.tasks is None:
            return list(whole)
        disk, memory = self.tasks
        return families.unpack(disk, families.pack(memory, whole))


def units(model_dir: Path, stored: Mapping[str, TensorRef], model: torch.nn.Module) -> list[Unit]:
    """Every tensor of the directory, in its order (experts of a layer together).

    InputError, before the first step, for a tensor that would be neither trained nor written again. Computed constants
    that old checkpoints carry (rotary_emb.inv_freq) are left out.
    """
    known = model.state_dict().keys()
    made: dict[str, Unit] = {name: Unit((ref,), (name,)) for name, ref in stored.items() if name in known}
    if len(made) < len(stored):
        made |= _by_rows(model_dir, stored, known - made.keys())
    for name, ref in stored.items():
        if name not in made and not name.endswith("rotary_emb.inv_freq"):
            raise InputError(f"{name} is not a parameter of {type(model).__name__}", where=ref.file)
    return list(dict.fromkeys(made[name] for name in stored if name in made))


def _by_rows(model_dir: Path, stored: Mapping[str, TensorRef], left: set[str]) -> dict[str, Unit]:
    """Units by each of their tensors, where the family has rows for parameters that are ``left``."""
    config = tensors.config(model_dir)
    family = families.family_for(config, model_dir)
    disk, memory = (
        {task.native: task for task in families.tasks(family.model(config, model_dir, names=names))}
        for names in (stored, left)
    )
    made = {}
    for native, task in disk.items():
        names = tuple(spec.name for spec in memory[native].hf) if native in memory else ()
        if names and left.issuperset(names) and all(spec.name in stored for spec in task.hf):
            unit = Unit(tuple(stored[spec.name] for spec in task.hf), names, (task, memory[native]))
            made.update(dict.fromkeys((ref.name for ref in unit.refs), unit))
    return made
