"""megatron.training's own load_checkpoint on what mst-convert wrote: one torchrun of four ranks serves all tests."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.oracle.test_convert_layouts import ROWS, SIZES, _last, convert, make

ROOT = Path(__file__).parents[2]
SHAPE = {
    "num_layers": 4, "hidden_size": 16, "ffn_hidden_size": 24, "num_attention_heads": 4, "num_query_groups": 2,
    "kv_channels": 8, "max_position_embeddings": 64,
}  # fmt: skip
REST = {
    "group_query_attention": True, "normalization": "RMSNorm", "swiglu": True, "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True, "position_embedding_type": "rope", "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}  # fmt: skip
WORDS = [word for name, value in SHAPE.items() for word in (f"--{name.replace('_', '-')}", str(value))] + [
    "--group-query-attention", "--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear",
    "--untie-embeddings-and-output-weights", "--position-embedding-type", "rope", "--attention-dropout", "0.0",
    "--hidden-dropout", "0.0",
]  # fmt: skip
SIZES_OF = {"tp1": (1, 1), "tp2pp2": (2, 2)}
FORMATS = ("torch_dist", "legacy")
RUNS = [
    (f"{layout}, {size}, {how}", layout, size, how)
    for size in SIZES_OF
    for layout in FORMATS
    for how in ("flags", "checkpoint args")
]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    where = tmp_path_factory.mktemp("training")
    assert SIZES["hidden_size"] == SHAPE["hidden_size"]
    hf = make(where / "hf", "llama")
    dist = convert(model=hf, to="megatron", out=where / "dist", vocab_padding=ROWS, verify="none")
    plan: dict[str, Any] = {"out": str(where), "runs": {}}
    for name, layout, size, how in RUNS:
        tp, pp = SIZES_OF[size]
        place = dist
        if layout == "legacy" and not (place := where / f"legacy-{size}").exists():
            convert(
                model=hf, to="megatron-legacy", out=place, spec="local", tp=tp, pp=pp, vocab_padding=ROWS // tp,
                verify="none",
            )  # fmt: skip
        words = [
            "--load",
            str(place),
            "--tensor-model-parallel-size",
            str(tp),
            "--pipeline-model-parallel-size",
            str(pp),
        ]
        words += ["--make-vocab-size-divisible-by", str(ROWS // tp), "--global-batch-size", "4"]
        words += ["--ckpt-format", "torch" if layout == "legacy" else "torch_dist"]
        words += WORDS if how == "flags" else ["--use-checkpoint-args"]
        plan["runs"][name] = {"hf": str(hf), "words": words, "asked": [*SHAPE, *REST]}
    (where / "runs.json").write_text(json.dumps(plan))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", "--master-port", str(port)]
    done = subprocess.run(
        [*command, "-m", "tests.oracle.convert_training_ranks", str(where / "runs.json")],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, _last(done.stderr)
    return [json.loads((where / f"rank-{rank}.json").read_text()) for rank in range(4)]


@pytest.mark.parametrize("name", [name for name, *_ in RUNS])
def test_load_checkpoint_loads_strictly_and_bit_for_bit(ran: list[dict[str, Any]], name: str) -> None:
    for rank in ran:
        found = rank[name]
        assert found["wrong"] == []
        assert found["tensors"] > 10
        assert found["strict"] == ["True"]  # Megatron-LM falls back to strict=False and says "successfully loaded"
        assert found["iteration"] == 0
        assert found["rows"] == ROWS


@pytest.mark.parametrize("name", [name for name, *_ in RUNS])
def test_arguments_are_those_of_the_model(ran: list[dict[str, Any]], name: str) -> None:
    assert ran[0][name]["args"] == {**SHAPE, **REST}
