"""The deepspeed engine: ZeRO 0 to 3 on a transformers model, with offload to CPU memory (or NVMe, by a user's JSON).

fp32 throughout, or bf16 weights with fp32 copies that are stepped (ZeRO 1 to 3). DeepSpeed averages gradients over the
ranks, so losses are scaled by their number, and its divisions by accumulation steps are off: a step is a sum. It skips
a step whose norm is not finite; then the run ends, the weights being those of before.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import logging
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mst_core import console, deepspeed_json
from mst_core.engine import ranks, zero
from mst_core.engine.hf import HFEngine
from mst_core.engine.seam import Create, create
from mst_core.errors import InputError, RunError
from mst_core.runspec import RunSpec

LAYOUT = "layout.json"
TAG = "deepspeed"


class DeepspeedEngine(HFEngine):
    """One rank of the run. See seam.Engine for the methods."""

    def __init__(self, spec: RunSpec, model_dir: Path) -> None:
        with _quiet():
            import deepspeed

            # On a CPU it would compile, at every first start, an operator that only its inference uses.
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        config = deepspeed_json.configuration(spec)
        super().__init__(spec, model_dir)
        self.device = ranks.join(spec.timeout)
        self.rank = self.dp_rank = dist.get_rank()
        self.dp_size = dist.get_world_size()
        self.stage: int = config["zero_optimization"]["stage"]
        offloads = "offload_optimizer" in deepspeed_json.told(spec)
        if offloads:
            build("CPUAdamBuilder")
        adamw = self._adamw(deepspeed.ops.adam.DeepSpeedCPUAdam if offloads else torch.optim.AdamW)
        constants = {name: value.clone() for name, value in self.model.named_buffers()}
        with _quiet():
            deepspeed.init_distributed(dist_init_required=False)
            self.engine, self.optimizer, _, _ = deepspeed.initialize(
                model=self.model, optimizer=adamw, config=config, dist_init_required=False
            )
        # bf16 casts them too, and rotary frequencies of 8 bits turn a position of some hundreds by radians.
        for name, value in constants.items():
            owner, _, last = name.rpartition(".")
            self.model.get_submodule(owner)._buffers[last] = value.to(self.device)

    def agree(self, value: int) -> int:
        """The largest of all ranks'."""
        return ranks.largest(value, self.device)

    def save_state(self, directory: Path, create: Create = create) -> None:
        """What this rank holds, whatever the stage. See zero.py; of NVMe, DeepSpeed's own checkpoint."""
        if self._on_nvme:
            self._save_own(directory)
        else:
            zero.save(directory, self._shares(), self.stage, {"steps": self.steps}, create)

    def load_state(self, directory: Path) -> None:
        """What ``save_state`` wrote: any stage on any number of ranks, but of NVMe only the same."""
        own = (directory / LAYOUT).is_file()
        if own != self._on_nvme:
            what = "has its optimizer state on NVMe" if own else "has no optimizer state as NVMe needs it"
            raise InputError(what, where=directory, hint="offload to where it was")
        if own:
            self._load_own(directory)
        else:
            self.steps = zero.load(directory, self._shares(), self.optimizer, self.stage)["steps"]

    @property
    def _on_nvme(self) -> bool:
        return bool(getattr(self.optimizer, "swap_optimizer", False))

    def _shares(self) -> list[zero.Share]:
        return list(zero.shares(self.optimizer, self.stage, {p: name for name, p in self.trained}))

    def _save_own(self, directory: Path) -> None:
        if not self.rank:
            (directory / LAYOUT).write_text(json.dumps({**self._layout(), "steps": self.steps}))
        frozen = self.spec.lora_rank is not None
        self.engine.save_checkpoint(str(directory), TAG, save_latest=False, exclude_frozen_parameters=frozen)

    def _load_own(self, directory: Path) -> None:
        state = json.loads((directory / LAYOUT).read_text())
        differ = [f"{name} was {state[name]}, is {now}" for name, now in self._layout().items() if state[name] != now]
        if differ:
            what = f"is of another layout of ranks: {', '.join(differ)}"
            raise InputError(what, where=directory, hint="give the old one")
        strict = self.spec.lora_rank is None
        found, _ = self.engine.load_checkpoint(str(directory), TAG, load_module_strict=strict)
        if found is None:
            raise InputError("DeepSpeed cannot read its checkpoint", where=directory / TAG)
        self.steps = state["steps"]

    def close(self, *, stay: bool = False) -> None:
        """Leave the world."""
        self.engine.destroy()
        if not stay:
            ranks.leave()

    def _layout(self) -> dict[str, Any]:
        return {"ranks": self.dp_size, "zero": self.stage, "precision": self.spec.precision}

    def _sum(self, values: dict[str, float]) -> dict[str, float]:
        return ranks.summed(values, self.device)

    def _logits(self, tokens_BT: Tensor, positions_BT: Tensor | None = None) -> Tensor:
        logits_BTV: Tensor = self.engine(input_ids=tokens_BT, position_ids=positions_BT, use_cache=False).logits
        return logits_BTV

    def _zero_grad(self) -> None:
        """DeepSpeed does after each step."""

    def _backward(self, loss: Tensor, *, last: bool) -> None:
        self.engine.set_gradient_accumulation_boundary(last)
        self.engine.backward(loss * self.dp_size, scale_wrt_gas=False)

    def _whole(self, parameter: Tensor) -> Tensor:
        from deepspeed.utils import safe_get_full_fp32_param

        found: Tensor | None = safe_get_full_fp32_param(parameter)
        return parameter if found is None else found

    def _update(self, loss: float, lr: float) -> float:
        for group in self.optimizer.param_groups:
            # A loss that is not finite still goes through DeepSpeed, which cleans up after a step that it skips.
            group["lr"] = lr if math.isfinite(loss) else 0.0
        norm = self._clip_whole() if self.stage == 0 else None
        if norm is not None and not (math.isfinite(norm) and math.isfinite(loss)):
            self.engine.zero_grad()
            self._check(loss, norm)
        self.engine.step()
        if norm is None:
            norm = float(self.engine.get_global_grad_norm())
            norm = math.nan if self.optimizer.overflow else norm
        self._check(loss, norm)
        return norm

    def _clip_whole(self) -> float:
        """ZeRO 0: every rank has all gradients."""
        grads = [p.grad for _, p in self.trained if p.grad is not None]
        norm = self._norm(grads)
        if self.spec.clip_grad and (scale := self.spec.clip_grad / (norm + 1e-6)) < 1:
            torch._foreach_mul_(grads, scale)
        return norm


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What DeepSpeed says of itself and of operators that nobody asked for is no news."""
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(logging.NOTSET)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)


def build(builder: str) -> None:
    """Compile one of DeepSpeed's C++ operators if it is not there yet, one process at a time, and load it.

    torch's builder waits without end for a lock file that an interrupted build left behind; here such a file goes.
    """
    from deepspeed.accelerator import get_accelerator
    from torch.utils.cpp_extension import _get_build_directory

    found: Any = get_accelerator().create_op_builder(builder)
    if found is None or not found.is_compatible(verbose=False):
        return
    folder = Path(_get_build_directory(found.name, False))
    with (folder.parent / f"{found.name}.mst").open("w") as own:
        fcntl.flock(own, fcntl.LOCK_EX)
        wait_for_lock(folder)
        try:
            found.load(verbose=False)
        except (RuntimeError, OSError) as error:
            what = f"DeepSpeed's operator {found.name} cannot be built: {str(error).strip().splitlines()[-1]}"
            raise RunError(what, where=folder, hint="it needs g++ and ninja on the PATH") from error


def wait_for_lock(folder: Path, patience: float = 60.0) -> None:
    """Until no build of another program holds ``folder``: its lock is gone, or it is old and nobody works there."""
    lock = folder / "lock"
    while lock.exists():
        if time.time() - lock.stat().st_mtime > patience and not _works_in(folder):
            console.say(f"{lock} was left by a build that was interrupted: removed")
            lock.unlink(missing_ok=True)
            return
        time.sleep(0.5)


def _works_in(folder: Path) -> list[str]:
    """The processes that run in ``folder``, as a compiler does."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            where = (process / "cwd").resolve(strict=True)
        except OSError:  # it ended, or is somebody else's
            continue
        if where == folder.resolve():
            found.append(process.name)
    return found
