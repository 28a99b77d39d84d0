"""mst-convert adapter on experts: what each rank of real megatron-core loads, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.convert.test_adapters import PREFIX, convert, stored
from tests.convert.test_layouts import make

from mst_core.errors import InputError

LOADER = """
import sys, torch, torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensorFactory
from safetensors.torch import save_file

directory, out, kind, ep, rank = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
dist.init_process_group("gloo", init_method=f"file://{out}.store", rank=rank, world_size=ep)
L, E, H, F, R = 4, 4, 16, 12, 3
each, state = E // ep, {}
nan = lambda *shape: torch.full(shape, float("nan"))
for layer in range(L):
    for fc, i, o in (("linear_fc1", H, 2 * F), ("linear_fc2", F, H)):
        at = f"decoder.layers.mlp.experts.experts.{fc}"
        for end, rows, columns in (("A", R, i), ("B", o, R)):
            if kind == "mcore":
                # TEGroupedLinear._sharded_state_dict_grouped of megatron-core: each expert a shard of its own
                key = f"{at}.lora_{end}.default"
                for e in range(each):
                    where = ((0, layer, L), (1, rank * each + e, E))
                    state[f"{layer}.{fc}.{end}.{e}"] = ShardedTensor.from_rank_offsets(
                        f"{key}.weight", nan(rows, columns), *where, prepend_axis_num=2)
                    state[f"{layer}.{fc}.{end}.{e}.state"] = ShardedObject(
                        f"{key}._extra_state", None, (L, E), (layer, rank * each + e))
            else:
                # _make_grouped_expert_sharded_tensor of megatron-bridge 0.6.2: a rank's experts packed
                key = f"{at}.adapter.linear_{'in' if end == 'A' else 'out'}.weight"
                whole = nan(each, rows, columns)
                if fc == "linear_fc1" and end == "B":
                    # _apply_grouped_expert_swiglu_sharded_factory: gate and up are shards of their own
                    for half in (0, 1):
                        state[f"{layer}.{fc}.{end}.{half}"] = ShardedTensor.from_rank_offsets(
                            key, nan(each, F, R), (0, layer, L), (1, rank, ep), (2, half, 2), prepend_axis_num=1)
                else:
                    state[f"{layer}.{fc}.{end}"] = ShardedTensor.from_rank_offsets(
                        key, whole, (0, layer, L), (1, rank, ep), prepend_axis_num=1)
loaded = dist_checkpointing.load(state, directory)
save_file({k: v.contiguous() for k, v in loaded.items() if isinstance(v, torch.Tensor)}, f"{out}.{rank}")
"""


def adapter(directory: Path, base: Path, *parts: str, **config: Any) -> Path:
    """A module for each matrix whose name ends so; one A for gate and up."""
    generator, tensors = torch.Generator().manual_seed(5), {}
    for name, weight in load_file(base / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if not module.endswith(parts):
            continue
        a = torch.randn(3, weight.shape[1], generator=generator)
        if module.endswith("up_proj"):
            a = tensors[f"{PREFIX}{module.replace('up_proj', 'gate_proj')}.lora_A.weight"].clone()
        tensors[f"{PREFIX}{module}.lora_A.weight"] = a
        tensors[f"{PREFIX}{module}.lora_B.weight"] = torch.randn(weight.shape[0], 3, generator=generator)
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    told = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "target_modules": list(parts), **config}
    (directory / "adapter_config.json").write_text(json.dumps(told))
    return directory


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return make(tmp_path / "base", "qwen3-moe", torch.float32)


EXPERT = ("gate_proj", "up_proj", "down_proj")


@pytest.mark.parametrize(("kind", "ep"), [("mcore", 1), ("mcore", 2), ("bridge", 1), ("bridge", 2)])
def test_megatron_core_loads_each_rank_its_experts(base: Path, tmp_path: Path, kind: str, ep: int) -> None:
    lora = adapter(tmp_path / "lora", base, *EXPERT)
    to = "mcore-bridge" if kind == "mcore" else "megatron-bridge"
    made = convert(model=lora, to=to, base=base, out=tmp_path / "made", tp=ep)
    rank_of_a = 3 if kind == "mcore" or ep == 1 else 4  # a multiple of tp
    script = LOADER.replace("H, F, R = 4, 4, 16, 12, 3", f"H, F, R = 4, 4, 16, 12, {rank_of_a}")
    out = tmp_path / "loaded"
    words = [sys.executable, "-c", script, str(made / "iter_0000001"), str(out), kind, str(ep)]
    ranks = [subprocess.Popen([*words, str(rank)], stderr=subprocess.PIPE, text=True) for rank in range(ep)]
    said = [rank.communicate(timeout=300)[1] for rank in ranks]
    assert not any(rank.returncode for rank in ranks), "\n".join(said)[-4000:]
    tensors = load_file(lora / "adapter_model.safetensors")
    for rank in range(ep):
        loaded = load_file(f"{out}.{rank}")
        for layer in range(4):
            for local in range(4 // ep):
                stem = f"{PREFIX}model.layers.{layer}.mlp.experts.{rank * 4 // ep + local}"
                for fc, end, wanted in (
                    ("linear_fc1", "A", tensors[f"{stem}.gate_proj.lora_A.weight"]),
                    ("linear_fc1", "B", torch.cat([tensors[f"{stem}.{n}.lora_B.weight"] for n in EXPERT[:2]])),
                    ("linear_fc2", "A", tensors[f"{stem}.down_proj.lora_A.weight"]),
                    ("linear_fc2", "B", tensors[f"{stem}.down_proj.lora_B.weight"]),
                ):
                    key = f"{layer}.{fc}.{end}"
                    if kind == "mcore":
                        got = loaded[f"{key}.{local}"]
                    elif (fc, end) == ("linear_fc1", "B"):
                        got = torch.cat([loaded[f"{key}.{half}"].reshape(-1, 12, rank_of_a)[local] for half in (0, 1)])
                    else:
                        got = loaded[key].reshape(4 // ep, *loaded[key].shape[-2:])[local]
                    got = got.reshape(got.shape[-2:])
                    got = got[:3] if end == "A" else got[:, :3]
                    assert torch.equal(got, wanted), (rank, layer, local, key)


def test_some_experts_have_no_adapter(base: Path, tmp_path: Path) -> None:
    """They get one of zeros, and the notes list them."""
    parts = tuple(f"layers.{layer}.mlp.experts.{e}.{name}" for layer in (0, 2) for e in (1, 3) for name in EXPERT)
    lora = adapter(tmp_path / "lora", base, *parts)
    made = convert(model=lora, to="megatron-bridge", base=base, out=tmp_path / "made")
    b = stored(made)["decoder.layers.mlp.experts.experts.linear_fc2.adapter.linear_out.weight"]
    assert [[bool(b[layer, e].any()) for e in range(4)] for layer in range(4)] == [
        [False, True, False, True], [False] * 4, [False, True, False, True], [False] * 4,
    ]  # fmt: skip
    zeros = json.loads((made / "mst.json").read_text())["notes"]["zeros"]
    assert len(zeros) == 3 * 12
    assert "model.layers.0.mlp.experts.0.gate_proj" in zeros


def test_what_has_no_place(base: Path, tmp_path: Path) -> None:
    head = adapter(tmp_path / "head", base, "lm_head", "o_proj")
    with pytest.raises(
        InputError, match="lm_head is adapted: mcore-bridge adapts layers of TransformerEngine"
    ) as caught:
        convert(model=head, to="mcore-bridge", base=base, out=tmp_path / "no")
    assert "--to megatron-bridge" in str(caught.value.hint)
    shared = make(tmp_path / "shared", "qwen2-moe", torch.float32)
    gate = adapter(tmp_path / "gate", shared, "shared_expert_gate")
    with pytest.raises(InputError, match="is a parameter of Megatron's shared expert"):
        convert(model=gate, to="megatron-bridge", base=shared, out=tmp_path / "no")
    with pytest.raises(InputError, match=r"experts.0.down_proj: is in target_modules but has no tensors"):
        convert(
            model=adapter(tmp_path / "half", base, "gate_proj", "up_proj", target_modules=list(EXPERT)),
            to="megatron-bridge", base=base, out=tmp_path / "no",
        )  # fmt: skip
    wrong = adapter(tmp_path / "wrong", base, *EXPERT)
    made = convert(model=wrong, to="megatron-bridge", base=base, out=tmp_path / "made")
    config = json.loads((base / "config.json").read_text())
    (tmp_path / "eight").mkdir()
    (tmp_path / "eight" / "config.json").write_text(json.dumps({**config, "num_experts": 8}))
    with pytest.raises(InputError, match="holds 4 experts, the base has 8"):
        convert(model=made, to="peft", base=tmp_path / "eight", out=tmp_path / "no")


def test_parameters_that_do_not_fit(base: Path, tmp_path: Path) -> None:
    lora = tmp_path / "lora"
    stem = f"{PREFIX}model.layers.0.mlp.experts"
    good = {f"{stem}.lora_A.weight": torch.zeros(12, 12), f"{stem}.lora_B.weight": torch.zeros(16, 12)}
    cases: list[tuple[dict[str, Any], dict[str, torch.Tensor], str]] = [
        ({"target_parameters": ["experts.down_proj"], "r": 2}, good, "down_proj: is not of the rank 2"),
        (
            {"target_parameters": ["gate_up_proj", "down_proj"]},
            good,
            "names gate_up_proj, down_proj of its parameters, ad",
        ),
        ({"target_parameters": ["down_proj"]}, {**good, f"{stem}.lora_B.weight": torch.zeros(20, 12)}, "make"),
    ]
    for number, (config, tensors, says) in enumerate(cases):
        lora = tmp_path / f"lora{number}"
        lora.mkdir()
        save_file(tensors, lora / "adapter_model.safetensors")
        told = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "target_modules": [], **config}
        (lora / "adapter_config.json").write_text(json.dumps(told))
        with pytest.raises(InputError, match=says):
            convert(model=lora, to="megatron-bridge", base=base, out=tmp_path / "no")


def test_gpt_oss_has_no_modules_of_experts(tmp_path: Path) -> None:
    base = make(tmp_path / "base", "gpt-oss", torch.float32)
    generator, tensors = torch.Generator().manual_seed(1), {}
    for layer in range(4):
        stem = f"{PREFIX}model.layers.{layer}.mlp.experts"
        tensors[f"{stem}.lora_A.weight"] = torch.randn(12, 24, generator=generator)
        tensors[f"{stem}.lora_B.weight"] = torch.randn(16, 12, generator=generator)
    lora = tmp_path / "lora"
    lora.mkdir()
    save_file(tensors, lora / "adapter_model.safetensors")
    told = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "target_modules": [], "target_parameters": ["down_proj"]}
    (lora / "adapter_config.json").write_text(json.dumps(told))
    made = convert(model=lora, to="mcore-bridge", base=base, out=tmp_path / "made")
    with pytest.raises(InputError, match="was one tensor of all experts in every transformers") as caught:
        convert(model=made, to="peft", experts="modules", out=tmp_path / "no")
    assert caught.value.hint == "--experts parameters"
    back = load_file(convert(model=made, to="peft", out=tmp_path / "back") / "adapter_model.safetensors")
    assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())


def test_the_flags(base: Path, tmp_path: Path, mst: Callable[..., Any]) -> None:
    lora = adapter(tmp_path / "lora", base, *EXPERT, "lm_head")
    made, back = tmp_path / "made", tmp_path / "back"
    bridge = ["--to", "megatron-bridge", "--base", base, "--vocab-padding", 64]
    mst("mst-convert", "adapter", "--model", lora, *bridge, "--out", made)
    assert stored(made)["output_layer.adapter.linear_out.weight"].shape[0] == 64
    mst("mst-convert", "adapter", "--model", made, "--to", "peft", "--experts", "modules", "--out", back)
    one, other = (load_file(place / "adapter_model.safetensors") for place in (lora, back))
    assert one.keys() == other.keys()
    assert all(torch.equal(other[name], tensor) for name, tensor in one.items())
