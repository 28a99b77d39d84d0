"""The one process of test_families.py that runs megatron-core, alone in a gloo world of one.

    python -m tests.oracle.families_process PLAN.json PORT

For every case: GPTModel as the megatron engine builds it from the family's settings, every parameter NaN, then loaded
strictly with the packed tensors, and its logits compared with those of transformers. Importing megatron costs 6 s of
CPU, so all cases share this process. Findings go to ``OUT/found.json``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from mst_core import families, tensors
from mst_core.engine.megatron import groups, model
from mst_core.runspec import RunSpec

LOCAL_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
"""What the local spec's state_dict calls the norms that TransformerEngine fuses (MAPPINGS.md 1.6)."""


def local_name(native: str) -> str:
    for fused, own in LOCAL_NORMS.items():
        if native.endswith(fused):
            return native.removesuffix(fused) + own
    return native


def run_case(directory: Path) -> dict[str, Any]:
    config = tensors.config(directory)
    family = families.family_for(config)
    known = family.model(config)
    spec = RunSpec(model=str(directory), data=(directory,), out=directory / "out", precision="fp32", engine="megatron")
    (made,) = model.build(family.megatron(config), spec, known.dims.vocab)
    made.eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.fill_(float("nan"))
    hf = load_file(directory / "model.safetensors")
    state = {
        local_name(task.native): families.pack(task, [hf[spec.name] for spec in task.hf])
        for task in families.tasks(known)
    }
    wanted = {name for name in made.state_dict() if "_extra_state" not in name}
    found = {"missing": sorted(wanted - state.keys()), "unexpected": sorted(state.keys() - wanted)}
    if any(found.values()):
        return found
    made.load_state_dict(state, strict=False)
    saved = load_file(directory / "logits.safetensors")
    tokens = saved["tokens"]
    with torch.no_grad():
        logits = made(tokens, torch.arange(tokens.shape[1]).expand_as(tokens), None)
    return {
        **found,
        "difference": (logits - saved["logits"]).abs().max().item(),
        "spread": saved["logits"].std().item(),
    }


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text())
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[2])
    groups.start(1, 1, seed=0)
    found = {name: run_case(Path(directory)) for name, directory in plan["cases"].items()}
    Path(plan["out"], "found.json").write_text(json.dumps(found))
    groups.stop()


if __name__ == "__main__":
    main()
