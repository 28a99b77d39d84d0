"""mst-convert adapter: deltas, round trips, what real megatron-core loads, what is refused.

What the outputs must mean is written out here without mst's maps: rows by query group, gate above up.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed import checkpoint as dcp

from mst_convert import plan as convert_planning
from mst_convert.adapters import names as naming
from mst_convert.adapters import plan as planning
from mst_convert.adapters import work as working
from mst_convert.adapters.spec import AdapterSpec
from mst_convert.merge import plan as merge_planning
from mst_convert.merge.spec import MergeSpec
from mst_convert.spec import ConvertSpec
from mst_core import checkpoint, manifest
from mst_core.errors import InputError, SettingsError
from mst_core.families import family_for

TinyHF = Callable[..., Path]
QKV, GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
BLOCKS = {
    "self_attention.linear_qkv": ("self_attn", QKV),
    "self_attention.linear_proj": ("self_attn", ("o_proj",)),
    "mlp.linear_fc1": ("mlp", GATE_UP),
    "mlp.linear_fc2": ("mlp", ("down_proj",)),
}
ALL = tuple(name for _, names in BLOCKS.values() for name in names)
PREFIX = "base_model.model."
ATTENTION = ("q_proj", "v_proj")


def convert(**settings: Any) -> Path:
    spec = AdapterSpec(**{k: str(v) if k in ("model", "base") and v is not None else v for k, v in settings.items()})
    working.work(spec, planning.plan(spec))
    return spec.out


def make_peft(
    directory: Path, base: Path, *, names: tuple[str, ...] = ALL, shared: bool = False, layers: tuple[int, ...] = (),
    dtype: torch.dtype = torch.float32, **config: Any,
) -> Path:  # fmt: skip
    """A random adapter; ``shared``: one A for q, k, v and one for gate, up."""
    weights = load_file(base / "model.safetensors")
    told = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": list(names), **config}
    generator = torch.Generator().manual_seed(5)
    tensors: dict[str, Tensor] = {}
    for layer in layers or range(4):
        for block, parts in BLOCKS.values():
            a = None
            for name in parts:
                if name not in names:
                    continue
                module = f"model.layers.{layer}.{block}.{name}"
                out, width = weights[f"{module}.weight"].shape
                rank = told.get("rank_pattern", {}).get(name, told["r"])
                if a is None or not shared:
                    a = torch.randn(rank, width, generator=generator)
                tensors[f"{PREFIX}{module}.lora_A.weight"] = a.to(dtype).clone()
                tensors[f"{PREFIX}{module}.lora_B.weight"] = torch.randn(out, rank, generator=generator).to(dtype)
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    (directory / "adapter_config.json").write_text(json.dumps(told))
    return directory


def deltas(peft: Path) -> dict[str, Tensor]:
    """scale * B @ A of each module of a PEFT directory."""
    config, tensors = (
        json.loads((peft / "adapter_config.json").read_text()),
        load_file(peft / "adapter_model.safetensors"),
    )
    found = {}
    for key, a in tensors.items():
        if key.endswith("lora_A.weight"):
            module, b = (
                key.removeprefix(PREFIX).removesuffix(".lora_A.weight"),
                tensors[key.replace("lora_A", "lora_B")],
            )
            leaf = module.rpartition(".")[2]
            rank = (config.get("rank_pattern") or {}).get(leaf, config["r"])
            alpha = (config.get("alpha_pattern") or {}).get(leaf, config["lora_alpha"])
            scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
            found[module] = b.float() @ a.float() * scale
    return found


def stored(directory: Path) -> dict[str, Tensor]:
    """Every tensor of the checkpoint, as torch itself reads it."""
    reader = dcp.FileSystemReader(directory / "iter_0000001")
    entries = reader.read_metadata().state_dict_metadata
    state = {key: torch.empty(e.size, dtype=e.properties.dtype) for key, e in entries.items() if hasattr(e, "size")}
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state


def unfused(kind: str, matrix: Tensor, config: Mapping[str, Any]) -> list[Tensor]:
    """The rows of a fused matrix, part by part, as Megatron's attention and MLP read them."""
    if kind == "mlp.linear_fc1":
        return list(matrix.chunk(2, 0))
    if kind != "self_attention.linear_qkv":
        return [matrix]
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    d = config.get("head_dim") or config["hidden_size"] // heads
    by_group = matrix.reshape(groups, -1, matrix.shape[1])
    q, k, v = by_group.split([heads // groups * d, d, d], 1)
    return [part.reshape(-1, matrix.shape[1]) for part in (q, k, v)]


def bridge_deltas(directory: Path, base: Path) -> dict[str, Tensor]:
    """What Megatron-Bridge or mcore-bridge adds to each Hugging Face matrix: alpha / dim * linear_out @ linear_in."""
    state, config = stored(directory), json.loads((base / "config.json").read_text())
    said = directory / "iter_0000001" / "run_config.yaml"
    if said.is_file():
        peft = yaml.safe_load(said.read_text())["peft"]
        scale, ends = peft["alpha"] / peft["dim"], (".adapter.linear_in.weight", ".adapter.linear_out.weight")
    else:
        args = json.loads((directory / "args.json").read_text())
        root = math.sqrt(args["lora_rank"]) if args["use_rslora"] else args["lora_rank"]
        scale, ends = args["lora_alpha"] / root, (".lora_A.default.weight", ".lora_B.default.weight")
    found = {}
    for kind, (block, names) in BLOCKS.items():
        for layer in range(config["num_hidden_layers"]):
            at = f"decoder.layers.{kind}"
            if at + ends[0] in state:
                delta = state[at + ends[1]][layer].float() @ state[at + ends[0]][layer].float() * scale
                parts = unfused(kind, delta, config)
            elif f"{at}.adapter.adapter_{names[0].partition('_')[0]}.linear_in.weight" in state:
                keys = [f"{at}.adapter.adapter_{name.partition('_')[0]}" for name in names]
                parts = [
                    state[f"{key}.linear_out.weight"][layer].float()
                    @ state[f"{key}.linear_in.weight"][layer].float()
                    * scale
                    for key in keys
                ]
            else:
                continue
            found |= {f"model.layers.{layer}.{block}.{name}": part for name, part in zip(names, parts, strict=True)}
    return found


def assert_same(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """Equal within fp32 rounding; a module that has no adapter has a delta of zeros."""
    assert set(wanted) <= set(found)
    for module, delta in found.items():
        if module in wanted:
            torch.testing.assert_close(delta, wanted[module], rtol=1e-6, atol=2e-6, msg=module)
        else:
            assert not delta.any(), module


def assert_equal(first: Path, second: Path) -> None:
    one, other = load_file(first / "adapter_model.safetensors"), load_file(second / "adapter_model.safetensors")
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype
        assert torch.equal(tensor, other[name]), name


SHAPES: dict[str, dict[str, Any]] = {
    "shared": {"shared": True},
    "different": {},
    "rslora": {"use_rslora": True, "lora_alpha": 6},
    "shared-rslora": {"shared": True, "use_rslora": True, "lora_alpha": 6, "r": 3},
    "q-and-v": {"names": ATTENTION, "layers": (1, 3), "layers_to_transform": [1, 3]},
    "rank-pattern": {"rank_pattern": {"down_proj": 8, "o_proj": 2}},
    "bf16": {"dtype": torch.bfloat16},
}
"""Adapters: with one A, with their own, with other scales, with missing parts."""
TARGETS = [
    ("megatron-bridge", None),
    ("megatron-bridge", "fused"),
    ("megatron-bridge", "separate"),
    ("mcore-bridge", None),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("to", "form"), TARGETS)
def test_the_delta_stays(tiny_hf: TinyHF, tmp_path: Path, shape: str, to: str, form: str | None) -> None:
    base = tiny_hf("qwen3" if shape == "different" else "llama")
    peft = make_peft(tmp_path / "peft", base, **SHAPES[shape])
    made = convert(model=peft, to=to, form=form, base=base, out=tmp_path / "made")
    assert_same(bridge_deltas(made, base), deltas(peft))
    back = convert(model=made, to="peft", out=tmp_path / "back")
    assert_same(deltas(back), deltas(peft))
    assert not checkpoint.verify(made)
    assert not checkpoint.verify(back)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize(
    ("to", "shared", "settings"),
    [
        ("megatron-bridge", True, {}),
        ("megatron-bridge", False, {}),
        ("megatron-bridge", False, {"tp": 2}),
        ("mcore-bridge", True, {}),
        ("mcore-bridge", True, {"tp": 2}),
    ],
)
def test_a_round_trip_is_exact(
    tiny_hf: TinyHF, tmp_path: Path, family: str, to: str, shared: bool, settings: dict[str, Any]
) -> None:
    base = tiny_hf(family)
    peft = make_peft(tmp_path / "peft", base, shared=shared)
    made = convert(model=peft, to=to, base=base, out=tmp_path / "made", **settings)
    back = convert(model=made, to="peft", out=tmp_path / "back")
    assert_equal(peft, back)
    config = json.loads((back / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (4, 8, sorted(ALL))
    again = convert(model=back, to=to, base=base, out=tmp_path / "again", **settings)
    assert {k: v.tolist() for k, v in stored(again).items()} == {k: v.tolist() for k, v in stored(made).items()}


def test_between_the_bridges(tiny_hf: TinyHF, tmp_path: Path) -> None:
    base = tiny_hf("qwen2")
    peft = make_peft(tmp_path / "peft", base)
    canonical = convert(model=peft, to="megatron-bridge", base=base, out=tmp_path / "c", tp=2)
    assert "CanonicalLoRA" in (canonical / "iter_0000001" / "run_config.yaml").read_text()
    mcore = convert(model=canonical, to="mcore-bridge", out=tmp_path / "m")
    assert json.loads((mcore / "args.json").read_text())["lora_rank"] == 12
    assert_same(bridge_deltas(mcore, base), deltas(peft))
    fused = convert(model=mcore, to="megatron-bridge", out=tmp_path / "f")
    assert_same(bridge_deltas(fused, base), deltas(peft))
    assert_same(deltas(convert(model=fused, to="peft", out=tmp_path / "b")), deltas(peft))


def test_peft_with_one_a(tiny_hf: TinyHF, tmp_path: Path) -> None:
    """What mcore-bridge's load_weights asserts: q, k, v have the same A, and gate and up."""
    base = tiny_hf("llama")
    peft = make_peft(tmp_path / "peft", base, names=(*ATTENTION, "gate_proj", "up_proj"))
    made = convert(model=peft, to="peft", form="fused", base=base, out=tmp_path / "made")
    tensors = load_file(made / "adapter_model.safetensors")
    for layer in range(4):
        at = f"{PREFIX}model.layers.{layer}"
        q, k, v = (tensors[f"{at}.self_attn.{name}.lora_A.weight"] for name in QKV)
        gate, up = (tensors[f"{at}.mlp.{name}.lora_A.weight"] for name in GATE_UP)
        assert torch.equal(q, k)
        assert torch.equal(q, v)
        assert torch.equal(gate, up)
    assert_same(deltas(made), deltas(peft))
    assert json.loads((made / "adapter_config.json").read_text())["lora_alpha"] == 16  # rank 8 instead of 4


def test_peft_merges_it_the_same(tiny_hf: TinyHF, tmp_path: Path) -> None:
    """PEFT's own merge of the adapter that came back equals its merge of the first."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = tiny_hf("llama")
    peft = make_peft(tmp_path / "peft", base, use_rslora=True, lora_alpha=6)
    made = convert(model=peft, to="megatron-bridge", form="fused", base=base, out=tmp_path / "made")
    back = convert(model=made, to="peft", out=tmp_path / "back")
    merged = []
    for adapter in (peft, back):
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        merged.append(PeftModel.from_pretrained(model, adapter).merge_and_unload().state_dict())
    weights = load_file(base / "model.safetensors")
    for name, tensor in merged[0].items():
        torch.testing.assert_close(merged[1][name], tensor, rtol=1e-6, atol=3e-6)
    delta = bridge_deltas(made, base)
    for module, change in delta.items():
        torch.testing.assert_close(
            weights[f"{module}.weight"] + change, merged[0][f"{module}.weight"], rtol=1e-6, atol=3e-6
        )


def test_layers_of_several_kinds_are_written_apart(tiny_hf: TinyHF, tmp_path: Path) -> None:
    """A key for each layer where config.json says that layers differ; here by the manifest of the base's config."""
    base = tiny_hf("llama")
    peft = make_peft(tmp_path / "peft", base, shared=True)
    spec = AdapterSpec(model=str(peft), to="megatron-bridge", base=str(base), out=tmp_path / "made")
    plan = planning.plan(spec)
    model = plan.base.model
    object.__setattr__(model, "layer_facts", (frozenset({"a"}), frozenset(), frozenset(), frozenset()))
    working.work(spec, plan)
    assert "decoder.layers.3.mlp.linear_fc2.adapter.linear_in.weight" in stored(spec.out)
    assert_equal(peft, convert(model=spec.out, to="peft", out=tmp_path / "back"))


def test_targets_of_megatron_bridge() -> None:
    """A plain name where it means these layers only: in a model of experts linear_fc1 is theirs too."""
    config = {
        "architectures": ["Qwen2MoeForCausalLM"], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 330, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48,
        "decoder_sparse_step": 1, "mlp_only_layers": [],
    }  # fmt: skip
    model = family_for(config).model(config)
    everywhere = naming.sites(model)
    assert sum(".experts." in site.module for site in everywhere) == 2 * 2 * 4
    some = [site for site in everywhere if site.leaf in ("linear_qkv", "linear_fc1") and site.expert is None]
    shared_expert = "*.mlp.shared_experts.linear_fc1"
    assert naming.targets(some, everywhere) == ["linear_qkv", shared_expert]
    parts = ["linear_q", "linear_k", "linear_v", f"{shared_expert}_gate", f"{shared_expert}_up"]
    assert naming.targets(some, everywhere, canonical=True) == parts
    experts = [site for site in everywhere if site.leaf == "linear_fc1" and site.expert is not None]
    (wild,) = naming.targets(experts, everywhere)
    # Megatron-Bridge's wildcard_match (peft/utils.py of 0.6.2): grouped experts, those one by one, and nothing else.
    matches = re.compile("^" + wild.replace("*", "(.*)") + "$").match
    assert matches("decoder.layers.0.mlp.experts.linear_fc1")
    assert matches("decoder.layers.0.mlp.experts.local_experts.3.linear_fc1")
    assert not matches("decoder.layers.0.mlp.shared_experts.linear_fc1")
    assert not matches("decoder.layers.0.mlp.linear_fc1")
    stem = "*.mlp.experts.linear_fc1"
    assert naming.targets(experts, everywhere, canonical=True) == [f"{stem}_gate", f"{stem}_up"]
    assert naming.targets(experts, everywhere, wild=False) == ["mlp.experts.linear_fc1"]
    all_fc1 = [site for site in everywhere if site.leaf == "linear_fc1"]
    assert naming.targets(all_fc1, everywhere) == naming.targets(all_fc1, everywhere, wild=False) == ["linear_fc1"]


def test_a_module_that_is_fused_in_hugging_face(tmp_path: Path) -> None:
    """Phi-3 has one qkv_proj: its rows are sorted by query group, and CanonicalLoRA has no name for it."""
    config = {
        "architectures": ["Phi3ForCausalLM"], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 330,
    }  # fmt: skip
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text(json.dumps(config))
    peft = tmp_path / "peft"
    peft.mkdir()
    told = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["qkv_proj"]}
    (peft / "adapter_config.json").write_text(json.dumps(told))
    modules = [f"{PREFIX}model.layers.{layer}.self_attn.qkv_proj" for layer in range(2)]
    tensors = {f"{module}.lora_A.weight": torch.randn(4, 64) for module in modules}
    save_file(
        tensors | {f"{module}.lora_B.weight": torch.randn(128, 4) for module in modules},
        peft / "adapter_model.safetensors",
    )
    made = convert(model=peft, to="megatron-bridge", base=base, out=tmp_path / "made")
    found = stored(made)["decoder.layers.self_attention.linear_qkv.adapter.linear_out.weight"]
    whole = load_file(peft / "adapter_model.safetensors")[f"{modules[1]}.lora_B.weight"]
    assert torch.equal(torch.cat(unfused("self_attention.linear_qkv", found[1], config)), whole)
    assert_equal(peft, convert(model=made, to="peft", out=tmp_path / "back"))
    with pytest.raises(InputError, match="CanonicalLoRA has no name for"):
        convert(model=peft, to="megatron-bridge", form="separate", base=base, out=tmp_path / "no")


LOADER = """
import sys, json, torch, torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from safetensors.torch import load_file, save_file

directory, out, kind, tp, rank = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
dist.init_process_group("gloo", init_method=f"file://{out}.store", rank=rank, world_size=tp)
L, H, F, R = 4, 64, 96, 4
state = {}
for layer in range(L):
    offsets = ((0, layer, L),)
    def local(key, rows, columns, swiglu=False, axis=None):
        shape = (rows // tp if axis == 0 else rows, columns // tp if axis == 1 else columns)
        cut = [] if axis is None or tp == 1 else [(1 + axis, rank, tp)]
        sharded = ShardedTensor.from_rank_offsets(
            key, torch.full(shape, float("nan")), *offsets, *cut, replica_id=0 if cut else rank, prepend_axis_num=1)
        state[f"{layer}.{key}"] = apply_swiglu_sharded_factory(sharded, offsets) if swiglu else sharded
    at = "decoder.layers.mlp.linear_fc1"
    if kind == "canonical":
        for part in ("gate", "up"):
            local(f"{at}.adapter.adapter_{part}.linear_in.weight", R, H, axis=0)
            local(f"{at}.adapter.adapter_{part}.linear_out.weight", F, R, swiglu=True, axis=0)
    elif kind == "lora":
        local(f"{at}.adapter.linear_in.weight", R, H, axis=0)
        local(f"{at}.adapter.linear_out.weight", 2 * F, R, swiglu=True, axis=0)
    else:
        for which in "AB":
            module = f"{at}.lora_{which}.default"
            state[f"{layer}.{which}"] = ShardedObject(f"{module}._extra_state", None, (L,), (layer,), replica_id=rank)
        local(f"{at}.lora_A.default.weight", R, H)
        local(f"{at}.lora_B.default.weight", 2 * F, R, axis=0)
    name = "lora_A.default" if kind == "mcore" else "adapter.linear_in"
    local(f"decoder.layers.mlp.linear_fc2.{name}.weight", R, F, axis=1)
common = dist_checkpointing.load_common_state_dict(directory)
if kind == "mcore":
    assert common["args"].tensor_model_parallel_size == tp, common
loaded = dist_checkpointing.load(state, directory)
found = {key: value.contiguous() for key, value in loaded.items()
         if isinstance(value, torch.Tensor) and key[0].isdigit()}
save_file(found, f"{out}.{rank}")
"""


@pytest.mark.parametrize(("kind", "tp"), [("lora", 2), ("canonical", 2), ("mcore", 2)])
def test_megatron_core_loads_each_rank_its_rows(tiny_hf: TinyHF, tmp_path: Path, kind: str, tp: int) -> None:
    """Real dist_checkpointing.load, asked as each rank of the bridges asks (their sharded_state_dict)."""
    base = tiny_hf("llama")
    peft = make_peft(tmp_path / "peft", base, names=(*GATE_UP, "down_proj"), shared=kind != "canonical")
    to = "mcore-bridge" if kind == "mcore" else "megatron-bridge"
    made = convert(model=peft, to=to, base=base, out=tmp_path / "made", tp=1 if kind == "lora" else tp)
    out = tmp_path / "loaded"
    words = [sys.executable, "-c", LOADER, str(made / "iter_0000001"), str(out), kind, str(tp)]
    ranks = [subprocess.Popen([*words, str(rank)], stderr=subprocess.PIPE, text=True) for rank in range(tp)]
    said = [rank.communicate(timeout=300)[1] for rank in ranks]
    assert not any(rank.returncode for rank in ranks), "\n".join(said)[-4000:]
    tensors = load_file(peft / "adapter_model.safetensors")
    at = "decoder.layers.mlp.linear_fc1"
    for rank in range(tp):
        loaded = load_file(f"{out}.{rank}")
        for layer in range(4):
            prefix = f"{PREFIX}model.layers.{layer}.mlp"
            gate, up = (tensors[f"{prefix}.{name}.lora_B.weight"].chunk(tp)[rank] for name in GATE_UP)
            if kind == "canonical":
                for part, wanted in (("gate", gate), ("up", up)):
                    got = loaded[f"{layer}.{at}.adapter.adapter_{part}.linear_out.weight"]
                    assert torch.equal(got.reshape(wanted.shape), wanted)
            else:
                name = "lora_B.default" if kind == "mcore" else "adapter.linear_out"
                wanted = torch.cat([gate, up])
                assert torch.equal(loaded[f"{layer}.{at}.{name}.weight"].reshape(wanted.shape), wanted)
            down = tensors[f"{prefix}.down_proj.lora_A.weight"].chunk(tp, 1)[rank]
            name = "lora_A.default" if kind == "mcore" else "adapter.linear_in"
            assert torch.equal(loaded[f"{layer}.decoder.layers.mlp.linear_fc2.{name}.weight"].reshape(down.shape), down)


def test_lineage(tiny_hf: TinyHF, tmp_path: Path) -> None:
    """The base that an adapter of mst names stays its parent, there and back; another base is refused."""
    base = tiny_hf("llama")
    peft = make_peft(tmp_path / "plain", base, shared=True)
    parent = manifest.Parent(role="base", id="blake3:" + "7" * 64, weights="8" * 64)
    with checkpoint.stage(tmp_path / "peft") as staging:
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            staging.copy(peft / name, name)
        staging.commit(kind="adapter", layout="peft", tool="mst-train", settings={}, parents=[parent])
    made = convert(model=tmp_path / "peft", to="megatron-bridge", base=base, out=tmp_path / "made")
    back = convert(model=made, to="peft", out=tmp_path / "back")
    for directory in (made, back):
        read = manifest.read(directory)
        assert read.kind == "adapter"
        assert read.parent("base") == parent
    assert len(list((back / "lineage").glob("*.json"))) == 2
    other = tmp_path / "other"
    with checkpoint.stage(other) as staging:
        for name in ("config.json", "model.safetensors"):
            staging.copy(base / name, name)
        staging.commit(kind="model", layout="hf", tool="mst-convert", settings={})
    with pytest.raises(InputError, match="adapts blake3:777777777777"):
        convert(model=tmp_path / "peft", to="megatron-bridge", base=other, out=tmp_path / "no")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "dora": ({"use_dora": True}, "use_dora"),
    "scales": ({"rank_pattern": {"down_proj": 3}}, "down_proj: has the scale 2.66667, most have 2"),
    "rank": ({"r": 4, "alpha_pattern": {}, "rank_pattern": {"model.layers.0.mlp.up_proj": 2}}, "not of the rank 2"),
    "missing": ({"names": ("q_proj",), "target_modules": ["q_proj", "k_proj"]}, "k_proj: is in target_modules but"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(tiny_hf: TinyHF, tmp_path: Path, case: str) -> None:
    base = tiny_hf("llama")
    settings, text = REFUSED[case]
    peft = make_peft(tmp_path / "peft", base, **settings)
    if case == "dora":
        tensors = load_file(peft / "adapter_model.safetensors")
        tensors |= {
            key.replace("lora_B.weight", "lora_magnitude_vector"): torch.ones(value.shape[0])
            for key, value in tensors.items()
            if key.endswith("lora_B.weight")
        }
        save_file(tensors, peft / "adapter_model.safetensors")
    with pytest.raises(InputError, match=text):
        convert(model=peft, to="megatron-bridge", base=base, out=tmp_path / "no")
    assert not (tmp_path / "no").exists()


PLACES: dict[str, tuple[str, str]] = {
    "model.layers.0.mlp.experts.3.up_proj": ("weight", "is no linear layer of this base that Megatron has too"),
    "model.embed_tokens": ("embedding", "is an embedding: both bridges adapt linear layers only"),
    "lm_head": ("weight", "is a head that this base has tied to its embedding"),
}


@pytest.mark.parametrize("module", PLACES)
def test_refused_tensors(tiny_hf: TinyHF, tmp_path: Path, module: str) -> None:
    base = tiny_hf("qwen2")
    peft = make_peft(tmp_path / "peft", base)
    path = peft / "adapter_model.safetensors"
    kind, text = PLACES[module]
    ends = ("lora_A.weight", "lora_B.weight") if kind == "weight" else ("lora_embedding_A", "lora_embedding_B")
    more = (torch.zeros(4, 64), torch.zeros(330, 4)) if kind == "weight" else (torch.zeros(4, 330), torch.zeros(64, 4))
    save_file(load_file(path) | {f"{PREFIX}{module}.{end}": t for end, t in zip(ends, more, strict=True)}, path)
    with pytest.raises(InputError) as caught:
        convert(model=peft, to="megatron-bridge", base=base, out=tmp_path / "no")
    assert f"{module}: {text}" in str(caught.value)
    assert "mst-merge --model BASE --adapter DIR --to megatron" in str(caught.value.hint)


def test_refused_checkpoints(tiny_hf: TinyHF, tmp_path: Path) -> None:
    base = tiny_hf("llama")
    peft = make_peft(tmp_path / "peft", base, shared=True)
    made = convert(model=peft, to="megatron-bridge", base=base, out=tmp_path / "made")
    with pytest.raises(InputError, match="is in the layout of megatron-bridge already"):
        convert(model=made, to="megatron-bridge", out=tmp_path / "no")
    with pytest.raises(InputError, match="is in the layout of peft already"):
        convert(model=peft, to="peft", base=base, out=tmp_path / "no")
    with pytest.raises(InputError, match=r"does not hold its base's config.json"):
        convert(model=peft, to="megatron-bridge", out=tmp_path / "no")
    with pytest.raises(InputError, match=r"--alpha 3: its run_config.yaml says 8"):
        convert(model=made, to="peft", out=tmp_path / "no", alpha=3)
    with pytest.raises(InputError, match="is a whole model"):
        convert(model=base, to="peft", out=tmp_path / "no")
    wider = tiny_hf("llama", intermediate_size=128)
    with pytest.raises(InputError, match="do not fit the base's"):
        convert(model=made, to="peft", base=wider, out=tmp_path / "no")
    (made / "iter_0000001" / "run_config.yaml").unlink()
    (made / "mst.json").unlink()
    with pytest.raises(InputError, match="says nowhere what its alpha is"):
        convert(model=made, to="peft", out=tmp_path / "no")
    assert_equal(peft, convert(model=made, to="peft", out=tmp_path / "back", alpha=8))
    config = made / "iter_0000001" / "run_config.yaml"
    config.write_text(yaml.safe_dump({"peft": {"_target_": "megatron.bridge.peft.dora.DoRA", "alpha": 8}}))
    with pytest.raises(InputError, match="is of the kind DoRA"):
        convert(model=made, to="peft", out=tmp_path / "no")


def test_an_adapter_is_no_model(tiny_hf: TinyHF, tmp_path: Path) -> None:
    """mst-convert and mst-merge say which command takes it."""
    base = tiny_hf("llama")
    for to in ("megatron-bridge", "mcore-bridge"):
        made = convert(model=make_peft(tmp_path / f"p-{to}", base), to=to, base=base, out=tmp_path / to)
        for out in ("hf", "megatron"):
            with pytest.raises(InputError, match="is an adapter of Megatron-Bridge or mcore-bridge") as caught:
                convert_planning.plan(ConvertSpec(model=str(made), to=out, out=tmp_path / "no"))
            assert f"mst-convert adapter --model {made} --to peft" in str(caught.value.hint)
        with pytest.raises(InputError, match=r"no adapter_config\.json") as caught:
            merge_planning.plan(MergeSpec(model=str(base), adapter=(str(made),), out=tmp_path / "no"))
        assert f"mst-convert adapter --model {made} --to peft" in str(caught.value.hint)


def test_rslora_needs_a_whole_alpha_for_ms_swift(tiny_hf: TinyHF, tmp_path: Path) -> None:
    base = tiny_hf("llama")
    peft = make_peft(tmp_path / "peft", base, use_rslora=True, lora_alpha=7.3)
    with pytest.raises(InputError, match="ms-swift takes whole numbers"):
        convert(model=peft, to="mcore-bridge", base=base, out=tmp_path / "no")


def test_settings() -> None:
    for words in (
        ["--to", "mcore-bridge", "--form", "separate"],
        ["--to", "peft", "--tp", "2"],
        ["--to", "megatron-bridge", "--experts", "modules"],
        ["--to", "peft", "--vocab-padding", "64"],
        ["--to", "mcore-bridge", "--vocab-padding", "64"],
    ):
        with pytest.raises(SettingsError):
            AdapterSpec.parse(["--model", "a", "--out", "b", *words])


def test_the_command(tiny_hf: TinyHF, tmp_path: Path, mst: Callable[..., Any]) -> None:
    base = tiny_hf("llama")
    peft = make_peft(tmp_path / "peft", base, names=ATTENTION)
    words = [
        "mst-convert",
        "adapter",
        "--model",
        peft,
        "--to",
        "megatron-bridge",
        "--base",
        base,
        "--out",
        tmp_path / "o",
    ]
    shown = mst(*words, "--dry-run")
    assert "8 modules: q_proj, v_proj" in shown.stderr
    done = mst(*words, "--json")
    assert json.loads(done.stdout)["zeros"][0] == "model.layers.0.self_attn.k_proj"
