"""mst-convert adapter on experts, routers and heads, against PEFT: its merge, its logits, its own load of the result.

What the Megatron side means is written out here: alpha / dim * linear_out @ linear_in of each expert, gate above up.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed import checkpoint as dcp

from mst_core import checkpoint
from tests.convert.test_adapters import assert_equal, convert, stored
from tests.oracle.test_merge_peft import adapt, by_peft, load, logits
from tests.oracle.test_merge_peft_experts import SHAPES, STACKED, Moe, generation, moe

__all__ = ["moe"]
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ROUTER = {"qwen3_moe": "mlp.gate.weight", "mixtral": "mlp.gate.weight", "gpt_oss": "mlp.router.weight"}
BRIDGES = ["megatron-bridge", "mcore-bridge"]
EXPERTS = "decoder.layers.mlp.experts.experts"
SHAPES.setdefault("qwen2_moe", {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40,
    "decoder_sparse_step": 1, "mlp_only_layers": [],
})  # fmt: skip
SHAPES.setdefault("deepseek_v3", {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "intermediate_size": 48,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 16, "n_group": 1, "topk_group": 1, "num_key_value_heads": 4,
})  # fmt: skip


def products(made: Path) -> dict[str, Tensor]:
    """scale * B @ A of a bridge's checkpoint by the layer's key, [layer, (expert,) out, in]."""
    said = made / "iter_0000001" / "run_config.yaml"
    if said.is_file():
        config = yaml.safe_load(said.read_text())["peft"]
        scale, ends = config["alpha"] / config["dim"], (".adapter.linear_in.weight", ".adapter.linear_out.weight")
    else:
        args = json.loads((made / "args.json").read_text())
        root = args["lora_rank"] ** 0.5 if args["use_rslora"] else args["lora_rank"]
        scale, ends = args["lora_alpha"] / root, (".lora_A.default.weight", ".lora_B.default.weight")
    state = stored(made)
    return {
        key.removesuffix(ends[0]): scale * state[key.removesuffix(ends[0]) + ends[1]].float() @ a.float()
        for key, a in state.items()
        if key.endswith(ends[0])
    }


def changes(family: str, made: Path) -> dict[str, Tensor]:
    """What the experts and routers of a bridge's checkpoint add to each tensor that transformers saves."""
    found, deltas = products(made), {}
    for layer in range(2):
        fc1, fc2 = found[f"{EXPERTS}.linear_fc1"][layer], found[f"{EXPERTS}.linear_fc2"][layer]
        router = found["decoder.layers.mlp.router"][layer]
        gate, up = fc1.chunk(2, dim=1)
        stem = f"model.layers.{layer}.mlp"
        if family == "gpt_oss":
            pairs = torch.stack([gate, up], dim=2).flatten(1, 2)  # gate, up, gate, up
            deltas |= {f"{stem}.experts.gate_up_proj": pairs.mT, f"{stem}.experts.down_proj": fc2.mT}
            deltas[f"{stem}.router.weight"] = router
            continue
        stem, names = (stem, ("gate_proj", "up_proj", "down_proj"))
        if family == "mixtral":
            stem, names = f"model.layers.{layer}.block_sparse_moe", ("w1", "w3", "w2")
        deltas[f"{stem}.gate.weight"] = router
        for expert in range(4):
            for name, part in zip(names, (gate, up, fc2), strict=True):
                deltas[f"{stem}.experts.{expert}.{name}.weight"] = part[expert]
    return deltas


def check_changes(base: Path, merged: dict[str, Tensor], deltas: dict[str, Tensor]) -> None:
    before = load_file(base / "model.safetensors")
    for name, delta in deltas.items():
        torch.testing.assert_close(before[name] + delta, merged[name], rtol=1e-5, atol=3e-6, msg=name)
        assert delta.any(), name


def on(base: Path, adapter: Path) -> Tensor:
    """The logits with the adapter as PEFT itself loads it; a factor that it does not find is a fault."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*missing adapter keys.*")
        model = peft.PeftModel.from_pretrained(load(base), adapter)
    return logits(model.eval())


@pytest.mark.parametrize("to", BRIDGES)
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss"])
@pytest.mark.parametrize("rslora", [False, True])
def test_parameters_of_all_experts(moe: Moe, tmp_path: Path, family: str, to: str, rslora: bool) -> None:
    base = moe(family)
    named = [*STACKED, ROUTER[family]]
    settings: dict[str, Any] = {"target_modules": ["o_proj"], "target_parameters": named, "use_rslora": rslora}
    model = adapt(base, tmp_path / "lora", size=0.3, **settings)
    with_adapter = logits(model)
    made = convert(model=tmp_path / "lora", to=to, base=base, out=tmp_path / "made")
    check_changes(base, by_peft(model, tmp_path / "peft"), changes(family, made))
    back = convert(model=made, to="peft", out=tmp_path / "back")
    assert_equal(tmp_path / "lora", back)
    assert (on(base, back) - with_adapter).abs().max() <= 1e-4
    assert (logits(load(base)) - with_adapter).abs().max() > 0.05
    assert not checkpoint.verify(made)
    assert not checkpoint.verify(back)


def per_expert(base: Path, out: Path, family: str, *, shared: bool) -> Path:
    """An adapter of the generation before: each expert's matrices are modules. ``shared``: gate and up have one A."""
    part = "block_sparse_moe" if family == "mixtral" else "mlp"
    names = ("w1", "w3", "w2") if family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    weights, tensors = load_file(base / "model.safetensors"), {}
    generator = torch.Generator().manual_seed(3)
    for layer in range(2):
        modules = [f"model.layers.{layer}.self_attn.o_proj", f"model.layers.{layer}.{part}.gate"]
        modules += [f"model.layers.{layer}.{part}.experts.{e}.{name}" for e in range(4) for name in names]
        for module in modules:
            rows, columns = weights[f"{module}.weight"].shape
            a = torch.randn(3, columns, generator=generator) * 0.3
            if shared and module.endswith((".up_proj", ".w3")):
                a = tensors[f"base_model.model.{module.rpartition('.')[0]}.{names[0]}.lora_A.weight"].clone()
            tensors[f"base_model.model.{module}.lora_A.weight"] = a
            tensors[f"base_model.model.{module}.lora_B.weight"] = torch.randn(rows, 3, generator=generator) * 0.3
    out.mkdir()
    save_file(tensors, out / "adapter_model.safetensors")
    told = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "target_modules": ["o_proj", "gate", *names]}
    (out / "adapter_config.json").write_text(json.dumps(told))
    return out


@pytest.mark.parametrize("to", BRIDGES)
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize("shared", [True, False])
def test_modules_of_each_expert(moe: Moe, tmp_path: Path, family: str, to: str, shared: bool) -> None:
    """PEFT turns them into parameters when it loads them, and so do we, by way of a bridge; the logits are the same."""
    base = moe(family)
    lora = per_expert(base, tmp_path / "lora", family, shared=shared)
    with_adapter = on(base, lora)
    merged = by_peft(peft.PeftModel.from_pretrained(load(base), lora), tmp_path / "merged")
    made = convert(model=lora, to=to, base=base, out=tmp_path / "made")
    check_changes(base, merged, changes(family, made))
    for written in ("parameters", "modules"):
        back = convert(model=made, to="peft", out=tmp_path / written, experts=written)
        assert (on(base, back) - with_adapter).abs().max() <= 1e-4, written
        if shared and written == "modules":
            assert_equal(lora, back)
    again = convert(model=tmp_path / "modules", to="peft", base=base, form="fused", out=tmp_path / "again")
    assert (on(base, again) - with_adapter).abs().max() <= 1e-4
    assert (logits(load(base)) - with_adapter).abs().max() > 0.05


def test_canonical_lora_has_a_plain_adapter_of_experts(moe: Moe, tmp_path: Path) -> None:
    base = moe("qwen3_moe")
    model = adapt(base, tmp_path / "lora", size=0.3, target_modules=ATTENTION, target_parameters=STACKED)
    with_adapter = logits(model)
    made = convert(model=tmp_path / "lora", to="megatron-bridge", base=base, out=tmp_path / "made")
    config = yaml.safe_load((made / "iter_0000001" / "run_config.yaml").read_text())["peft"]
    assert config["_target_"].endswith("CanonicalLoRA")
    assert config["share_expert_adapters"] is False
    assert set(config["target_modules"]) == {
        "linear_q", "linear_k", "linear_v", "linear_proj", "linear_fc1_gate", "linear_fc1_up", "linear_fc2",
    }  # fmt: skip
    assert stored(made)[f"{EXPERTS}.linear_fc1.adapter.linear_in.weight"].shape == (2, 4, 4, 64)
    back = convert(model=made, to="peft", out=tmp_path / "back")
    assert_equal(tmp_path / "lora", back)
    assert (on(base, back) - with_adapter).abs().max() <= 1e-4


@pytest.mark.parametrize("to", BRIDGES)
def test_shared_experts_and_layers_of_several_kinds(moe: Moe, tmp_path: Path, to: str) -> None:
    """DeepSeek-V3: the first layer is dense, so that each layer has keys of its own; and a shared expert."""
    base = moe("deepseek_v3")
    kinds = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"]
    modules = [f"model.layers.1.mlp.shared_experts.{name}" for name in ("gate_proj", "up_proj", "down_proj")]
    model = adapt(base, tmp_path / "some", size=0.3, target_modules=["kv_b_proj"], target_parameters=kinds)
    generator = torch.Generator().manual_seed(3)
    tensors, weights = load_file(tmp_path / "some" / "adapter_model.safetensors"), load_file(base / "model.safetensors")
    config = json.loads((tmp_path / "some" / "adapter_config.json").read_text())
    for module in modules:  # PEFT takes these names for the experts' and adapts no shared expert here
        rows, columns = weights[f"{module}.weight"].shape
        a = torch.randn(4, columns, generator=generator)
        if "up_proj" in module:
            a = tensors[f"base_model.model.{modules[0]}.lora_A.weight"].clone()
        tensors[f"base_model.model.{module}.lora_A.weight"] = a
        tensors[f"base_model.model.{module}.lora_B.weight"] = torch.randn(rows, 4, generator=generator)
    lora = tmp_path / "lora"
    lora.mkdir()
    save_file(tensors, lora / "adapter_model.safetensors")
    config["target_modules"] = ["kv_b_proj", *modules]
    (lora / "adapter_config.json").write_text(json.dumps(config))
    made = convert(model=lora, to=to, base=base, out=tmp_path / "made")
    found, merged = products(made), by_peft(model, tmp_path / "peft")
    fc1, fc2 = (found[f"decoder.layers.1.mlp.experts.experts.linear_fc{n}"] for n in (1, 2))
    stem = "model.layers.1.mlp"
    for expert in range(4):
        for name, delta in zip(("gate_proj", "up_proj", "down_proj"), (*fc1.chunk(2, 1), fc2), strict=True):
            key = f"{stem}.experts.{expert}.{name}.weight"
            torch.testing.assert_close(weights[key] + delta[expert], merged[key], rtol=1e-5, atol=3e-6)
    router = weights[f"{stem}.gate.weight"] + found["decoder.layers.1.mlp.router"]
    torch.testing.assert_close(router, merged[f"{stem}.gate.weight"], rtol=1e-5, atol=3e-6)
    gate = found["decoder.layers.1.mlp.shared_experts.linear_fc1"].chunk(2)[0]
    a, b = (tensors[f"base_model.model.{modules[0]}.lora_{which}.weight"] for which in "AB")
    torch.testing.assert_close(gate, b @ a * 4, rtol=1e-5, atol=3e-6)
    assert_equal(lora, convert(model=made, to="peft", out=tmp_path / "back"))


def write(out: Path, base: Path, tensors: dict[str, Tensor], **config: Any) -> Path:
    """A checkpoint of Megatron-Bridge as torch saves it."""
    folder = out / "iter_0000001"
    folder.mkdir(parents=True)
    dcp.save(tensors, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    told = {"_target_": "megatron.bridge.peft.lora.LoRA", "alpha": 8, "dim": 4, **config}
    (folder / "run_config.yaml").write_text(yaml.safe_dump({"peft": told}))
    (out / "latest_checkpointed_iteration.txt").write_text("1")
    (out / "hf").mkdir()
    (out / "hf" / "config.json").write_bytes((base / "config.json").read_bytes())
    return out


@pytest.mark.parametrize("kind", ["an adapter for all", "an adapter for all, older", "shared outer", "normalised rank"])
def test_what_megatron_bridge_saves_of_experts(moe: Moe, tmp_path: Path, kind: str) -> None:
    """share_expert_adapters (with and, in older releases, without an axis), experts_shared_outer_loras, and
    normalize_moe_lora: experts of the rank dim // topk, so that their scale is another."""
    base, rank = moe("qwen3_moe"), 2 if kind == "normalised rank" else 4
    generator = torch.Generator().manual_seed(9)
    fc1_a, fc1_b = (torch.randn(2, 4, *s, generator=generator) * 0.3 for s in ((rank, 64), (48, rank)))
    fc2_a, fc2_b = (torch.randn(2, 4, *s, generator=generator) * 0.3 for s in ((rank, 24), (64, rank)))
    if kind.startswith("an adapter for all"):
        fc1_a, fc1_b, fc2_a, fc2_b = (t[:, :1].expand(-1, 4, -1, -1).contiguous() for t in (fc1_a, fc1_b, fc2_a, fc2_b))
    if kind == "shared outer":
        fc1_a, fc2_b = (tensor[:, :1].expand(-1, 4, -1, -1).contiguous() for tensor in (fc1_a, fc2_b))
    saved = [fc1_a, fc1_b, fc2_a, fc2_b]
    for number in {"shared outer": (0, 3), "an adapter for all, older": (0, 1, 2, 3)}.get(kind, ()):
        saved[number] = saved[number][:, 0].contiguous()
    names = [f"{EXPERTS}.linear_fc{n}.adapter.linear_{end}.weight" for n in (1, 2) for end in ("in", "out")]
    attention = {
        "decoder.layers.self_attention.linear_proj.adapter.linear_in.weight": torch.randn(
            2, 4, 64, generator=generator
        ),
        "decoder.layers.self_attention.linear_proj.adapter.linear_out.weight": torch.randn(
            2, 64, 4, generator=generator
        ),
    }
    config = {"normalize_moe_lora": True} if kind == "normalised rank" else {}
    made = write(tmp_path / "made", base, dict(zip(names, saved, strict=True)) | attention, **config)
    before = load_file(base / "model.safetensors")
    for written in ("parameters", "modules"):
        back = convert(model=made, to="peft", out=tmp_path / written, experts=written)
        if written == "modules" and kind == "normalised rank":
            continue  # PEFT's own conversion of modules to parameters loses their rank_pattern (0.21.2)
        model = peft.PeftModel.from_pretrained(load(base), back)
        merged = by_peft(model, tmp_path / f"{written}-merged")
        for layer in range(2):
            gate_up, down = (8 / rank * (b @ a)[layer] for a, b in ((fc1_a, fc1_b), (fc2_a, fc2_b)))
            for expert in range(4):
                parts = (*gate_up[expert].chunk(2), down[expert])
                for name, delta in zip(("gate_proj", "up_proj", "down_proj"), parts, strict=True):
                    key = f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight"
                    torch.testing.assert_close(before[key] + delta, merged[key], rtol=1e-5, atol=3e-6)
            a, b = (tensor[layer] for tensor in attention.values())
            key = f"model.layers.{layer}.self_attn.o_proj.weight"
            torch.testing.assert_close(before[key] + 2 * b @ a, merged[key], rtol=1e-5, atol=1e-5)


def test_a_head_with_the_padding_of_its_vocabulary(moe: Moe, tmp_path: Path) -> None:
    base = moe("qwen3_moe")
    model = adapt(base, tmp_path / "lora", size=0.3, target_modules=["lm_head", "o_proj"])
    with_adapter = logits(model)
    settings: dict[str, Any] = {"model": tmp_path / "lora", "to": "megatron-bridge", "base": base}
    for padding, rows in ((128, 384), (1, 330), (100, 400)):
        made = convert(**settings, out=tmp_path / f"{padding}", vocab_padding=padding)
        b = stored(made)["output_layer.adapter.linear_out.weight"]
        assert b.shape == (rows, 4)
        assert not b[330:].any()
        merged = by_peft(peft.PeftModel.from_pretrained(load(base), tmp_path / "lora"), tmp_path / f"m{padding}")
        check_changes(base, merged, {"lm_head.weight": products(made)["output_layer"][:330]})
        back = convert(model=made, to="peft", out=tmp_path / f"{padding}-back")
        factors = load_file(tmp_path / "lora" / "adapter_model.safetensors")
        assert factors.pop("base_model.model.lm_head.base_layer.weight").shape == (330, 64)  # PEFT saves it too
        for name, tensor in load_file(back / "adapter_model.safetensors").items():
            assert torch.equal(tensor, factors.pop(name)), name
        assert not factors
        left = json.loads((back / "mst.json").read_text())["notes"]["left_out"]
        assert left == ([f"{rows - 330} rows of the vocabulary's padding"] if rows > 330 else [])
    assert (on(base, back) - with_adapter).abs().max() <= 1e-4


@pytest.mark.parametrize(("version", "old"), [("0.18.1", True), ("0.21.2", False)])
@pytest.mark.parametrize("inner", [24, 32])
def test_both_of_pefts_generations(moe: Moe, tmp_path: Path, inner: int, version: str, old: bool) -> None:
    """Before 0.19 in and out were exchanged; with 2 x 32 = 64 gate_up is square and only peft_version tells."""
    base = moe("qwen3_moe", moe_intermediate_size=inner)
    deltas = generation(tmp_path / "lora", base, version, old=old)
    made = convert(model=tmp_path / "lora", to="megatron-bridge", base=base, out=tmp_path / "made")
    for name, part in (("gate_up_proj", "linear_fc1"), ("down_proj", "linear_fc2")):
        found = products(made)[f"{EXPERTS}.{part}"]
        for layer in range(2):
            wanted = deltas[f"model.layers.{layer}.mlp.experts.{name}"]
            torch.testing.assert_close(found[layer], wanted, rtol=1e-5, atol=3e-6)
    back = convert(model=made, to="peft", out=tmp_path / "back")
    again = convert(model=back, to="megatron-bridge", base=base, out=tmp_path / "again")
    assert {key: t.tolist() for key, t in stored(again).items()} == {key: t.tolist() for key, t in stored(made).items()}
