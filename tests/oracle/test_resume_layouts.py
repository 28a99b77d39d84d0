"""A run goes on under another layout of ranks: 10 steps straight equal 4, a save, and 6 under the other one.

The state as the second layout saves it right after loading is the first one's bit for bit; what it does then differs
by the order of its sums only. One launch for each engine and number of ranks; the tests read what they found.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.launch import ROOT, free_port, last
from tests.oracle.resume_ranks import ALL, FIRST, state_of
from tests.oracle.test_megatron_layouts import MODELS

VOCAB = 330
SP, DIST = {"tp": 2, "sp": True}, {"distributed_optimizer": True}
LORA, HALF, WIDE = {"lora_rank": 4}, {"precision": "bf16"}, {"precision": "fp16", "initial_loss_scale": 2.0**18}
AHEAD = {**DIST, "overlap_grad_reduce": True, "overlap_param_gather": True}
VIRTUAL = {"pp": 2, "vp": 2, "micro_batch": 2}
Z = [{"zero": stage} for stage in range(4)]

STARTS: dict[str, tuple[str, str, int, dict[str, Any]]] = {
    "tp2": ("megatron", "llama", 2, {"tp": 2}),
    "pp2": ("megatron", "llama", 2, {"pp": 2}),
    "tied": ("megatron", "qwen2", 2, {"pp": 2}),
    "dist": ("megatron", "qwen2", 2, DIST),
    "ep2": ("megatron", "qwen3-moe", 2, {"ep": 2}),
    "mixed": ("megatron", "mixed", 2, {"pp": 2}),
    "lora": ("megatron", "llama", 2, {"tp": 2, **LORA}),
    "ep2-lora": ("megatron", "qwen3-moe", 2, {"ep": 2, **LORA}),
    "half": ("megatron", "llama", 2, {**DIST, **HALF}),
    "half-lora": ("megatron", "llama", 2, {**DIST, **HALF, **LORA}),
    "wide": ("megatron", "llama", 2, {"pp": 2, **WIDE}),
    "one": ("megatron", "llama", 1, {}),
    "one-ahead": ("megatron", "llama", 1, AHEAD),
    "z1": ("deepspeed", "llama", 2, Z[1]),
    "z2": ("deepspeed", "llama", 2, Z[2]),
    "z3": ("deepspeed", "llama", 2, Z[3]),
    "z2-half": ("deepspeed", "llama", 2, {**Z[2], **HALF}),
    "z3-half": ("deepspeed", "llama", 2, {**Z[3], **HALF}),
    "z3-lora": ("deepspeed", "llama", 2, {**Z[3], **LORA}),
    "z1-one": ("deepspeed", "llama", 1, Z[1]),
}
"""Where a run starts: engine, model, ranks, settings."""
GOES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "tp2 -> itself": ("tp2", 2, {"tp": 2}),
    "tp2 -> tp1": ("tp2", 1, {}),
    "tp2 -> dp2-dist": ("tp2", 2, DIST),
    "tp2 -> pp2": ("tp2", 2, {"pp": 2}),
    "pp2 -> tp2": ("pp2", 2, {"tp": 2}),
    "pp2 -> vp2": ("pp2", 2, VIRTUAL),
    "pp2 -> cp2-dist": ("pp2", 2, {"cp": 2, **DIST}),
    "pp2 -> first1": ("pp2", 2, {"pp": 2, "decoder_first_pipeline_num_layers": 1}),
    "pp2 -> one": ("pp2", 1, {}),
    "tied -> tp2-sp": ("tied", 2, SP),
    "dist -> itself": ("dist", 2, DIST),
    "dist -> tied": ("dist", 2, {"pp": 2}),
    "dist -> one": ("dist", 1, {}),
    "ep2 -> ep1": ("ep2", 1, {}),
    "ep2 -> etp2": ("ep2", 2, {"etp": 2}),
    "ep2 -> experts-dp2-dist": ("ep2", 2, DIST),
    "ep2 -> tp2-etp1-dist": ("ep2", 2, {**SP, "etp": 1, "ep": 2, **DIST}),
    "mixed -> ep2-dist": ("mixed", 2, {"ep": 2, **DIST}),
    "lora -> tp1": ("lora", 1, LORA),
    "lora -> pp2": ("lora", 2, {"pp": 2, **LORA}),
    "lora -> dp2-dist": ("lora", 2, {**DIST, **LORA}),
    "ep2-lora -> tp2-sp": ("ep2-lora", 2, {**SP, **LORA}),
    "ep2-lora -> one": ("ep2-lora", 1, LORA),
    "half -> tp2": ("half", 2, {"tp": 2, **HALF}),
    "half-lora -> tp2": ("half-lora", 2, {"tp": 2, **HALF, **LORA}),
    "wide -> tp2": ("wide", 2, {"tp": 2, **WIDE}),
    "one -> pp2": ("one", 2, {"pp": 2}),
    "one -> overlap": ("one", 2, AHEAD),
    "one-ahead -> tp2": ("one-ahead", 2, {"tp": 2}),
    "z2 -> itself": ("z2", 2, Z[2]),
    "z2 -> z3": ("z2", 2, Z[3]),
    "z2 -> z3-one": ("z2", 1, Z[3]),
    "z1 -> z0-one": ("z1", 1, Z[0]),
    "z3 -> z1": ("z3", 2, Z[1]),
    "z3 -> z2-one": ("z3", 1, Z[2]),
    "z3-lora -> z2-one": ("z3-lora", 1, {**Z[2], **LORA}),
    "z2-half -> z3-one": ("z2-half", 1, {**Z[3], **HALF}),
    "z3-half -> z1": ("z3-half", 2, {**Z[1], **HALF}),
    "z1-one -> z3": ("z1-one", 2, Z[3]),
    "z1-one -> z0": ("z1-one", 2, Z[0]),
    "z2 -> z2-offload": ("z2", 2, {**Z[2], "offload": "optimizer"}),
    "z3 -> z3-offload": ("z3", 1, {**Z[3], "offload": "all"}),
}
"""Where it goes on: from which, ranks, settings."""
SLOW = {name for name, (start, _, more) in GOES.items() if STARTS[start][2] == 1 or "offload" in more}
"""From one rank to two: launches of their own. Offload: compiles an operator."""


def chosen(*without: str) -> list[Any]:
    """Where runs go on, those that CI leaves out marked."""
    names = [name for name in GOES if not without or GOES[name][2].keys().isdisjoint(without)]
    return [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in names]


def launch_of(name: str) -> tuple[str, int, bool]:
    """Which launch a case belongs to: engine, ranks, whether CI leaves it out."""
    if name in STARTS:
        engine, _, world, _ = STARTS[name]
        return engine, world, world == 1
    start, world, _ = GOES[name]
    return STARTS[start][0], world, name in SLOW


class Ran:
    """What runs found, by name; the launch of a case is made when it is first asked for."""

    def __init__(self, models: Callable[[str], Path], where: Path) -> None:
        self.models, self.where = models, where
        self.found: dict[str, dict[str, Any]] = {}

    def __call__(self, name: str) -> dict[str, Any]:
        key = launch_of(name)
        if name not in self.found:
            cases = [other for other in (*STARTS, *GOES) if launch_of(other) == key]
            for start in {GOES[other][0] for other in cases if other in GOES}:
                if start not in cases:
                    self(start)
            self._launch(key[1], {other: self.case(other) for other in cases})
        return self.found[name]

    def case(self, name: str) -> dict[str, Any]:
        start, world, settings = GOES.get(name, (name, *STARTS.get(name, (0, 0, 0, {}))[2:]))
        engine, model, _, _ = STARTS[start]
        return {
            "engine": engine, "model": str(self.models(model)), "vocab": VOCAB, "state": str(self.state(name)),
            "saved": str(self.where / "saved" / name), "from": str(self.state(start)) if name in GOES else None,
            "settings": {"adam_eps": 1e-6, **settings, "engine": engine, "nproc": world},
        }  # fmt: skip

    def state(self, name: str) -> Path:
        return self.where / "state" / name

    def weights(self, name: str) -> dict[str, torch.Tensor]:
        (file,) = (self.where / "saved" / name).glob("*.safetensors")
        return load_file(file)

    def _launch(self, world: int, cases: dict[str, Any]) -> None:
        for folder in ("state", "saved"):
            (self.where / folder).mkdir(exist_ok=True)
        out, plan = self.where / "found.pt", self.where / "plan.json"
        plan.write_text(json.dumps({"out": str(out), "cases": cases}))
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(world), "--master-port", free_port()]
        words = [sys.executable, *launcher, "-m", "tests.oracle.resume_ranks", str(plan)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(words, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=1800)
        assert done.returncode == 0, last(done.stderr)
        self.found |= torch.load(out)


@pytest.fixture(scope="module")
def ran(tiny_hf: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return Ran(lambda name: tiny_hf(**MODELS[name]), tmp_path_factory.mktemp("layouts"))


@pytest.mark.parametrize("name", chosen())
def test_the_state_under_the_other_layout_is_the_same(ran: Ran, name: str) -> None:
    found = ran(name)
    assert "error" not in found, found
    assert found["done"] == FIRST
    before, after = state_of(ran.state(GOES[name][0])), state_of(ran.state(name))
    assert before.keys() == after.keys()
    for key, whole in before.items():
        rows = min(len(whole), len(after[key]))  # the vocabulary may be padded to another number
        assert torch.equal(whole[:rows], after[key][:rows]), key
        assert rows >= VOCAB or len(whole) == len(after[key])
        assert "exp_avg" not in key or float(whole.abs().max()) > 0
        # In fp16 two of the four were skipped: their gradients overflowed.
        assert "updates" not in key or float(whole) == (FIRST if "wide" not in name else FIRST - 2)


@pytest.mark.parametrize("name", chosen("precision"))
def test_ten_steps_straight_are_four_and_six(ran: Ran, name: str) -> None:
    found, straight = ran(name), ran(GOES[name][0])
    for step, expected in zip(found["rest"], straight["rest"], strict=True):
        assert abs(step["loss"] - expected["loss"]) <= 1e-5
        assert abs(step["grad_norm"] - expected["grad_norm"]) <= 1e-4 * expected["grad_norm"]
    assert len(found["rest"]) == ALL - FIRST
    before, after = ran.weights(GOES[name][0]), ran.weights(name)
    assert before.keys() == after.keys()
    for key, weight in before.items():
        assert (weight - after[key]).abs().max() <= 1e-5, key
    if "itself" in name:
        assert found["rest"] == straight["rest"]
        assert all(torch.equal(weight, after[key]) for key, weight in before.items())


@pytest.mark.parametrize("name", [name for name in chosen() if "half" in str(name) or "wide" in str(name)])
def test_half_precision_goes_on_within_its_rounding(ran: Ran, name: str) -> None:
    found, straight = ran(name), ran(GOES[name][0])
    for step, expected in zip(found["rest"], straight["rest"], strict=True):
        assert abs(step["loss"] - expected["loss"]) <= 0.03
        assert step.get("loss_scale") == expected.get("loss_scale")
    if "wide" in name:  # the scale was halved before the save, and is not what the run begins with
        assert straight["first"][-1]["loss_scale"] < WIDE["initial_loss_scale"]
