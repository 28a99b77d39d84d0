"""A merged model straight into Megatron's torch_dist: Hugging Face tensors come in, one by one, chunks go out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mst_convert.accounts import uneven
from mst_core import megatron_names, torch_dist, torch_dist_write
from mst_core.errors import MstError, many
from mst_core.families import Model, Task, pack_rows, padded_vocab, tasks
from mst_core.tensors import Wanted

if TYPE_CHECKING:
    import torch

    from mst_convert.sources import Source
    from mst_core.checkpoint import Staging

VOCAB_PADDING = 128
"""That of mst-convert's default."""


class Layout:
    """Which native tensor each Hugging Face tensor belongs to. InputError where its form cannot be written."""

    def __init__(self, source: Source, model: Model, targets: list[Wanted]) -> None:
        self.model = model
        self.tasks = tasks(model, VOCAB_PADDING)
        known = {task.native for task in self.tasks}
        self.tasks += [task for task in source.tasks if task.layer is None and _carried(task, known, model)]
        form: megatron_names.Form = "stacked" if model.uniform else "per-layer"
        naming = megatron_names.naming(model, "te", form)
        self.form = form
        self.named = [(t, *(naming.key(t) if t.native in known else (t.native, False))) for t in self.tasks]
        self.owner = {spec.name: (n, i) for n, task in enumerate(self.tasks) for i, spec in enumerate(task.hf)}
        dtypes: dict[str, set[str]] = {}
        for name, dtype, _ in targets:
            if name in self.owner:
                dtypes.setdefault(self.named[self.owner[name][0]][1], set()).add(dtype)
        if faults := uneven(dtypes):
            raise many(faults, what="Megatron keeps one dtype for all of a tensor:", hint="mst-convert --dtype first")

    @property
    def vocab_rows(self) -> int:
        return padded_vocab(self.model.dims.vocab, VOCAB_PADDING)


def _carried(task: Task, known: set[str], model: Model) -> bool:
    return task.native not in known and model.family.carried_native(task.hf[0].name) is not None


class MegatronWriter:
    """``put`` every tensor of the merge in its order, then ``finish``. A native tensor (of experts: one expert's) is
    written when its last part is there; copies and computed buffers have no place in Megatron."""

    def __init__(self, staging: Staging, layout: Layout) -> None:
        self._layout = layout
        self._writer = torch_dist.TorchDistWriter(staging)
        self._waiting: dict[str, torch.Tensor] = {}

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Take the next Hugging Face tensor."""
        if name not in self._layout.owner:
            return
        number, place = self._layout.owner[name]
        task, key, stacked = self._layout.named[number]
        self._waiting[name] = tensor
        single = task.experts is not None and len(task.hf) % task.experts == 0 and len(task.hf) >= task.experts
        count = len(task.hf) // task.experts if single and task.experts else len(task.hf)
        first = place // count * count
        names = [spec.name for spec in task.hf[first : first + count]]
        if any(part not in self._waiting for part in names):
            return
        parts = [self._waiting.pop(part) for part in names]
        if task.transposed:
            parts = [part.transpose(-1, -2) for part in parts]
        rows = task.rows // (task.experts or 1)
        experts = [first // count] if single else range(task.experts or 1)
        flat = [part.reshape(spec.rows, -1) for part, spec in zip(parts, task.hf[first : first + count], strict=True)]
        for expert in experts:
            regions = [
                region._replace(start=region.start - expert * rows, source=region.source - first)
                for region in task.regions
                if expert * rows <= region.start < (expert + 1) * rows
            ]
            native = pack_rows(regions, rows, flat)
            chunk = torch_dist_write.chunk_of(task, key, _dtype(native), stacked, expert)
            self._writer.put(chunk, native.reshape(chunk.sizes))

    def finish(self, config: dict[str, Any], where: Any) -> None:
        """Write what is no tensor. MstError if a tensor did not come."""
        if self._waiting:
            raise MstError(f"{len(self._waiting)} tensors wait for the rest of their native tensor")
        layout = self._layout
        state = torch_dist.release_state(layout.model.family, config, layout.vocab_rows, where)
        self._writer.finish(torch_dist.objects(layout.named, state))


def _dtype(tensor: torch.Tensor) -> str:
    from mst_core.tensors import dtype_name

    return dtype_name(tensor.dtype)
