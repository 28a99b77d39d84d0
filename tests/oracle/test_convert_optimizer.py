"""Training goes on from what mst-convert wrote: real megatron-core optimizers, saved, converted, loaded, one step more.

Two torchruns of two ranks (convert_optimizer_ranks.py) serve all tests: one trains and saves, one loads the originals
and what was made of them. Weights, optimizer state and parameter groups must be bit-equal, before and after the step.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mst_core import manifest
from mst_core.errors import InputError
from mst_core.families import family_for
from tests.launch import last
from tests.oracle.test_convert_layouts import CONFIGS, SIZES, convert

ROOT = Path(__file__).parents[2]
VOCAB, ROWS = SIZES["vocab_size"], 64
RUNS: dict[str, dict[str, Any]] = {
    "fp32": {"family": "llama"},
    "fp32 tp2": {"family": "llama-tied", "tp": 2, "form": "per-layer"},
    "bf16": {"family": "llama", "dtype": "bf16", "form": "per-layer"},
    "bf16 tp2": {"family": "llama", "dtype": "bf16", "tp": 2},
    "distributed": {"family": "llama", "dtype": "bf16", "sharding": "fully_reshardable"},
    "distributed tp2": {"family": "llama", "dtype": "bf16", "sharding": "fully_reshardable", "tp": 2},
    "experts": {"family": "mixtral", "dtype": "bf16"},
    "experts ep2": {"family": "qwen3-moe", "ep": 2, "form": "per-layer"},
    "hybrid": {"family": "qwen2", "pattern": "*-*-*-*-"},
    "by data parallel rank": {"family": "llama", "dtype": "bf16", "sharding": "dp_reshardable"},
}
"""Two steps of each are trained, on two ranks: data parallel, where they are not tensor or expert parallel."""
CONVERTED: dict[str, tuple[str, dict[str, Any]]] = {
    "fp32, per layer": ("fp32", {"form": "per-layer"}),
    "fp32, wider": ("fp32", {"vocab_padding": 96}),
    "fp32, hybrid": ("fp32", {"spec": "hybrid"}),
    "fp32 tp2, stacked": ("fp32 tp2", {"form": "stacked"}),
    "fp32 tp2, narrower": ("fp32 tp2", {"form": "per-layer", "vocab_padding": 52}),
    "bf16, stacked": ("bf16", {"form": "stacked"}),
    "bf16 tp2, per layer": ("bf16 tp2", {"form": "per-layer"}),
    "distributed, per layer": ("distributed", {"form": "per-layer"}),
    "distributed tp2, wider": ("distributed tp2", {"vocab_padding": 96}),
    "experts, per layer": ("experts", {"form": "per-layer", "spec": "local"}),
    "experts ep2, stacked": ("experts ep2", {"form": "stacked", "spec": "local"}),
    "hybrid, stacked": ("hybrid", {"form": "stacked"}),
}


def ranks(what: str, plan: dict[str, Any], where: Path, script: str = "convert_optimizer_ranks") -> None:
    (where / f"{what}.json").write_text(json.dumps(plan))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port)]
    done = subprocess.run(
        [*command, "-m", f"tests.oracle.{script}", what, str(where / f"{what}.json")],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, last(done.stderr)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    where = tmp_path_factory.mktemp("optimizer")
    plan = {}
    for name, run in RUNS.items():
        config = {**SIZES, **CONFIGS[run["family"]]}
        hf = where / f"{name}-hf"
        hf.mkdir()
        (hf / "config.json").write_text(json.dumps(config))
        fixed = {"settings": family_for(config).megatron(config), "dir": str(where / name), "hf": str(hf), "rows": ROWS}
        usual = {"tp": 1, "ep": 1, "dtype": "fp32", "sharding": None, "form": "stacked", "pattern": None}
        plan[name] = {**usual, **run, **fixed}
    ranks("save", plan, where)
    return plan


@pytest.fixture(scope="module")
def loaded(saved: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The runs that were loaded, by name; an original has the name of what was converted and "original, "."""
    plan = {}
    where = Path(saved["fp32"]["dir"]).parent
    for name, (of, settings) in CONVERTED.items():
        run = saved[of]
        out = convert(
            model=run["dir"], hf_config=Path(run["hf"]), to="megatron", out=where / name, verify="roundtrip",
            **{"vocab_padding": ROWS, **settings},
        )  # fmt: skip
        rows = manifest.read(out).encoding["vocab_rows"]
        pattern = "*-" * SIZES["num_hidden_layers"] if settings.get("spec") == "hybrid" else None
        plan[str(where / f"original, {name}")] = {**run, "rows": rows}
        plan[str(where / name)] = {**run, "dir": str(out), "rows": rows, "pattern": pattern}
    ranks("load", plan, where)
    return {Path(name).name: run for name, run in plan.items()}


def seen(where: Path, rank: int, hybrid: str | None = None) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(f"{where}-rank{rank}.pt")
    return found | {moment: as_gpt(found[moment]) for moment in ("before", "after") if hybrid}


def as_gpt(found: dict[str, Any]) -> dict[str, Any]:
    """A HybridModel's parameters under GPTModel's names; its layers are attention and MLP in turn."""
    plain = {name.replace("final_norm", "final_layernorm"): tensor for name, tensor in found.items()}
    return {re.sub(r"(?<=layers\.)\d+", lambda n: str(int(n[0]) // 2), name): t for name, t in plain.items()}


def different(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> list[str]:
    assert first.keys() == second.keys()
    return [name for name, tensor in first.items() if not torch.equal(tensor, second[name])]


@pytest.mark.parametrize("name", CONVERTED)
def test_training_goes_on_bit_for_bit(loaded: dict[str, dict[str, Any]], name: str) -> None:
    """As from the original under the same padding; and where the padding stays, as in the run that was saved."""
    run = loaded[name]
    where = Path(run["dir"]).parent
    others = [where / f"original, {name}"] + ([where / CONVERTED[name][0]] if run["rows"] == ROWS else [])
    for rank in range(2):
        mine = seen(where / name, rank, hybrid=run["pattern"])
        for other in others:
            its = seen(other, rank, hybrid=RUNS[CONVERTED[name][0]].get("pattern"))
            assert different(mine["before"], its["before"]) == []
            assert different(mine["after"], its["after"]) == []
        assert different(mine["before"], mine["after"]) != []
        assert len(mine["before"]) > 100


@pytest.mark.parametrize("name", CONVERTED)
def test_what_is_no_tensor_goes_along(loaded: dict[str, dict[str, Any]], name: str) -> None:
    run = loaded[name]
    where = Path(run["dir"]).parent
    for rank in range(2):
        mine, its = seen(where / name, rank), seen(where / f"original, {name}", rank)
        assert mine["rng"] == its["rng"] == (rank if run["tp"] == 2 else 0)
        assert mine["scheduler"] == its["scheduler"] != {}
        extra = as_gpt(mine["extra"]) if run["pattern"] else mine["extra"]
        saved_as = {name: value for name, value in extra.items() if value}  # a HybridModel asks for one more: None
        assert len(saved_as) >= 4 * 4
        if RUNS[CONVERTED[name][0]].get("pattern"):
            saved_as = {module: next(iter(as_gpt({value: value}))) for module, value in saved_as.items()}
        assert [module for module, value in saved_as.items() if module != value] == []
        assert mine["args"]["padded_vocab_size"] == run["rows"]
        layers = SIZES["num_hidden_layers"]
        assert (mine["args"]["num_layers"], mine["args"].get("hybrid_layer_pattern")) == (
            (2 * layers, "*-" * layers) if run["pattern"] else (layers, None)
        )


def test_state_by_data_parallel_rank_is_refused(saved: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    run = saved["by data parallel rank"]
    settings: dict[str, Any] = {"model": run["dir"], "hf_config": Path(run["hf"]), "to": "megatron"}
    with pytest.raises(InputError, match=r"entries of it, like optimizer\.distributed") as raised:
        convert(**settings, out=tmp_path / "x")
    assert "--weights-only" in (raised.value.hint or "")
    out = convert(**settings, out=tmp_path / "weights", weights_only=True)
    assert (out / "latest_checkpointed_iteration.txt").read_text() == "release"
