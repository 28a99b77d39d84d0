"""Every family through every layout and back, bit for bit, on random weights under the names of its rules."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from mst_convert import plan as planning
from mst_convert import work as working
from mst_convert.spec import ConvertSpec
from mst_core import checkpoint, manifest, torch_dist
from mst_core.errors import InputError
from mst_core.families import family_for, pack, tasks

SIZES: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 50, "max_position_embeddings": 64,
}  # fmt: skip
ROUTED: dict[str, Any] = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}  # fmt: skip
MLA: dict[str, Any] = {
    **ROUTED, "num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4, "v_head_dim": 8,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True},
    "llama, biases": {"architectures": ["LlamaForCausalLM"], "attention_bias": True, "mlp_bias": True},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"]},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"]},
    "internlm2": {"architectures": ["InternLM2ForCausalLM"]},
    "internlm2, tied": {"architectures": ["InternLM2ForCausalLM"], "tie_word_embeddings": True},
    "gemma2": {"architectures": ["Gemma2ForCausalLM"], "tie_word_embeddings": True},
    "phi3": {"architectures": ["Phi3ForCausalLM"], "head_dim": 4},
    "glm4": {"architectures": ["Glm4ForCausalLM"], "attention_bias": True},
    "mixtral": {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4},
    "qwen2-moe": {
        "architectures": ["Qwen2MoeForCausalLM"], "num_experts": 4, "moe_intermediate_size": 12,
        "shared_expert_intermediate_size": 20, "num_experts_per_tok": 2,
    },
    "qwen3-moe": {
        "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "moe_intermediate_size": 12,
        "num_experts_per_tok": 2,
    },
    "deepseek-v3": {"architectures": ["DeepseekV3ForCausalLM"], **MLA},
    "glm4-moe": {"architectures": ["Glm4MoeForCausalLM"], **ROUTED},
    "gpt-oss": {"architectures": ["GptOssForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek-v3, mtp": {"architectures": ["DeepseekV3ForCausalLM"], **MLA, "num_nextn_predict_layers": 2},
    "glm4-moe, mtp, tied": {
        "architectures": ["Glm4MoeForCausalLM"], **ROUTED, "num_nextn_predict_layers": 1, "tie_word_embeddings": True,
    },
}  # fmt: skip
MTP = ("deepseek-v3, mtp", "glm4-moe, mtp, tied")
UNEVEN = ("deepseek-v3", "glm4-moe", *MTP)
MOE = ("mixtral", "qwen2-moe", "qwen3-moe", "gpt-oss", *UNEVEN)


def make(directory: Path, name: str, dtype: torch.dtype = torch.bfloat16, layers: int = 4) -> Path:
    """A Hugging Face directory of random weights."""
    config = {**SIZES, **CONFIGS[name], "num_hidden_layers": layers}
    model = family_for(config).model(config)
    directory.mkdir()
    generator = torch.Generator().manual_seed(5)
    state = {
        spec.name: torch.randn(spec.shape, generator=generator).to(
            torch.float32 if spec.name.endswith("e_score_correction_bias") else dtype
        )
        for spec in model.hf_tensors()
    }
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def convert(**settings: Any) -> Path:
    spec = ConvertSpec(**{key: str(value) if key == "model" else value for key, value in settings.items()})
    working.work(spec, planning.plan(spec))
    assert checkpoint.verify(spec.out) == []
    return spec.out


def same(first: Path, second: Path) -> None:
    ours, theirs = (load_file(place / "model.safetensors") for place in (first, second))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize("name", CONFIGS)
def test_torch_dist_and_back(tmp_path: Path, name: str) -> None:
    hf = make(tmp_path / "hf", name)
    forms = ["per-layer"] if name in UNEVEN else ["stacked", "per-layer"]
    for spec, form in product(("te", "local"), forms):
        place = tmp_path / f"{spec}-{form}"
        out = convert(model=hf, to="megatron", out=place, spec=spec, form=form, verify="roundtrip")
        same(hf, convert(model=out, to="hf", out=tmp_path / f"{spec}-{form}-back"))


def test_a_tied_internlm2_keeps_the_head_it_ships(tmp_path: Path) -> None:
    """Its name is output.weight; one that differs from the embedding is refused."""
    hf = make(tmp_path / "hf", "internlm2, tied")
    state = load_file(hf / "model.safetensors")
    assert "output.weight" not in state
    save_file(state | {"output.weight": state["model.tok_embeddings.weight"].clone()}, hf / "model.safetensors")
    native = convert(model=hf, to="megatron", out=tmp_path / "native")
    same(hf, convert(model=native, to="hf", out=tmp_path / "back"))
    save_file(state | {"output.weight": state["model.tok_embeddings.weight"] + 1}, hf / "model.safetensors")
    with pytest.raises(InputError, match=r"output\.weight"):
        convert(model=hf, to="megatron", out=tmp_path / "no")


def common_state(out: Path) -> dict[str, Any]:
    """What megatron-core finds beside the tensors."""
    from megatron.core.dist_checkpointing import load_common_state_dict

    found: dict[str, Any] = load_common_state_dict(str(torch_dist.checkpoint_dir(out)))
    return found


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in UNEVEN])
def test_hybrid_and_back(tmp_path: Path, name: str) -> None:
    hf = make(tmp_path / "hf", name)
    out = convert(model=hf, to="megatron", out=tmp_path / "m", spec="hybrid")
    if arguments := common_state(out).get("args"):  # or Megatron-LM would take it for a GPTModel's
        assert arguments.num_layers == len(arguments.hybrid_layer_pattern)
        assert set(arguments.hybrid_layer_pattern) in ({"*", "-"}, {"*", "E"})
    same(hf, convert(model=out, to="hf", out=tmp_path / "back"))
    te = convert(model=out, to="megatron", out=tmp_path / "te", max_shard_size=5000)
    assert len(list((te / "release").glob("*.distcp"))) > 1
    same(hf, convert(model=te, to="hf", out=tmp_path / "again"))


@pytest.mark.parametrize(
    ("name", "experts"), [("llama", 0), ("llama, biases", 0), ("qwen3-moe", 0), ("mixtral", 1), ("deepseek-v3", 0)]
)
def test_what_megatron_fsdp_saves_is_read(tmp_path: Path, name: str, experts: int) -> None:
    """fsdp_dtensor: state dict names under a prefix, gate and up apart (megatron-core's fsdp_dtensor_checkpoint.py)."""
    hf = make(tmp_path / "hf", name)
    weights = load_file(hf / "model.safetensors")
    config = json.loads((hf / "config.json").read_text())
    state: dict[str, torch.Tensor] = {"optimizer.state.module.x.exp_avg": torch.zeros(3)}
    for task in tasks(family_for(config).model(config), 16):
        native = pack(task, [weights[spec.name] for spec in task.hf])
        for e, part in enumerate(native if task.experts else [native]):
            key = "model.module." + task.native
            if task.experts and experts:
                key = key.replace(".experts.experts.", f".experts.local_experts.{e}.")
            elif task.experts:
                key = key.replace(".experts.experts.", ".experts.") + str(e)
            if ".linear_fc1." in key and "layer_norm" not in key:
                gate, up = part.chunk(2)
                state |= {f"{key}_w": gate.clone(), f"{key}_v": up.clone()}
            else:
                state[key] = part.clone()
    dcp.save(state, checkpoint_id=str(tmp_path / "m" / "iter_0000010"), no_dist=True)
    (tmp_path / "m" / "latest_checkpointed_iteration.txt").write_text("10")
    same(hf, convert(model=tmp_path / "m", to="hf", out=tmp_path / "back", hf_config=hf, weights_only=True))


def test_zarr_is_refused_by_name(tmp_path: Path) -> None:
    hf = make(tmp_path / "hf", "llama")
    saved = tmp_path / "m" / "iter_0000010"
    saved.mkdir(parents=True)
    (saved / "metadata.json").write_text('{"sharded_backend": "zarr", "sharded_backend_version": 1}')
    (tmp_path / "m" / "latest_checkpointed_iteration.txt").write_text("10")
    with pytest.raises(InputError, match="the backend is 'zarr'"):
        convert(model=tmp_path / "m", to="hf", out=tmp_path / "back", hf_config=hf)


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_workers_do_not_change_the_id(tmp_path: Path, workers: int) -> None:
    hf = make(tmp_path / "hf", "qwen3-moe")
    one = convert(model=hf, to="megatron", out=tmp_path / "one", workers=1)
    other = convert(model=hf, to="megatron", out=tmp_path / "other", workers=workers)
    assert manifest.read(one).id == manifest.read(other).id


@pytest.mark.parametrize("name", ["deepseek-v3", "gpt-oss", "llama"])
def test_a_cast_keeps_the_routers_bias(tmp_path: Path, name: str) -> None:
    hf = make(tmp_path / "hf", name, torch.float32)
    out = convert(model=hf, to="megatron", out=tmp_path / "m", dtype="bf16")
    back = load_file(convert(model=out, to="hf", out=tmp_path / "back") / "model.safetensors")
    for key, tensor in load_file(hf / "model.safetensors").items():
        wanted = tensor if key.endswith("e_score_correction_bias") else tensor.bfloat16()
        assert torch.equal(back[key], wanted), key


def test_layers_that_differ_are_not_stacked(tmp_path: Path) -> None:
    hf = make(tmp_path / "hf", "deepseek-v3")
    with pytest.raises(InputError, match="only layers that are all alike"):
        convert(model=hf, to="megatron", out=tmp_path / "m", form="stacked")
    with pytest.raises(InputError, match="no hybrid pattern"):
        convert(model=hf, to="megatron", out=tmp_path / "m", spec="hybrid")
