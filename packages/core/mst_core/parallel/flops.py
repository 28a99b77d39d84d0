"""The arithmetic of a training step, and which share of a device's peak a run reaches (MFU). docs/train.md has it too.

    FLOP per token = 6 N + 6 L A T
    MFU            = tokens per second and device x FLOP per token / peak

N  parameters that a token is multiplied by: every matrix once, of experts the chosen ones only, the head (tied or not)
   but not the look-up in the embedding
L  layers, A  attention heads x their size, T  tokens of a row: causal attention sees T / 2 of them on average

Forward is 2 of the 6, backward 4. Recomputed activations are not counted: MFU is about useful work.
"""

from __future__ import annotations

from math import prod

from mst_core.families.rules import Model, tasks

EMBEDDING = "embedding.word_embeddings.weight"
PEAKS = {"H100": 989.4e12, "H200": 989.4e12, "H800": 989.4e12, "H20": 148e12, "A100": 312e12, "A800": 312e12,
         "B200": 2250e12, "GB200": 2500e12, "B300": 2250e12, "L40S": 362e12}  # fmt: skip
"""Dense bf16 FLOP/s by the vendors' datasheets, SXM where there are several; by a word of the device's name."""


def per_token(model: Model, seq_length: int, chosen: int = 0) -> float:
    """FLOP of a training step for each token of rows of ``seq_length``. ``chosen``: experts that a token goes to."""
    weights = 0.0
    for task in tasks(model):
        if len(task.shape) - bool(task.experts) < 2 or (task.key.endswith(EMBEDDING) and not model.tied):
            continue
        weights += prod(task.shape) * (chosen / task.experts if task.experts else 1)
    return 6 * weights + 6 * model.dims.layers * model.dims.heads * model.dims.head_dim * seq_length


def peak(device: str) -> float | None:
    """Dense bf16 FLOP/s of a device by its name ("NVIDIA H200"); None if it is not known."""
    return next((value for name, value in PEAKS.items() if name in device.replace("-", " ").split()), None)
