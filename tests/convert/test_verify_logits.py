"""``mst-convert --verify logits``: real transformers against real megatron-core, as the command runs them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mst_convert import logits
from mst_convert import plan as planning
from mst_convert import work as working
from mst_convert.spec import ConvertSpec
from mst_core import devices, torch_dist
from mst_core.errors import InputError, MissingPackage, RunError, SettingsError
from mst_core.families import ops
from mst_core.families.ops import Region
from mst_core.pickling import Call

DIMS: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "vocab_size": 130, "initializer_range": 0.1,
    "tie_word_embeddings": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3-moe": ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "tie_word_embeddings": True}),
    "deepseek-v3": (
        "deepseek_v3",
        {
            "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 2,
            "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "num_key_value_heads": 4, "q_lora_rank": 24,
            "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 20,
        },
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``hf("qwen3")``: a tiny model as transformers saves it, no two norms alike. Do not change it."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        from transformers import AutoConfig, AutoModelForCausalLM

        if name not in made:
            made[name] = tmp_path_factory.mktemp("hf") / name
            kind, dims = MODELS[name]
            torch.manual_seed(3)
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**DIMS, **dims}))
            with torch.no_grad():
                for key, parameter in model.named_parameters():
                    if "norm" in key:
                        parameter.add_(torch.randn_like(parameter), alpha=0.3)
            model.save_pretrained(made[name])
        return made[name]

    return make


def spec_of(model: Path, to: str, out: Path, **settings: Any) -> ConvertSpec:
    return ConvertSpec.model_validate({"model": str(model), "to": to, "out": out, "verify": "logits", **settings})


def convert(model: Path, to: str, out: Path, **settings: Any) -> dict[str, Any]:
    """The figures in convert.json, which are also in the notes and the result."""
    spec = spec_of(model, to, out, **settings)
    result = working.work(spec, planning.plan(spec))
    report = json.loads((out / "convert.json").read_text())
    notes = json.loads((out / "mst.json").read_text())["notes"]
    assert report["verified"] == notes["verified"] == result.data["verified"] == "logits"
    assert report["logits"] == notes["logits"] == result.data["logits"]
    found: dict[str, Any] = report["logits"]
    assert found["difference"] <= 1e-5
    assert found["standard_deviation"] > 0.3
    assert found["tokens"] == [2, 32]
    return found


# --- both directions, every layout ---------------------------------------------------------------------------------


def test_there_and_back_and_nothing_in_a_pickle_runs(
    hf: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """130 rows of vocabulary become 256. An object of the checkpoint calls os.system when Megatron-LM unpickles it."""
    ran = tmp_path / "ran"
    state = torch_dist.release_state
    call = Call("posix.system", (f"touch {ran}",))
    monkeypatch.setattr(torch_dist, "release_state", lambda *args: {**state(*args), "more": call})
    convert(hf("qwen3"), "megatron", tmp_path / "megatron")
    assert b"touch" in (tmp_path / "megatron" / "release" / "__0_0.distcp").read_bytes()
    convert(tmp_path / "megatron", "hf", tmp_path / "back")
    assert not ran.exists()


LAYOUTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "latent attention, layers that differ": ("deepseek-v3", "megatron", {}),
    "a hybrid of experts": ("qwen3-moe", "megatron", {"spec": "hybrid"}),
    "a cast": ("qwen3", "megatron", {"spec": "local", "form": "per-layer", "dtype": "bf16"}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_megatron_layouts(hf: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    model, to, settings = LAYOUTS[name]
    convert(hf(model), to, tmp_path / "out", **settings)


def test_every_file_of_a_legacy_checkpoint_is_run_by_its_rank(hf: Callable[[str], Path], tmp_path: Path) -> None:
    """Tensor and expert parallel of TransformerEngine's names back, pipeline stages of the local spec's there."""
    spec = spec_of(hf("mixtral"), "megatron-legacy", tmp_path / "legacy", tp=2, ep=2, verify="hash")
    working.work(spec, planning.plan(spec))
    convert(tmp_path / "legacy", "hf", tmp_path / "back")
    convert(hf("mixtral"), "megatron-legacy", tmp_path / "stages", pp=2, spec="local", experts="sequential")


# --- what it finds -------------------------------------------------------------------------------------------------


def fails(spec: ConvertSpec) -> str:
    plan = planning.plan(spec)
    with pytest.raises(RunError) as raised:
        working.work(spec, plan)
    assert not spec.out.exists()
    assert not list(spec.out.parent.glob("*.partial"))
    assert raised.value.exit_code == 5
    return str(raised.value)


def test_heads_in_another_order_are_found_though_they_come_back(
    hf: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mapping that is wrong both ways: a round trip is equal, the model is another."""

    def swapped(heads: ops.Heads, rows: Any) -> tuple[Region, ...]:
        k, v = (number for number, region in enumerate(ops.qkv(heads, rows)[:3]) if region.source)
        found = list(ops.qkv(heads, rows))
        for group in range(0, len(found), 3):
            one, other = found[group + k], found[group + v]
            found[group + k], found[group + v] = one._replace(start=other.start), other._replace(start=one.start)
        return tuple(found)

    monkeypatch.setitem(ops.OPS, "qkv", swapped)
    shutil.copytree(hf("qwen3"), tmp_path / "hf")
    spec = spec_of(tmp_path / "hf", "megatron", tmp_path / "trip", verify="roundtrip")
    working.work(spec, planning.plan(spec))
    assert "differ by" in fails(spec_of(tmp_path / "hf", "megatron", tmp_path / "out"))


@pytest.mark.slow
def test_a_config_that_changes_meanwhile_is_found(
    hf: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each side is run by its own config.json: here only the output's has another rope."""
    compare = logits.compare

    def edited(spec: ConvertSpec, source: Any, target: Any, staging: Any) -> dict[str, Any]:
        config = json.loads((staging.path / "hf" / "config.json").read_text())
        config["rope_parameters"]["rope_theta"] = 500.0
        (staging.path / "hf" / "config.json").write_text(json.dumps(config))
        return compare(spec, source, target, staging)

    monkeypatch.setattr(logits, "compare", edited)
    assert "differ by" in fails(spec_of(hf("qwen3"), "megatron", tmp_path / "out"))


@pytest.mark.parametrize(
    ("one", "other"),
    [([1.0, -1.0], [1.0, -1.001]), ([1.0, float("nan")], [1.0, float("nan")]), ([1.0, 1.0], [1.0, 1.0])],
)
def test_logits_that_differ_or_say_nothing_fail(one: list[float], other: list[float]) -> None:
    with pytest.raises(RunError):
        logits.judge(torch.tensor(one), torch.tensor(other), 1e-4, Path("x"))
    assert logits.judge(torch.tensor([1.0, -1.0]), torch.tensor([1.0, -1.0]), 1e-4, Path("x"))[0] == 0


def test_the_threshold_is_a_flag(hf: Callable[[str], Path], tmp_path: Path, mst: Callable[..., Any]) -> None:
    words = ("mst-convert", "--model", hf("qwen3"), "--to", "megatron", "--out", tmp_path / "out")
    done = mst(*words, "--verify", "logits", "--logits-threshold", 1e-12, code=5)
    assert "--logits-threshold is 1e-12" in done.stderr
    assert not (tmp_path / "out").exists()
    assert "belongs to --verify logits" in mst(*words, "--logits-threshold", 1, code=2).stderr


# --- what the plan refuses -----------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "gemma2": ({"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2"}, "norm after attention"),
    "glm4": ({"architectures": ["Glm4ForCausalLM"], "model_type": "glm4"}, "post_self_attn_layernorm"),
    "internlm2": (
        {"architectures": ["InternLM2ForCausalLM"], "model_type": "internlm2", "bias": False},
        "code from elsewhere",
    ),
    "no model_type": ({"architectures": ["LlamaForCausalLM"]}, "model_type None"),
    "q_lora_rank null": (
        {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", **MODELS["deepseek-v3"][1]}
        | {"q_lora_rank": None},
        "q_lora_rank",
    ),
    "vision": ({"architectures": ["Qwen2VLForConditionalGeneration"], "model_type": "qwen2_vl"}, "vision tower"),
}  # fmt: skip


def headers(directory: Path, config: dict[str, Any]) -> Path:
    """A Hugging Face directory of zeros: enough for a plan."""
    from mst_core.families import family_for

    config = {**DIMS, **config}
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    state = {spec.name: torch.zeros(spec.shape) for spec in family_for(config).model(config).hf_tensors()}
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_cannot_run_are_refused_by_the_plan(tmp_path: Path, name: str) -> None:
    config, word = REFUSED[name]
    with pytest.raises(InputError, match=word) as raised:
        planning.plan(spec_of(headers(tmp_path / "hf", config), "megatron", tmp_path / "out"))
    assert "--verify roundtrip" in str(raised.value.hint)


@pytest.mark.parametrize(("settings", "word"), [({"pp": 2, "vp": 2}, "--vp"), ({"tp": 2, "pp": 2, "ep": 4}, "16")])
def test_layouts_that_cannot_run_are_refused_by_the_plan(
    tmp_path: Path, settings: dict[str, Any], word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logits, "MOST_RANKS", 8)
    kind, dims = MODELS["mixtral"]
    config = {"architectures": ["MixtralForCausalLM"], "model_type": kind, "num_experts_per_tok": 2, **dims}
    with pytest.raises(InputError, match=word):
        planning.plan(spec_of(headers(tmp_path / "hf", config), "megatron-legacy", tmp_path / "out", **settings))


def test_too_little_memory_is_refused_with_numbers(
    hf: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "free_memory", lambda: 300_000_000)
    with pytest.raises(InputError, match=r"takes 1\.07 GB of memory.*300 MB are free"):
        planning.plan(spec_of(hf("qwen3"), "megatron", tmp_path / "out"))
    plan = planning.plan(spec_of(hf("qwen3"), "megatron", tmp_path / "out", dry_run=True))
    assert "one after the other: 1.07 GB" in str(plan.rows())


def test_a_missing_package_is_refused_with_the_pip_line(
    hf: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(logits.PACKAGES, "megatron", "megatron_that_is_not_here.core")
    with pytest.raises(MissingPackage, match="megatron_that_is_not_here") as raised:
        planning.plan(spec_of(hf("qwen3"), "megatron", tmp_path / "out"))
    assert raised.value.hint == "pip install 'mst-tools-core[engine,megatron]'"
    assert raised.value.exit_code == 4


def test_free_memory_is_what_the_kernel_says() -> None:
    total = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
    assert 0 < devices.free_memory() < total


def test_a_gguf_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(InputError, match="dequantised"):
        planning.plan(spec_of(tmp_path / "x.gguf", "hf", tmp_path / "out"))


def test_the_threshold_must_be_a_number() -> None:
    with pytest.raises(SettingsError, match="logits-threshold"):
        ConvertSpec.parse(["--model", "a", "--to", "hf", "--out", "b", "--verify", "logits", "--logits-threshold", "0"])
