"""One contract, every engine on transformers models: two ranks of fsdp and of DeepSpeed against the plain engine.

One launch runs all cases (and one more those that are slow); the tests read what they found.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from mst_core.engine import grow, launch
from mst_core.engine.plain import PlainEngine
from mst_core.errors import MissingPackage, RunError
from mst_core.runplan import plan_run
from mst_core.runspec import RunSpec
from tests.launch import ROOT, free_port, last
from tests.oracle import megatron_ranks as contract
from tests.oracle.resume_ranks import state_of

VOCAB = 330
CUT = {"stage3_param_persistence_threshold": 0}
"""ZeRO 3 would keep parameters of these sizes whole."""
ENGINES: dict[str, dict[str, Any]] = {
    "fsdp": {"engine": "fsdp"},
    **{f"zero{stage}": {"engine": "deepspeed", "zero": stage} for stage in range(3)},
    "zero3": {"engine": "deepspeed", "zero": 3, "deepspeed": {"zero_optimization": CUT}},
    "zero2-offload": {"engine": "deepspeed", "zero": 2, "offload": "optimizer"},
    "zero3-offload": {"engine": "deepspeed", "zero": 3, "offload": "all"},
}
LORA = {"lora_rank": 4, "lora_alpha": 12.0}
HALF = {"precision": "bf16"}
ROWS = {**LORA, "add_tokens": ["<tool>", "</tool>"]}
QUANT: dict[str, dict[str, Any]] = {
    "qlora": {"objective": "sft", "micro": 2, "more": {**LORA, "qlora": "nf4"}, "save": True},
    "qlora-double": {
        "objective": "dpo",
        "micro": 2,
        "more": {**LORA, "qlora": "nf4-double"},
        "save": True,
        "resume": True,
    },
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
KINDS: dict[str, dict[str, Any]] = {
    "sft-1": {"objective": "sft", "micro": 1, "save": True},
    "sft-2": {"objective": "sft", "micro": 2, "more": {"clip_grad": 0.0}},
    "recompute": {"objective": "sft", "micro": 2, "more": {"recompute": "full"}, "resume": True},
    "dpo": {"objective": "dpo", "micro": 2},
    "rm": {"objective": "rm", "micro": 2, "save": True, "resume": True},
    "rm-lora": {"objective": "rm", "micro": 2, "more": LORA, "save": True, "resume": True},
    "ipo": {"objective": "ipo", "micro": 2, "steps": 1},
    "lora": {"objective": "dpo", "micro": 2, "more": LORA, "save": True, "resume": True},
    "dora": {"objective": "sft", "micro": 2, "more": {**LORA, "lora_dora": True, "lora_rslora": True}, "save": True},
    "rows": {"objective": "dpo", "micro": 2, "more": ROWS, "save": True, "resume": True},
    "rows-tied": {"objective": "sft", "micro": 2, "more": ROWS, "save": True},
    "moe": {"objective": "sft", "micro": 2, "save": True, "resume": True},
    "moe-lora": {"objective": "sft", "micro": 2, "more": LORA, "save": True},
    **(QUANT if importlib.util.find_spec("bitsandbytes") else {}),
    "bf16": {"objective": "sft", "micro": 2, "more": HALF, "save": True, "resume": True},
    "bf16-lora": {"objective": "dpo", "micro": 2, "more": {**HALF, **LORA}, "save": True},
    "refuse": {"objective": "sft", "micro": 2, "refuse": True},
}
ADAPTERS = ("rm-lora", "lora", "dora", "rows", "rows-tied", "moe-lora")
QUICK = (
    *(f"fsdp/{kind}" for kind in KINDS),
    "zero0/sft-2", "zero0/refuse", "zero1/sft-1", "zero2/dpo", "zero2/refuse", "zero2/bf16", "zero3/dora",
    "zero2/qlora", "zero3/moe-lora", "zero3/rows", "zero2/rows-tied",
    "zero3/sft-1", "zero3/moe", "zero3/rm", "zero2/rm-lora", "zero3/ipo",
    "zero3/recompute", "zero3/lora", "zero3/refuse", "zero3/bf16-lora",
)  # fmt: skip
NOT = {"zero0": ("bf16", "bf16-lora"), **dict.fromkeys(("zero3", "zero3-offload"), tuple(QUANT))}
"""Refused in the plan."""
ALL = [f"{engine}/{kind}" for engine in ENGINES for kind in KINDS if kind not in NOT.get(engine, ())]


def cases(*kinds: str) -> list[Any]:
    """The cases of some kinds, those that CI leaves out marked."""
    found = [name for name in ALL if not kinds or name.partition("/")[2] in kinds]
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in found]


def case_of(name: str, model: Path, where: Path) -> dict[str, Any]:
    """What a rank is told of a case."""
    engine, kind = (table[part] for table, part in zip((ENGINES, KINDS), name.split("/"), strict=True))
    rows = 1 if kind["objective"] == "sft" else 2
    flat = name.replace("/", "-")
    places = {key: str(where / f"{key}-{flat}") for key in ("save", "resume") if kind.get(key)}
    settings = {**engine, "micro_batch": kind["micro"] // rows, **kind.get("more", {})}
    told = {"engine": engine["engine"], "model": str(model), "vocab": VOCAB, "objective": kind["objective"]}
    return {
        **told,
        "steps": kind.get("steps", 5),
        "rows": rows,
        "settings": settings,
        "refuse": kind.get("refuse"),
        **places,
    }


class Ran:
    """Findings by name, from one launch for the quick cases and one for all others."""

    def __init__(self, model: Path, where: Path) -> None:
        self.model, self.where = model, where
        self.half = self.moe = self.even = self.reward = self.grown = self.tied = model
        self.found: dict[str, list[dict[str, Any]]] = {}

    def __call__(self, name: str) -> dict[str, Any]:
        """What rank 0 found, every rank having found the same."""
        if name not in self.found:
            self._launch([other for other in ALL if (other in QUICK) == (name in QUICK)])
        first, *others = self.found[name]
        assert "error" not in first, first
        for other in others:
            assert other.get("steps") == first.get("steps")
            assert "after" not in first or torch.equal(other["after"], first["after"])
        return first

    def case(self, name: str) -> dict[str, Any]:
        own = {"bf16": self.half, "moe": self.moe, "qlora": self.even, "tied": self.tied, "rows": self.grown}
        own["rm"] = self.reward
        model = next((model for kind, model in own.items() if kind in name), self.model)
        return case_of(name, model, self.where)

    def _launch(self, names: list[str]) -> None:
        plan = {"out": str(self.where), "cases": {name: self.case(name) for name in names}}
        (self.where / "plan.json").write_text(json.dumps(plan))
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", free_port()]
        words = [sys.executable, *launcher, "-m", "tests.oracle.engine_ranks", str(self.where / "plan.json")]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(words, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=1800)
        assert done.returncode == 0, last(done.stderr)
        for rank in range(2):
            for name, found in torch.load(self.where / f"rank-{rank}.pt").items():
                self.found.setdefault(name, []).append(found)


@pytest.fixture(scope="module")
def ran(tiny_hf: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Ran:
    found = Ran(tiny_hf("llama"), tmp_path_factory.mktemp("engines"))
    found.half = tiny_hf("llama", dtype="bfloat16")
    found.even = tiny_hf("llama", intermediate_size=128)
    found.reward = tiny_hf("qwen2", scores=True)
    found.moe = tiny_hf("qwen3_moe", **EXPERTS)
    found.grown, found.tied = (grown(tiny_hf(family), found.where / family) for family in ("llama", "qwen2"))
    return found


def grown(model: Path, cache: Path) -> Path:
    """The model with the tokens of ``ROWS``."""
    cache.mkdir()
    (cache / "rows.jsonl").write_text('{"text": "a"}\n')
    spec = RunSpec(model=str(model), data=(cache / "rows.jsonl",), out=cache / "out", cache=cache, **ROWS)
    return grow.prepared(spec, plan_run(spec, "test")).model_dir


@pytest.fixture(scope="module")
def plain(ran: Ran) -> Callable[[str], tuple[PlainEngine, dict[str, Any]]]:
    """``plain(name)``: the case on the plain engine, and that engine."""
    made: dict[str, tuple[PlainEngine, dict[str, Any]]] = {}

    def play(name: str) -> tuple[PlainEngine, dict[str, Any]]:
        case = ran.case(name)
        alone = {
            key: value
            for key, value in case["settings"].items()
            if key not in ("engine", "zero", "offload", "deepspeed")
        }
        kind = name.partition("/")[2]
        if kind not in made:
            one = {**case, "settings": alone}
            engine = PlainEngine(contract.spec_of(one), Path(case["model"]))
            made[kind] = (engine, contract.play(engine, one))
        return made[kind]

    return play


@pytest.mark.parametrize("name", cases("sft-1", "sft-2", "recompute", "dpo", "rm", *ADAPTERS, *QUANT, "moe"))
def test_five_steps_equal_the_plain_engine(ran: Ran, plain: Any, name: str) -> None:
    found, wanted = ran(name), plain(name)[1]
    for step, expected in zip(found["steps"], wanted["steps"], strict=True):
        assert step.keys() == expected.keys()
        for key, value in expected.items():
            limit = 1e-5 if "loss" in key or key in ("nll", "dpo") else 1e-4
            assert abs(step[key] - value) <= limit * (max(1.0, value) if key == "grad_norm" else 1), key
    assert (found["before"] - wanted["before"]).abs().max() <= 1e-5
    assert (found["after"] - wanted["after"]).abs().max() <= 1e-3
    assert (found["after"] - found["before"]).abs().max() > 0.01


@pytest.mark.parametrize("name", cases("ipo"))
def test_the_first_loss_of_ipo_is_known(ran: Ran, plain: Any, name: str) -> None:
    """1 / (4 beta^2), the policy being the reference; its gradient is the plain engine's."""
    first, wanted = ran(name)["steps"][0], plain(name)[1]["steps"][0]
    assert first["loss"] == pytest.approx(contract.FIRST["ipo"], rel=2e-6)
    assert first["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-4)


@pytest.mark.parametrize("name", cases("bf16", "bf16-lora"))
def test_bf16_is_near_the_plain_engines(ran: Ran, plain: Any, name: str) -> None:
    """fsdp computes what plain does; DeepSpeed's weights and activations have 8 bits (0.01 of a loss of 6.5)."""
    loss, norm = (1e-3, 1e-3) if name.startswith("fsdp") else (0.02, 0.03)
    found, wanted = ran(name), plain(name)[1]
    for step, expected in zip(found["steps"], wanted["steps"], strict=True):
        assert abs(step["loss"] - expected["loss"]) <= loss
        assert abs(step["grad_norm"] - expected["grad_norm"]) <= norm * expected["grad_norm"]
    assert (found["after"] - found["before"]).abs().max() > 0.01


@pytest.mark.parametrize("name", cases("dpo", "lora", "rows", "bf16-lora"))
def test_the_first_dpo_loss_is_ln_2(ran: Ran, name: str) -> None:
    assert abs(ran(name)["steps"][0]["loss"] - math.log(2)) <= 1e-6


@pytest.mark.parametrize("name", cases("lora", "dora", "rows", "rows-tied", "qlora-double", "moe-lora", "bf16-lora"))
def test_the_adapter_off_is_the_base(ran: Ran, name: str) -> None:
    found = ran(name)
    assert torch.equal(found["reference"], found["before"])
    assert not torch.equal(found["after"], found["before"])


@pytest.mark.parametrize("name", cases("sft-1", "rm", *ADAPTERS, *QUANT, "moe", "bf16", "bf16-lora"))
def test_what_is_saved_is_what_the_plain_engine_saves(ran: Ran, plain: Any, name: str, tmp_path: Path) -> None:
    """Names, shapes and dtypes the same, fp32 values near; bf16 weights within an update or two."""
    ran(name)
    engine = plain(name)[0]
    contract.save(engine, tmp_path / "plain")
    (file,) = (path.name for path in (tmp_path / "plain").glob("*.safetensors"))
    found, wanted = load_file(Path(ran.case(name)["save"]) / file), load_file(tmp_path / "plain" / file)
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert found[key].dtype == value.dtype
        # Adam's step is the learning rate where a gradient is noise: five of them.
        limit = 1e-2 if "bf16" in name else 1e-4
        assert (found[key].float() - value.float()).abs().max() <= limit, key


@pytest.mark.parametrize("name", cases("recompute", "rm", "rm-lora", "lora", "rows", "qlora-double", "moe", "bf16"))
def test_a_second_engine_goes_on_bit_for_bit(ran: Ran, name: str) -> None:
    found = ran(name)["resumed"]
    assert found["same"]
    assert found["steps"][0] == found["steps"][1]


@pytest.mark.parametrize("name", [name for name in cases("recompute", "lora") if "zero" in str(name)])
def test_deepspeeds_own_checkpoint_is_for_the_same_layout(ran: Ran, name: str) -> None:
    own = ran(name)["resumed"]["own"]
    assert own["same"]
    assert "is of another layout of ranks: ranks was 3, is 2" in own["said"][0]
    assert "has its optimizer state on NVMe" in own["said"][1]


@pytest.mark.parametrize("name", cases("refuse"))
def test_a_step_that_is_not_finite_leaves_the_weights(ran: Ran, plain: Any, name: str) -> None:
    found = ran(name)
    assert [said.partition(":")[0] for said in found["said"]] == ["step 1", "step 2"]
    assert "loss nan" in found["said"][0]
    assert "gradient norm nan" in found["said"][1]
    assert found["same"]
    assert found["next"]["loss"] == pytest.approx(plain("fsdp/sft-2")[1]["steps"][0]["loss"], abs=1e-5)
    assert found["next"]["grad_norm"] == pytest.approx(plain("fsdp/sft-2")[1]["steps"][0]["grad_norm"], rel=1e-4)


@pytest.fixture
def world_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", ["recompute", "lora"])
def test_fsdp_goes_on_with_another_number_of_ranks(ran: Ran, world_of_one: None, kind: str) -> None:
    name = f"fsdp/{kind}"
    wanted, case = ran(name)["resumed"]["state"], ran.case(name)
    engine: Any = launch.make_engine("fsdp", contract.spec_of(case), Path(case["model"]))
    engine.load_state(Path(case["resume"]))
    assert engine.steps == 5
    saved = state_of(Path(case["resume"]))
    for key, parameter in engine.trained:
        assert torch.equal(parameter.full_tensor(), wanted[key])
        for moment in ("exp_avg", "exp_avg_sq"):
            whole = saved[f"{moment} of {key}"].view_as(parameter)
            assert torch.equal(engine.optimizer.state[parameter][moment].full_tensor(), whole)
            assert whole.abs().max() > 0


def test_a_model_that_fsdp_does_not_shard_is_an_error(ran: Ran, world_of_one: None, monkeypatch: Any) -> None:
    """transformers' Trainer trains on without a word."""
    from transformers import LlamaPreTrainedModel

    monkeypatch.setattr(LlamaPreTrainedModel, "_no_split_modules", ["NoSuchLayer"])
    case = ran.case("fsdp/sft-1")
    with pytest.raises(RunError, match="wrapped 0 decoder layers"):
        launch.make_engine("fsdp", contract.spec_of(case), Path(case["model"]))


def test_without_deepspeed_the_pip_line_is_told(ran: Ran, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    case = ran.case("zero2/sft-1")
    with pytest.raises(MissingPackage) as caught:
        launch.make_engine("deepspeed", contract.spec_of(case), Path(case["model"]))
    assert caught.value.hint == "pip install 'mst-tools-core[deepspeed]'"


def test_a_lock_that_an_interrupted_build_left_is_removed(tmp_path: Path, capsys: Any) -> None:
    from mst_core.engine.deepspeed import wait_for_lock

    lock = tmp_path / "lock"
    lock.touch()
    os.utime(lock, (time.time() - 100,) * 2)
    with subprocess.Popen(["sleep", "2"], cwd=tmp_path) as build:  # a compiler at work: its lock is waited for
        begun = time.monotonic()
        wait_for_lock(tmp_path)
        assert time.monotonic() - begun > 1
        build.wait()
    assert not lock.exists()
    assert f"{lock} was left by a build that was interrupted: removed" in capsys.readouterr().err
    lock.touch()  # a young one may be a build that has just begun
    with subprocess.Popen(["sh", "-c", f"sleep 1; rm {lock}"]):
        wait_for_lock(tmp_path)
    assert "removed" not in capsys.readouterr().err
