"""What two peers ask of CUDA while they convert, answered by the CPU, without a copy that they do not make."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


def bridge() -> None:
    """Until the process ends: nothing to wait for, the CPU's random state, and the CPU is the current device."""
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.get_rng_state = torch.get_rng_state
    torch.cuda.current_device = lambda: "cpu"


class Cpu(TorchFunctionMode):
    """A tensor asked for on ``cuda`` is made on the CPU, one moved there stays."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def there(word: Any) -> Any:
            return "cpu" if isinstance(word, str) and word == "cuda" else word

        return function(*map(there, args), **{key: there(word) for key, word in (kwargs or {}).items()})
