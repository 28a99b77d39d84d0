"""mst-merge against PEFT on stacked expert parameters: both of PEFT's generations, every form of the base."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from mst_core.errors import InputError
from tests.conftest import make_tokenizer
from tests.oracle.test_merge_peft import adapt, by_peft, check_equal, load, logits, merge

STACKED = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 48},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 48, "head_dim": 16},
}


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A tiny random model with four experts in each of its two layers."""
    made: dict[Any, Path] = {}

    def make(family: str, **changes: Any) -> Path:
        key = (family, *changes.items())
        if key not in made:
            dims = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
                    "vocab_size": 330, "max_position_embeddings": 256, "tie_word_embeddings": False}  # fmt: skip
            dtype = changes.pop("dtype", "float32")
            config = transformers.AutoConfig.for_model(family, **{**dims, **SHAPES[family], **changes})
            torch.manual_seed(0)
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.copy_(torch.randn(parameter.shape) * 0.15)
            made[key] = tmp_path_factory.mktemp("moe") / family
            make_tokenizer(made[key])
            model.save_pretrained(made[key])
        return made[key]

    return make


Moe = Callable[..., Path]
CONFIGS: dict[str, dict[str, Any]] = {
    "both": {"target_parameters": STACKED},
    "one, other ranks": {"target_modules": [], "target_parameters": ["experts.down_proj"],
                         "rank_pattern": {"experts.down_proj": 3}, "alpha_pattern": {"layers.1.*": 5}},
    "gate and up only": {"target_modules": [], "target_parameters": ["gate_up_proj", "mlp.gate.weight"]},
    "all linear": {"target_modules": "all-linear"},
    "rslora": {"target_parameters": STACKED, "use_rslora": True},
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "config"),
    [*(("qwen3_moe", name) for name in CONFIGS), ("mixtral", "both"), ("mixtral", "gate and up only"),
     ("mixtral", "all linear"), ("gpt_oss", "both"), ("gpt_oss", "rslora")],
)  # fmt: skip
def test_experts_equal_merge_and_unload(moe: Moe, tmp_path: Path, family: str, config: str) -> None:
    base = moe(family)
    model = adapt(base, tmp_path / "lora", size=0.3, **{"target_modules": ["q_proj"], **CONFIGS[config]})
    with_adapter = logits(model)
    ours = merge(base, tmp_path / "lora", tmp_path / "out")
    check_equal(ours, by_peft(model, tmp_path / "peft"))
    assert (logits(load(tmp_path / "out")) - with_adapter).abs().max() <= 1e-3
    assert (logits(load(base)) - with_adapter).abs().max() > 0.05


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_bf16_experts_are_nearer_to_the_truth_than_peft(moe: Moe, tmp_path: Path, family: str) -> None:
    base = moe(family, dtype="bfloat16")
    model = adapt(base, tmp_path / "lora", fp32=False, **CONFIGS["both"], target_modules=[])
    exact = peft.PeftModel.from_pretrained(load(base, torch.float32), tmp_path / "lora")
    truth, theirs = by_peft(exact, tmp_path / "truth"), by_peft(model, tmp_path / "peft")
    off = {"ours": 0.0, "theirs": 0.0}
    for name, tensor in merge(base, tmp_path / "lora", tmp_path / "out").items():
        errors = [(found.float() - truth[name]).abs() for found in (tensor, theirs[name])]
        assert errors[0].max() <= errors[1].max() + 1e-6, name
        off = {who: off[who] + float(error.mean()) for who, error in zip(off, errors, strict=True)}
    assert off["ours"] < off["theirs"]


def generation(adapter: Path, base: Path, version: str, *, old: bool, seed: int = 0) -> dict[str, torch.Tensor]:
    """An adapter of experts as peft ``version`` writes it, and its deltas [experts, out, in] by that version's formula.

    old (before 0.19): the sizes of [E, out, in] are taken for in and out, "o r e, e r i -> e i o".
    """
    config = json.loads((base / "config.json").read_text())
    hidden, inner, rank, experts = config["hidden_size"], config["moe_intermediate_size"], 3, 4
    generator = torch.Generator().manual_seed(seed)
    tensors, deltas = {}, {}
    for layer in range(2):
        stem = f"model.layers.{layer}.mlp.experts"
        for wrapper, name, out, into in ((".base_layer", "gate_up_proj", 2 * inner, hidden),
                                         ("", "down_proj", hidden, inner)):  # fmt: skip
            sizes = (out, into) if old else (into, out)
            a = torch.randn(rank * experts, sizes[0], generator=generator) * 0.2
            b = torch.randn(sizes[1], rank * experts, generator=generator) * 0.2
            tensors |= {f"base_model.model.{stem}{wrapper}.lora_A.weight": a,
                        f"base_model.model.{stem}{wrapper}.lora_B.weight": b}  # fmt: skip
            how = "ore,eri->eio" if old else "ore,eri->eoi"
            deltas[f"{stem}.{name}"] = 2 * torch.einsum(
                how, b.reshape(sizes[1], rank, experts), a.reshape(experts, rank, sizes[0])
            )
    adapter.mkdir()
    save_file(tensors, adapter / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": [], "peft_version": version}
    (adapter / "adapter_config.json").write_text(json.dumps({**settings, "target_parameters": STACKED}))
    return deltas


def merged_expert(before: dict[str, torch.Tensor], deltas: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """A per-expert tensor of Qwen3-MoE with its share of the delta."""
    box, _, rest = name.partition(".experts.")
    if not rest:
        return before[name]
    expert, part = int(rest.split(".")[0]), rest.split(".")[1]
    delta = deltas[f"{box}.experts.{'down_proj' if part == 'down_proj' else 'gate_up_proj'}"][expert]
    half = delta.shape[0] // 2
    rows = {"gate_proj": slice(0, half), "up_proj": slice(half, None), "down_proj": slice(None)}[part]
    return before[name] + delta[rows]


@pytest.mark.parametrize(
    ("inner", "version", "old"),
    [
        (24, "0.18.1", True),
        (24, "0.21.2", False),
        (24, "", True),
        (24, "", False),
        (64, "0.18.1", True),  # down_proj is square
        (64, "0.19.0", False),
        (32, "0.17.0", True),  # gate_up_proj is square
        (32, "0.21.2", False),
    ],
)
def test_both_generations_of_peft(moe: Moe, tmp_path: Path, inner: int, version: str, old: bool) -> None:
    """peft PR #3112 exchanged in and out: told apart by the shapes, and where they are square by the version."""
    base = moe("qwen3_moe", moe_intermediate_size=inner)
    deltas = generation(tmp_path / "lora", base, version, old=old)
    before = load_file(base / "model.safetensors")
    ours = merge(base, tmp_path / "lora", tmp_path / "out")
    for name, tensor in ours.items():
        assert (tensor - merged_expert(before, deltas, name)).abs().max() <= 1e-6, name
    assert sum(not torch.equal(ours[name], before[name]) for name in ours) == 2 * 4 * 3
    if not old and version:
        model = peft.PeftModel.from_pretrained(load(base), tmp_path / "lora")
        check_equal(ours, by_peft(model, tmp_path / "peft"))


def test_a_stacked_base_whose_layout_shows_in_its_shapes(moe: Moe, tmp_path: Path) -> None:
    """gpt_oss keeps [experts, in, out] on disk: the delta of PEFT's own layout goes in without a version."""
    base = moe("gpt_oss")
    model = adapt(base, tmp_path / "lora", **CONFIGS["both"], target_modules=[])
    configure(tmp_path / "lora", peft_version="")
    check_equal(merge(base, tmp_path / "lora", tmp_path / "out"), by_peft(model, tmp_path / "peft"))


def configure(adapter: Path, **changes: Any) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit(adapter: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(adapter / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, adapter / "adapter_model.safetensors")


FIRST = "base_model.model.model.layers.0.mlp.experts"


@pytest.mark.parametrize(
    ("inner", "damage", "said"),
    [
        (64, {"peft_version": ""}, r"down_proj: the experts' matrices are square, and peft_version ''"),
        (64, {"peft_version": "0.19.0.dev0"}, r"square, and peft_version '0.19.0.dev0'"),
        (24, {"r": 4}, r"shape \[12, 64\], but adapter_config.json says rank 4 for each of 4 experts"),
        (24, {"target_parameters": STACKED[:1]}, r"names gate_up_proj of its parameters, adapted are 2"),
        (24, f"{FIRST}.base_layer", r"names gate_up_proj, down_proj of its parameters, adapted are 1"),
        (24, FIRST, r"layers\.0\.mlp\.experts.*(names gate_up|target_parameters names it)"),
    ],
)  # fmt: skip
def test_what_cannot_be_told_is_refused(moe: Moe, tmp_path: Path, inner: int, damage: Any, said: str) -> None:
    base, lora = moe("qwen3_moe", moe_intermediate_size=inner), tmp_path / "lora"
    generation(lora, base, "0.21.2", old=False)
    if isinstance(damage, dict):
        configure(lora, **damage)
    else:
        edit(lora, lambda f: [f.pop(name) for name in list(f) if name.startswith(damage)])
    with pytest.raises(InputError, match=said):
        merge(base, lora, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


def test_experts_of_several_adapters(moe: Moe, tmp_path: Path) -> None:
    base = moe("qwen3_moe")
    first = generation(tmp_path / "a", base, "0.18.1", old=True)
    second = generation(tmp_path / "b", base, "0.21.2", old=False, seed=1)
    ours = merge(base, (tmp_path / "a", tmp_path / "b"), tmp_path / "out", weights=(0.5, -2.0))
    before = load_file(base / "model.safetensors")
    for name, tensor in ours.items():
        both = {key: first[key] * 0.5 - second[key] * 2 for key in first}
        assert (tensor - merged_expert(before, both, name)).abs().max() <= 2e-6, name


def test_adapters_of_single_experts(moe: Moe, tmp_path: Path) -> None:
    """transformers 4 kept each expert's matrices as layers; such adapters name them as the files of the base do."""
    base = moe("mixtral")
    name = "model.layers.1.block_sparse_moe.experts.2.w3"
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 64, generator=generator), torch.randn(48, 2, generator=generator)
    lora = tmp_path / "lora"
    lora.mkdir()
    factors = {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b}
    save_file(factors, lora / "adapter_model.safetensors")
    (lora / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": [name]})
    )
    before, ours = load_file(base / "model.safetensors"), merge(base, lora, tmp_path / "out")
    assert [key for key in ours if not torch.equal(ours[key], before[key])] == [f"{name}.weight"]
    assert torch.allclose(ours[f"{name}.weight"], before[f"{name}.weight"] + b @ a, atol=1e-6)
