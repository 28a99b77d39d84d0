"""The megatron engine against the plain one: real megatron-core over gloo, every layout, five optimizer steps.

Two launches (of two and of four ranks) run all cases; the tests read what they found.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mst_convert import plan as planning
from mst_convert import work as working
from mst_convert.spec import ConvertSpec
from mst_core.engine.plain import PlainEngine

HERE = Path(__file__).parent
loader = importlib.util.spec_from_file_location("megatron_ranks", HERE / "megatron_ranks.py")
ranks = importlib.util.module_from_spec(loader)
loader.loader.exec_module(ranks)

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", "padding": 128},
    # 1024 rows: under TP 2 the second rank holds padding only.
    "qwen2": {"family": "qwen2", "padding": 1024},
    "qwen3": {"family": "qwen3", "padding": 2},
    "mistral": {"family": "mistral", "padding": 128, "dims": {"sliding_window": 6}},
    "half": {"family": "llama", "padding": 128, "dims": {"dtype": "bfloat16"}},
}
VOCAB = 330
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"world": 2, "settings": {"tp": 2}},
    "pp2": {"world": 2, "settings": {"pp": 2}},
    "dp2": {"world": 2, "settings": {}},
    "dp2-dist": {"world": 2, "settings": {"distributed_optimizer": True}},
    "tp2-sp": {"world": 2, "settings": {"tp": 2, "sp": True}},
    "tp2-pp2": {"world": 4, "settings": {"tp": 2, "pp": 2}},
    "tp2-dp2-sp-dist": {"world": 4, "settings": {"tp": 2, "sp": True, "distributed_optimizer": True}},
    "pp2-dp2": {"world": 4, "settings": {"pp": 2}},
    "pp4": {"world": 4, "settings": {"pp": 4}},
}
LORA = {"lora_rank": 4, "lora_alpha": 12.0}
ROWS = {"sft": 1, "dpo": 2, "ipo": 2}


def case(model: str, layout: str, objective: str, micro: int = 2, steps: int = 5, **more: Any) -> dict[str, Any]:
    chosen = LAYOUTS[layout]
    settings = {**chosen["settings"], "micro_batch": micro // ROWS[objective], **more.pop("settings", {})}
    return {
        "base": model, "world": chosen["world"], "objective": objective, "steps": steps, "rows": ROWS[objective],
        "settings": settings, **more,
    }  # fmt: skip


def cases() -> dict[str, dict[str, Any]]:
    found = {f"{o}/{name}": case("llama", name, o) for o in ("sft", "dpo") for name in LAYOUTS}
    found |= {f"ipo/{name}": case("llama", name, "ipo", steps=1) for name in ("tp2", "pp2", "tp2-pp2")}
    for family, layout in (("qwen2", "pp2"), ("qwen2", "tp2-sp"), ("qwen3", "tp2-sp"), ("qwen3", "tp2-pp2"),
                           ("mistral", "pp2"), ("mistral", "tp2-sp")):  # fmt: skip
        found[f"{family}/{layout}"] = case(family, layout, "sft")
    for family in ("llama", "qwen2", "qwen3", "mistral"):
        found[f"logits/{family}"] = case(family, "dp2", "sft", steps=0, logits=True)
    for micro in (1, 2, 4):
        for layout in ("pp2", "dp2"):
            found[f"micro/{layout}/{micro}"] = case("llama", layout, "sft", micro, 3, settings={"clip_grad": 0.0})
    for layout in ("tp2-pp2", "pp2", "tp2-dp2-sp-dist"):
        found[f"lora/{layout}"] = case("qwen2", layout, "dpo", settings=LORA, save=True)
    found["lora/few"] = case("qwen3", "tp2-sp", "sft", settings={**LORA, "lora_targets": ("k_proj", "up_proj")})
    for layout in ("tp2", "dp2-dist"):
        found[f"bf16/{layout}"] = case("half", layout, "sft", settings={"precision": "bf16"}, save=True)
        found[f"bf16-lora/{layout}"] = case("half", layout, "dpo", settings={"precision": "bf16", **LORA}, save=True)
    for layout in ("tp2-sp", "pp2", "tp2-pp2"):
        found[f"untouched/{layout}"] = case("qwen2", layout, "sft", steps=0, save=True)
    found["untouched/half"] = case("half", "tp2", "sft", steps=0, settings={"precision": "bf16"}, save=True)
    found["trained/tp2-pp2"] = case("qwen2", "tp2-pp2", "sft", save=True)
    for layout, more in (("tp2-pp2", {}), ("dp2-dist", {}), ("tp2", {"precision": "bf16"})):
        found[f"refuse/{layout}{'-bf16' if more else ''}"] = case("llama", layout, "sft", does="refuse", settings=more)
    return found


CASES = cases()


def convert(**settings: Any) -> Path:
    spec = ConvertSpec(**settings)
    working.work(spec, planning.plan(spec))
    return spec.out


@pytest.fixture(scope="module")
def hf(tiny_hf: Callable[..., Path]) -> dict[str, Path]:
    return {name: tiny_hf(model["family"], **model.get("dims", {})) for name, model in MODELS.items()}


@pytest.fixture(scope="module")
def ran(hf: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    where = tmp_path_factory.mktemp("megatron")
    for name, model in MODELS.items():
        convert(model=str(hf[name]), to="megatron", out=where / name, vocab_padding=model["padding"])
    for name, chosen in CASES.items():
        chosen.update(model=str(where / chosen["base"]), vocab=VOCAB)
        if chosen.get("save"):
            chosen["save"] = str(where / f"saved-{name.replace('/', '-')}")
    (where / "plan.json").write_text(json.dumps({"out": str(where), "cases": CASES}))
    found: dict[str, Any] = {"where": where}
    for world in (2, 4):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
        done = subprocess.run(
            [*command, str(HERE / "megatron_ranks.py"), str(where / "plan.json")],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, _last(done.stderr)
        found[world] = [torch.load(where / f"rank-{rank}-of-{world}.pt") for rank in range(world)]
    return found


def _last(text: str) -> str:
    """The end of the first rank's traceback."""
    lines = [line for line in text.splitlines() if line.startswith("[rank0]")]
    return "\n".join(lines[-30:]) or text[-3000:]


@pytest.fixture(scope="module")
def plain(hf: dict[str, Path]) -> Callable[[str], tuple[PlainEngine, dict[str, Any]]]:
    """``plain(name)``: the case on the plain engine, and that engine; the layout falls away."""
    made: dict[str, tuple[PlainEngine, dict[str, Any]]] = {}

    def play(name: str) -> tuple[PlainEngine, dict[str, Any]]:
        chosen = CASES[name]
        kept = {k: v for k, v in chosen["settings"].items() if k not in ("tp", "pp", "sp", "distributed_optimizer")}
        one = {**chosen, "settings": kept, "model": str(hf[chosen["base"]]), "vocab": VOCAB}
        key = json.dumps({k: v for k, v in one.items() if k not in ("world", "save")}, sort_keys=True)
        if key not in made:
            engine = PlainEngine(ranks.spec_of(one), hf[chosen["base"]])
            made[key] = (engine, ranks.play(engine, one))
        return made[key]

    return play


def found_of(ran: dict[str, Any], name: str) -> dict[str, Any]:
    """What rank 0 found, every rank having found the same."""
    per_rank = [rank[name] for rank in ran[CASES[name]["world"]]]
    for other in per_rank[1:]:
        assert other.get("steps") == per_rank[0].get("steps")
        for key in ("before", "after", "reference"):
            assert key not in other or torch.equal(other[key], per_rank[0][key])
    return per_rank[0]


def named(*prefixes: str) -> list[str]:
    return [name for name in CASES if name.split("/")[0] in prefixes]


def difference(first: list[dict[str, float]], second: list[dict[str, float]], key: str) -> float:
    assert len(first) == len(second)
    return max(abs(a[key] - b[key]) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("name", named("sft", "dpo", "qwen2", "qwen3", "mistral", "micro", "lora", "trained"))
def test_five_steps_equal_the_plain_engine(ran: dict[str, Any], plain: Any, name: str) -> None:
    found, wanted = found_of(ran, name), plain(name)[1]
    assert found["steps"][0].keys() == wanted["steps"][0].keys()
    for key in wanted["steps"][0]:
        limit = 1e-5 if "loss" in key or key in ("nll", "dpo") else 1e-4
        if key == "grad_norm":  # a norm of several units: relative to it, for CPUs differ in the order of their sums
            limit *= max(step[key] for step in wanted["steps"])
        assert difference(found["steps"], wanted["steps"], key) <= limit, key
    assert (found["before"] - wanted["before"]).abs().max() <= 1e-5
    assert (found["after"] - wanted["after"]).abs().max() <= 1e-3
    assert (found["after"] - found["before"]).abs().max() > 0.01


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name]["objective"] in ranks.FIRST])
def test_the_first_loss_of_pairs_is_known(ran: dict[str, Any], name: str) -> None:
    """ln 2, of IPO 1 / (4 beta^2): the policy is the reference, on every layout."""
    assert found_of(ran, name)["steps"][0]["loss"] == pytest.approx(ranks.FIRST[CASES[name]["objective"]], rel=2e-6)


@pytest.mark.parametrize("name", named("ipo"))
def test_the_first_gradient_of_ipo_is_the_plain_engines(ran: dict[str, Any], plain: Any, name: str) -> None:
    found, wanted = found_of(ran, name)["steps"][0], plain(name)[1]["steps"][0]
    assert found["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-4)


@pytest.mark.parametrize("layout", ["pp2", "dp2"])
def test_micro_batches_change_nothing(ran: dict[str, Any], layout: str) -> None:
    first, *others = [found_of(ran, f"micro/{layout}/{micro}")["steps"] for micro in (1, 2, 4)]
    for other in others:
        assert difference(first, other, "loss") <= 1e-5
        assert difference(first[:1], other[:1], "grad_norm") <= 1e-5
    assert first[0]["grad_norm"] > 0.1  # reported although clipping is off


@pytest.mark.parametrize("name", named("logits"))
def test_logits_equal_transformers(ran: dict[str, Any], hf: dict[str, Path], name: str) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(hf[CASES[name]["base"]], dtype=torch.float32)
    tokens = ranks.batches(99, 3, 3, VOCAB, prompts=False)[0].tokens_BT
    with torch.no_grad():
        wanted = model(tokens).logits
    assert (found_of(ran, name)["logits"] - wanted).abs().max() <= 1e-5


@pytest.mark.parametrize("name", named("lora", "bf16-lora"))
def test_the_adapter_off_is_the_base(ran: dict[str, Any], name: str) -> None:
    found = found_of(ran, name)
    assert torch.equal(found["reference"], found["before"])
    assert not torch.equal(found["after"], found["before"])


@pytest.mark.parametrize("name", [name for name in named("lora", "bf16-lora") if CASES[name].get("save")])
def test_the_adapter_is_what_peft_reads(ran: dict[str, Any], plain: Any, hf: dict[str, Path], name: str) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from mst_core.engine.hf import token_logp

    saved = load_file(Path(CASES[name]["save"]) / "adapter_model.safetensors")
    trained = {n.replace(".default.", "."): p.detach() for n, p in plain(name)[0].trained}
    assert {n: (t.shape, t.dtype) for n, t in saved.items()} == {n: (t.shape, t.dtype) for n, t in trained.items()}
    base = AutoModelForCausalLM.from_pretrained(hf[CASES[name]["base"]], dtype=torch.float32)
    model = PeftModel.from_pretrained(base, CASES[name]["save"])
    probe = ranks.batches(99, 3, 3, VOCAB, prompts=False)[0]
    with torch.no_grad():
        logp = token_logp(model(probe.tokens_BT).logits, probe.tokens_BT) * probe.mask_BT
    assert (logp - found_of(ran, name)["after"]).abs().max() <= (1e-5 if name.startswith("lora") else 0.3)


def test_bf16_adapters_start_and_stay_in_fp32(ran: dict[str, Any]) -> None:
    for name in named("bf16-lora"):
        saved = load_file(Path(CASES[name]["save"]) / "adapter_model.safetensors")
        for tensor in saved.values():
            assert not torch.equal(tensor, tensor.bfloat16().float())


@pytest.mark.parametrize("name", named("bf16", "bf16-lora"))
def test_bf16_follows_fp32(ran: dict[str, Any], plain: Any, name: str) -> None:
    found, wanted = found_of(ran, name)["steps"], plain(name)[1]["steps"]
    assert difference(found, wanted, "loss") <= 0.05
    assert (found[-1]["loss"] < found[0]["loss"]) == (wanted[-1]["loss"] < wanted[0]["loss"])


@pytest.mark.parametrize("name", named("untouched"))
def test_an_untouched_model_comes_back_bit_equal(ran: dict[str, Any], hf: dict[str, Path], name: str) -> None:
    saved = Path(CASES[name]["save"])
    back = convert(model=str(saved), to="hf", out=saved.with_name(saved.name + "-hf"))
    first, second = load_file(hf[CASES[name]["base"]] / "model.safetensors"), load_file(back / "model.safetensors")
    assert first.keys() == second.keys()
    for key, tensor in first.items():
        assert tensor.dtype == second[key].dtype
        assert torch.equal(tensor, second[key]), key


def test_the_bytes_of_a_save_do_not_depend_on_the_layout(ran: dict[str, Any]) -> None:
    first, *others = [Path(CASES[f"untouched/{layout}"]["save"]) for layout in ("tp2-sp", "pp2", "tp2-pp2")]
    for path in first.rglob("*"):
        if path.is_file() and path.name != "mst.json":
            for other in others:
                assert path.read_bytes() == (other / path.relative_to(first)).read_bytes(), path


def test_a_trained_model_comes_back(ran: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM

    from mst_core.engine.hf import token_logp

    saved = Path(CASES["trained/tp2-pp2"]["save"])
    back = convert(model=str(saved), to="hf", out=saved.with_name(saved.name + "-hf"))
    model = AutoModelForCausalLM.from_pretrained(back, dtype=torch.float32)
    probe = ranks.batches(99, 3, 3, VOCAB, prompts=False)[0]
    with torch.no_grad():
        logp = token_logp(model(probe.tokens_BT).logits, probe.tokens_BT) * probe.mask_BT
    assert (logp - found_of(ran, "trained/tp2-pp2")["after"]).abs().max() <= 1e-5


@pytest.mark.parametrize("name", named("refuse"))
def test_a_step_that_is_not_finite_is_refused(ran: dict[str, Any], name: str) -> None:
    for rank in ran[CASES[name]["world"]]:
        loss, gradient = rank[name]["said"]
        assert "step 1: loss nan" in loss
        assert "step 2: loss 0, gradient norm nan" in gradient
        assert rank[name]["same"]
        assert math.isfinite(rank[name]["next"]["loss"])
        assert math.isfinite(rank[name]["next"]["grad_norm"])
