"""What the megatron engine adds to test_megatron_engine.py: experts, virtual stages, context parallelism, recompute,
overlap, fp16, uneven stages, Hugging Face directories. Real megatron-core over gloo, against the plain engine.

Two launches (of two and of four ranks) run all cases; the tests read what they found.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from mst_convert import plan as planning
from mst_convert import work as working
from mst_convert.spec import ConvertSpec
from mst_core.engine import lora
from mst_core.engine.batches import positions
from mst_core.engine.hf import token_logp
from mst_core.engine.plain import PlainEngine
from mst_core.engine.seam import Batch, Objective, Term
from mst_train.objective import SFT
from tests.conftest import make_hf
from tests.oracle.test_merge_peft import merge

HERE = Path(__file__).parent
loader = importlib.util.spec_from_file_location("megatron_ranks", HERE / "megatron_ranks.py")
ranks = importlib.util.module_from_spec(loader)
loader.loader.exec_module(ranks)

VOCAB = 330
FOUR = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama"},
    "mistral": {"family": "mistral", "sliding_window": 6},
    "qwen2": {"family": "qwen2", "tie_word_embeddings": True},
    "qwen3-moe": {"family": "qwen3_moe", **FOUR, "head_dim": 32, "norm_topk_prob": True},
    # Layers 1 and 3 are dense: keys per layer, and another kind of layer on each stage.
    "mixed": {"family": "qwen3_moe", **FOUR, "head_dim": 32, "norm_topk_prob": False, "decoder_sparse_step": 2},
    "qwen2-moe": {"family": "qwen2_moe", **FOUR, "shared_expert_intermediate_size": 48, "norm_topk_prob": False},
    "mixtral": {"family": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "phi3": {"family": "phi3"},
    "deepseek": {
        "family": "deepseek_v3", "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "n_shared_experts": 2, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
        "q_lora_rank": 24, "kv_lora_rank": 32, "rms_norm_eps": 1e-6, "num_nextn_predict_layers": 0,
        "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 20,
    },
}  # fmt: skip
MODELS["reward"] = {"family": "qwen2", "tie_word_embeddings": True, "scores": True}
MODELS["half"] = {**MODELS["qwen3-moe"], "dtype": "bfloat16"}
for model in MODELS.values():
    model.setdefault("tie_word_embeddings", False)

TP, DIST = {"tp": 2, "sp": True}, {"distributed_optimizer": True}
WIDE = {"precision": "fp16", "initial_loss_scale": 2.0**22, "loss_scale_window": 4}
AHEAD = {**DIST, "overlap_grad_reduce": True, "overlap_param_gather": True}
KEPT = (
    "micro_batch",
    "clip_grad",
    "weight_decay",
    "lr",
    "precision",
    "lora_rank",
    "lora_alpha",
    "lora_targets",
    "lora_rslora",
    "epochs",
)
"""Settings that the plain engine has too."""
EQUAL: dict[str, tuple[str, int, dict[str, Any]]] = {
    "ep2": ("qwen3-moe", 2, {"ep": 2}),
    "ep2-allgather": ("qwen3-moe", 2, {"ep": 2, "moe_token_dispatcher_type": "allgather"}),
    "ep2-dist": ("mixtral", 2, {"ep": 2, **DIST}),
    "experts-dp2": ("qwen2-moe", 2, {}),
    "etp1": ("qwen3-moe", 2, {**TP, "ep": 2, "etp": 1}),
    "etp2": ("qwen3-moe", 2, {"etp": 2}),
    "experts-tp2": ("qwen2-moe", 2, TP),
    "mixed-pp2": ("mixed", 2, {"pp": 2}),
    "tp2-ep2": ("qwen2-moe", 4, {**TP, "ep": 2}),
    "tp2-ep2-allgather": ("mixtral", 4, {**TP, "ep": 2, "etp": 1, "moe_token_dispatcher_type": "allgather"}),
    "pp2-ep2": ("mixed", 4, {"pp": 2, "ep": 2}),
    "ep2-edp2-dist": ("qwen3-moe", 4, {"ep": 2, **DIST}),
    "mla-ep2": ("deepseek", 2, {"ep": 2}),
    "lora-hf-vp2": ("llama", 2, {"pp": 2, "vp": 2, "lora_rank": 4}),
    "vp2": ("llama", 2, {"pp": 2, "vp": 2}),
    "vp2-odd": ("llama", 2, {"pp": 2, "vp": 2, "micro_batch": 8}),
    "vp2-dp2-dist": ("llama", 4, {"pp": 2, "vp": 2, **DIST}),
    "vp2-ep2": ("mixed", 4, {"pp": 2, "vp": 2, "ep": 2}),
    "cp2": ("llama", 2, {"cp": 2}),
    "cp2-dpo": ("llama", 2, {"cp": 2, "micro_batch": 1}),
    "cp2-ipo": ("llama", 2, {"cp": 2, "micro_batch": 1}),
    "tp2-rm": ("reward", 2, TP),
    "pp2-rm": ("reward", 2, {"pp": 2, **DIST}),
    "cp2-rm": ("reward", 2, {"cp": 2}),
    "cp2-window": ("mistral", 2, {"cp": 2}),
    "cp2-ep2": ("qwen3-moe", 2, {"cp": 2, "ep": 2}),
    "cp2-mla": ("deepseek", 2, {"cp": 2}),
    "cp2-tp2": ("llama", 4, {**TP, "cp": 2}),
    "cp2-pp2": ("llama", 4, {"cp": 2, "pp": 2}),
    "cp2-dp2-dist": ("llama", 4, {"cp": 2, **DIST}),
    "pack-pp2": ("llama", 2, {"pp": 2, "micro_batch": 4}),
    "pack-ep2": ("mixed", 2, {"ep": 2, "micro_batch": 4}),
    "pack-window-dp2": ("mistral", 2, {"micro_batch": 2}),
    "pack-tp2": ("qwen2-moe", 2, {**TP, "micro_batch": 4}),
    "pack-mla": ("deepseek", 2, {"ep": 2, "moe_token_dispatcher_type": "allgather"}),
    "pack-pp2-vp2": ("llama", 2, {"pp": 2, "vp": 2, "micro_batch": 4, "recompute": "selective"}),
    "first1": ("llama", 2, {"pp": 2, "decoder_first_pipeline_num_layers": 1}),
    "last1": ("mixed", 2, {"pp": 2, "decoder_last_pipeline_num_layers": 1}),
    "recompute-full": ("llama", 2, {"pp": 2, "recompute": "full", "recompute_num_layers": 2}),
    "recompute-block": ("llama", 2, {**TP, "recompute": "full", "recompute_method": "block"}),
    "recompute-core": ("llama", 2, {"cp": 2, "recompute": "selective"}),
    "recompute-moe": ("qwen3-moe", 2, {"ep": 2, "recompute": "selective", "recompute_modules": ("moe", "core_attn")}),
    "recompute-lora": ("llama", 2, {"pp": 2, "recompute": "full", "lora_rank": 4}),
    "overlap": ("llama", 2, {"overlap_grad_reduce": True}),
    "overlap-gather": ("qwen3-moe", 2, {"ep": 2, **AHEAD}),
    "overlap-gather-vp2": ("llama", 4, {"pp": 2, "vp": 2, **AHEAD}),
}
LORA: dict[str, tuple[str, int, dict[str, Any]]] = {
    "lora-ep2": ("qwen3-moe", 2, {"ep": 2, "lora_rank": 4}),
    "lora-etp2": ("qwen3-moe", 2, {"etp": 2, "lora_rank": 4, "lora_rslora": True}),
    "lora-etp1": ("qwen3-moe", 2, {**TP, "ep": 2, "etp": 1, "lora_rank": 3}),
    "lora-tp2-ep2": ("qwen2-moe", 4, {**TP, "ep": 2, **DIST, "lora_rank": 4}),
    "lora-ep2-edp2": ("qwen3-moe", 4, {"ep": 2, **DIST, "lora_rank": 4, "recompute": "full"}),
    "lora-mixed-pp2": ("mixed", 2, {"pp": 2, "lora_rank": 4}),
    "lora-mixtral": ("mixtral", 2, {
        "ep": 2, "moe_token_dispatcher_type": "allgather", "lora_rank": 4,
        "lora_targets": ("experts.down_proj", "q_proj"),
    }),
    "lora-shared": ("qwen2-moe", 2, {"ep": 2, "lora_rank": 4, "lora_targets": ("up_proj", "shared_expert.down_proj")}),
    "lora-mla": ("deepseek", 2, {"ep": 2, "lora_rank": 4}),
    "lora-tp2-rm": ("reward", 2, {**TP, "lora_rank": 4}),
    "lora-pp2-rm": ("reward", 2, {"pp": 2, **DIST, "lora_rank": 4}),
    "lora-fused": ("phi3", 2, {**TP, "lora_rank": 4}),
}  # fmt: skip
"""Adapters on layers of experts, beside them, and fused in the directory; saved."""
SAVED: dict[str, tuple[str, int, dict[str, Any]]] = {
    "save-tp2-ep2": ("qwen2-moe", 4, {**TP, "ep": 2}),
    "save-pp2-vp2-ep2": ("mixed", 4, {"pp": 2, "vp": 2, "ep": 2}),
    "save-mla": ("deepseek", 2, {"ep": 2}),
    "save-gather": ("llama", 2, AHEAD),
    "hf-tp2-ep2": ("qwen2-moe", 4, {**TP, "ep": 2}),
    "hf-pp2-ep2": ("mixed", 4, {"pp": 2, "ep": 2}),
    "hf-tied": ("qwen2", 2, {"pp": 2}),
    "save-rm": ("reward", 2, {"pp": 2}),
    "hf-rm": ("reward", 2, TP),
    "hf-mla": ("deepseek", 2, {"ep": 2}),
}
UNTOUCHED: dict[str, tuple[str, int, dict[str, Any]]] = {
    "same-mixed": ("mixed", 2, {"ep": 2}),
    "same-mla": ("deepseek", 2, {"pp": 2, "decoder_first_pipeline_num_layers": 3}),
    "same-half": ("half", 2, {"ep": 2, "precision": "bf16"}),
    "same-hf": ("half", 2, {**TP, "ep": 2, "etp": 1, "precision": "bf16"}),
    "same-hf-tied": ("qwen2", 2, TP),
}
BALANCED: dict[str, tuple[str, int, dict[str, Any]]] = {
    "balance-ep2": ("qwen3-moe", 2, {"ep": 2}),
    "balance-tp2": ("qwen3-moe", 2, TP),
    "balance-cp2": ("mixed", 2, {"cp": 2, "recompute": "full"}),
    "balance-vp2": ("mixed", 2, {"pp": 2, "vp": 2, "micro_batch": 8}),
    "balance-tp2-pp2": ("mixed", 4, {**TP, "pp": 2}),
}
HALF: dict[str, tuple[str, int, dict[str, Any]]] = {
    "half-fp16": ("llama", 2, {"precision": "fp16", "initial_loss_scale": 1024.0}),
    "half-fp16-ep2": ("qwen3-moe", 2, {"precision": "fp16", "ep": 2, **DIST}),
    "half-bf16-ep2": ("half", 2, {"precision": "bf16", "ep": 2, **DIST}),
}
OTHERS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "overflow": ("llama", 2, {**WIDE, "pp": 2}),
    "overflow-ep2": ("qwen3-moe", 2, {**WIDE, **DIST, "ep": 2}),
    "resume-vp2": ("llama", 2, {**WIDE, "pp": 2, "vp": 2}),
    "resume-ep2": ("qwen3-moe", 2, {**WIDE, **AHEAD, "ep": 2}),
    "fit": ("qwen3-moe", 2, {"ep": 2, "micro_batch": 1, "epochs": 2.0}),
}
COEFFICIENT = 0.05


def cases() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for name, (base, world, settings) in {**EQUAL, **LORA, **SAVED, **UNTOUCHED, **BALANCED, **HALF, **OTHERS}.items():
        objective = last if (last := name.rpartition("-")[2]) in ("rm", *ranks.FIRST) else "sft"
        if name in BALANCED:
            settings = {**settings, "moe_aux_loss_coeff": COEFFICIENT}
        found[name] = {
            "base": base, "world": world, "objective": objective, "steps": 0 if name in UNTOUCHED else 5,
            "rows": 1 if objective == "sft" else 2, "settings": {"micro_batch": 2, **settings},
            "from_hf": "hf" in name.split("-"), "save": name in (SAVED | UNTOUCHED | LORA),
            "packed": name.startswith("pack-"),
            "does": name.split("-")[0] if name in OTHERS else None,
        }  # fmt: skip
    return found


CASES = cases()
SLOW = (
    "ep2-dist", "experts-tp2", "tp2-ep2-allgather", "lora-ep2-edp2", "vp2-dp2-dist", "cp2-mla", "cp2-pp2",
    "cp2-dp2-dist",
    "last1", "recompute-block", "overlap-gather-vp2", "save-gather", "hf-mla", "hf-pp2-ep2", "same-hf-tied",
    "balance-tp2", "balance-vp2", "half-fp16-ep2",
)  # fmt: skip
"""Much like others."""


def named(found: Iterable[str]) -> list[Any]:
    """Cases as parameters."""
    return [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in found]


def convert(**settings: Any) -> Path:
    spec = ConvertSpec(**settings)
    working.work(spec, planning.plan(spec))
    return spec.out


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    where = tmp_path_factory.mktemp("hf")
    return {name: make_hf(where / name, **model) for name, model in MODELS.items()}


@pytest.fixture(scope="module")
def ran(
    hf: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[str, Any]:
    where = tmp_path_factory.mktemp("megatron")
    for name, directory in hf.items():
        convert(model=str(directory), to="megatron", out=where / name)
    asked = {item.callspec.params.get("name") for item in request.session.items if hasattr(item, "callspec")}
    wanted = {name: case for name, case in CASES.items() if name in asked}
    for name, case in wanted.items():
        case.update(model=str(hf[case["base"]] if case["from_hf"] else where / case["base"]), vocab=VOCAB)
        case["state"] = str(where / f"state-{name}")
        case["save"] = str(where / f"saved-{name}") if case["save"] else ""
    (where / "plan.json").write_text(json.dumps({"out": str(where), "cases": wanted}))
    found: dict[str, Any] = {}
    for world in sorted({case["world"] for case in wanted.values()}):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
        done = subprocess.run(
            [*command, str(HERE / "megatron_ranks.py"), str(where / "plan.json")],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=900,
        )
        lines = [line for line in done.stderr.splitlines() if line.startswith("[rank0]")]
        assert done.returncode == 0, "\n".join(lines[-30:]) or done.stderr[-3000:]
        found[world] = [torch.load(where / f"rank-{rank}-of-{world}.pt") for rank in range(world)]
    return found


@pytest.fixture(scope="module")
def plain(hf: dict[str, Path]) -> Callable[..., dict[str, Any]]:
    """``plain(name)``: the case on the plain engine, and that engine; the layout falls away."""
    made = dict[str, dict[str, Any]]()

    def play(name: str, **changes: Any) -> dict[str, Any]:
        case = CASES[name]
        settings = {key: value for key, value in case["settings"].items() if key in KEPT}
        one = {
            **case,
            "settings": settings,
            "vocab": VOCAB,
            "packed": False,
            **changes,
        }  # packed: as if each were alone
        key = json.dumps([one[part] for part in ("base", "settings", "objective", "steps", "does")])
        if key not in made:
            one["model"] = str(hf[case["base"]])
            engine = PlainEngine(ranks.spec_of(one), hf[case["base"]])
            made[key] = {"fit": ranks.fit, "overflow": ranks.overflow}.get(one["does"], ranks.play)(engine, one)
            made[key]["engine"] = engine
        return made[key]

    return play


def found_of(ran: dict[str, Any], name: str) -> dict[str, Any]:
    """What rank 0 found, every rank having found the same."""
    per_rank: list[dict[str, Any]] = [rank[name] for rank in ran[CASES[name]["world"]]]
    for other in per_rank[1:]:
        assert other.get("steps") == per_rank[0].get("steps")
        for key in ("before", "after", "reference"):
            assert key not in other or torch.equal(other[key], per_rank[0][key])
    return per_rank[0]


def difference(first: list[dict[str, float]], second: list[dict[str, float]], key: str) -> float:
    assert len(first) == len(second)
    return max(abs(a[key] - b[key]) for a, b in zip(first, second, strict=True))


def check_equal(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    for key in wanted["steps"][0]:
        limit = 1e-5 if "loss" in key or key in ("nll", "dpo", "balance") else 1e-4
        if key == "grad_norm":
            limit *= max(step[key] for step in wanted["steps"])
        assert difference(found["steps"], wanted["steps"], key) <= limit, key
    assert (found["before"] - wanted["before"]).abs().max() <= 1e-5
    assert (found["after"] - wanted["after"]).abs().max() <= 1e-3
    assert (found["after"] - found["before"]).abs().max() > 0.01


@pytest.mark.parametrize("name", named([*EQUAL, *LORA, *SAVED]))
def test_five_steps_equal_the_plain_engine(ran: dict[str, Any], plain: Any, name: str) -> None:
    found, wanted = found_of(ran, name), plain(name)
    assert found["steps"][0].keys() == wanted["steps"][0].keys()
    check_equal(found, wanted)


@pytest.mark.parametrize("name", [name for name in EQUAL if CASES[name]["objective"] in ranks.FIRST])
def test_the_first_loss_of_pairs_is_known(ran: dict[str, Any], name: str) -> None:
    first = found_of(ran, name)["steps"][0]["loss"]
    assert first == pytest.approx(ranks.FIRST[CASES[name]["objective"]], rel=2e-6)


@pytest.mark.parametrize("name", named(name for name in EQUAL if name.startswith("recompute")))
def test_recomputed_attention_runs_twice(ran: dict[str, Any], name: str) -> None:
    dp = CASES[name]["world"] // ranks.spec_of({**CASES[name], "model": "m"}).model_ranks
    assert found_of(ran, name)["forwards"] == 2 * 4 / dp


@pytest.mark.parametrize("name", named(name for name in CASES if "cp" in CASES[name]["settings"]))
def test_rows_are_cut_as_megatron_cuts_them(ran: dict[str, Any], name: str) -> None:
    assert all(rank[name]["same_cut"] for rank in ran[CASES[name]["world"]])


@pytest.mark.parametrize("name", [name for name in EQUAL if name.startswith("pack-")])
def test_the_first_token_of_a_packed_sample_has_no_probability(ran: dict[str, Any], name: str) -> None:
    batch = ranks.packed(ranks.batches(0, 8, CASES[name]["settings"]["micro_batch"], VOCAB)[0])
    found = found_of(ran, name)["packed"]
    assert found[positions(batch) == 0].abs().max() == 0.0
    assert (found[batch.mask_BT != 0] < 0).all()


@pytest.mark.parametrize("name", named(LORA))
def test_the_adapter_is_what_peft_reads_and_mst_merge_merges(
    ran: dict[str, Any], plain: Any, hf: dict[str, Path], name: str, tmp_path: Path
) -> None:
    wanted, base = found_of(ran, name)["after"], hf[CASES[name]["base"]]
    only = tmp_path / "adapter"  # without the manifest of ranks.save
    only.mkdir()
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        shutil.copy(Path(CASES[name]["save"]) / file, only)
    engine, found = plain(name)["engine"], load_file(only / "adapter_model.safetensors")
    shapes = {lora.peft_name(key): parameter.shape for key, parameter in engine.trained}
    assert {key: tensor.shape for key, tensor in found.items()} == shapes
    for key, parameter in engine.trained:
        assert (found[lora.peft_name(key)] - parameter).abs().max() <= 1e-4, key
    config = json.loads((only / "adapter_config.json").read_text())
    assert config == lora.config_of(engine.spec, engine.known, engine.sites)
    auto = AutoModelForSequenceClassification if name.endswith("-rm") else AutoModelForCausalLM
    read = PeftModel.from_pretrained(auto.from_pretrained(base, dtype=torch.float32), only)
    assert (value_of(read.get_base_model()) - wanted).abs().max() <= 1e-5
    merge(base, only, tmp_path / "merged")
    merged = auto.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert (value_of(merged) - wanted).abs().max() <= 1e-4
    assert (value_of(merged) - found_of(ran, name)["before"]).abs().max() > 0.01


def value_of(model: Any) -> torch.Tensor:
    """Log-probabilities of the probe, or a reward model's score at each token."""
    probe = ranks.batches(99, 3, 3, VOCAB, prompts=False)[0]
    with torch.no_grad():
        if hasattr(model, "score"):
            value_BT = model.score(model.model(probe.tokens_BT).last_hidden_state).squeeze(-1)
        else:
            value_BT = token_logp(model(input_ids=probe.tokens_BT).logits, probe.tokens_BT)
    return value_BT * probe.mask_BT


def saved_as_hf(name: str) -> Path:
    saved = Path(CASES[name]["save"])
    return (
        saved if CASES[name]["from_hf"] else convert(model=str(saved), to="hf", out=saved.with_name(f"{saved.name}-hf"))
    )


@pytest.mark.parametrize("name", named(SAVED))
def test_a_trained_model_comes_back(ran: dict[str, Any], name: str) -> None:
    found, saved = found_of(ran, name), saved_as_hf(name)
    auto = AutoModelForSequenceClassification if name.endswith("-rm") else AutoModelForCausalLM
    model = auto.from_pretrained(saved, dtype=torch.float32)
    assert (value_of(model) - found["after"]).abs().max() <= 1e-5


@pytest.mark.parametrize("name", named(UNTOUCHED))
def test_an_untouched_model_comes_back_bit_equal(ran: dict[str, Any], hf: dict[str, Path], name: str) -> None:
    found_of(ran, name)
    first, second = (load_file(where / "model.safetensors") for where in (hf[CASES[name]["base"]], saved_as_hf(name)))
    assert first.keys() == second.keys()
    for key, tensor in first.items():
        assert tensor.dtype == second[key].dtype
        assert torch.equal(tensor, second[key]), key


@pytest.mark.parametrize("name", named(HALF))
def test_half_precision_follows_fp32(ran: dict[str, Any], plain: Any, name: str) -> None:
    settings = {**CASES[name]["settings"], "precision": "fp32"}
    wanted = plain(name, settings={key: value for key, value in settings.items() if key in KEPT})["steps"]
    found = found_of(ran, name)["steps"]
    assert difference(found, wanted, "loss") <= 0.05
    if "fp16" in name:
        assert [step["skipped"] for step in found] == [0.0] * 5


@pytest.mark.parametrize("name", ["overflow", "overflow-ep2"])
def test_a_step_that_overflows_is_reported_and_changes_nothing(ran: dict[str, Any], plain: Any, name: str) -> None:
    found, wanted = found_of(ran, name), plain(name, settings={"micro_batch": 2})
    skipped = [step["skipped"] for step in found["steps"]]
    assert skipped[0] == 1.0
    assert found["same"] == [step == 1.0 for step in skipped]
    taken = [step for step in found["steps"] if not step["skipped"]]
    assert len(taken) > 3
    for one, other in zip(taken, wanted["steps"], strict=False):  # the same rows each time: the steps taken are plain's
        assert one["loss"] == pytest.approx(other["loss"], abs=0.05)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=0.05)
    scales = [step["loss_scale"] for step in found["steps"]]
    for step, (scale, after) in enumerate(pairwise(scales)):
        assert after == scale / 2 if skipped[step] else after in (scale, scale * 2)
    assert max(scales[skipped.index(0.0) :]) > min(scales)  # and grows again


@pytest.mark.parametrize("name", ["resume-vp2", "resume-ep2"])
def test_a_saved_state_goes_on_exactly(ran: dict[str, Any], name: str) -> None:
    for found in (rank[name] for rank in ran[2]):
        assert found["again"] == found["first"]
        assert found["done"] == 7


@pytest.mark.parametrize("name", ["fit"])
def test_the_trainer_under_expert_parallelism(ran: dict[str, Any], plain: Any, name: str) -> None:
    found, wanted = found_of(ran, name), plain(name)
    assert found["first"] == pytest.approx(wanted["first"], abs=1e-5)
    assert found["last"] == pytest.approx(wanted["last"], abs=1e-5)
    assert found["evaluation"] == pytest.approx(wanted["evaluation"], abs=1e-5)
    assert abs(found["first"] - found["last"]) > 1e-4


class Balanced(PlainEngine):
    """The plain engine with the load balancing loss of router.py as a term, from the routers' logits by hooks."""

    def objective(self) -> Objective:
        seen: list[torch.Tensor] = []

        def keep(module: torch.nn.Module, args: Any, out: tuple[torch.Tensor, ...]) -> None:
            if torch.is_grad_enabled():
                seen.append(out[0])

        for module in self.model.modules():
            if type(module).__name__.endswith("TopKRouter"):
                module.register_forward_hook(keep)

        def loss(logp_BT: torch.Tensor, batch: Batch) -> dict[str, Term]:
            found, tokens = dict(SFT.loss(logp_BT, batch)), float(batch.lengths_B.sum())
            real = (torch.arange(batch.tokens_BT.shape[1]) < batch.lengths_B[:, None]).flatten()
            parts = [logp_BT.sum() * 0]
            for logits in seen:
                probs = logits.reshape(len(real), -1)[real].float().softmax(-1)
                chosen = torch.zeros_like(probs).scatter(1, probs.topk(2).indices, 1.0)
                parts.append(probs.shape[1] * (chosen.sum(0) / chosen.sum() * probs.mean(0)).sum())
            seen.clear()
            return {**found, "balance": Term(torch.stack(parts).sum() * tokens, tokens, COEFFICIENT)}

        return Objective("balanced", loss)


@pytest.mark.parametrize("name", named(BALANCED))
def test_the_load_balancing_loss(
    ran: dict[str, Any], hf: dict[str, Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    settings = {key: value for key, value in case["settings"].items() if key in KEPT}
    where = hf[case["base"]]
    one = {**case, "settings": settings, "model": str(where), "objective": "balanced"}
    engine = Balanced(ranks.spec_of(one), where)
    monkeypatch.setitem(ranks.OBJECTIVES, "balanced", engine.objective())
    wanted, found = ranks.play(engine, one), found_of(ran, name)
    for step in wanted["steps"]:
        step["loss"] = step["nll"]
    check_equal(found, wanted)
    assert found["steps"][0]["balance"] > 1.0


def test_the_command_of_the_docs(hf: dict[str, Path], mst: Callable[..., Any], tmp_path: Path) -> None:
    text = (HERE.parents[1] / "docs" / "train.md").read_text()
    line = next(line for line in text.splitlines() if line.startswith("    mst-train --model moe"))
    shutil.copytree(hf["qwen3-moe"], tmp_path / "moe")
    rows = [{"prompt": f"{n}?", "completion": f"{n * 7}"} for n in range(9)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    mst(*line.split(), cwd=tmp_path)
    metrics = [json.loads(line) for line in (tmp_path / "moe-sft" / "metrics.jsonl").read_text().splitlines()]
    assert len(metrics) == 2
    names = load_file(tmp_path / "moe" / "model.safetensors").keys()
    assert load_file(tmp_path / "moe-sft" / "model.safetensors").keys() == names
    AutoModelForCausalLM.from_pretrained(tmp_path / "moe-sft")
