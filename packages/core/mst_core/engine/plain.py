"""The plain engine: transformers in one process. The reference that every other engine must equal."""

from __future__ import annotations

from pathlib import Path

import torch

from mst_core.engine.hf import HFEngine
from mst_core.engine.seam import Create, create
from mst_core.runspec import RunSpec


class PlainEngine(HFEngine):
    """One process, one model. See seam.Engine for the methods."""

    def __init__(self, spec: RunSpec, model_dir: Path) -> None:
        super().__init__(spec, model_dir)
        self.model.to(self.device)
        self.optimizer = self._adamw(fused=True)

    def save_state(self, directory: Path, create: Create = create) -> None:
        """fp32 weights that are trained, AdamW's moments, the random state: state.pt."""
        state = {
            "weights": dict(self.trained),
            "optimizer": self.optimizer.state_dict(),
            "steps": self.steps,
            "random": torch.get_rng_state(),
        }
        with create(directory / "state.pt") as file:
            torch.save(state, file)

    def load_state(self, directory: Path) -> None:
        """What ``save_state`` wrote."""
        state = torch.load(directory / "state.pt", map_location="cpu", mmap=True, weights_only=True)
        with torch.no_grad():
            for name, parameter in self.trained:
                parameter.copy_(state["weights"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        self.steps = state["steps"]
        torch.set_rng_state(state["random"])
