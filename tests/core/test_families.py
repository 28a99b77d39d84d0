"""Families: rules, region maps, Megatron's settings."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mst_core import families
from mst_core.errors import InputError
from mst_core.families import FAMILIES, Region, family_for, pack, tasks, unpack
from mst_core.families.ops import check_regions, concat, qkv

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 130, "max_position_embeddings": 64,
}  # fmt: skip

DENSE = [
    family
    for family in FAMILIES
    if not any("{e}" in rule.native or rule.native.startswith("language_model.") for rule in family.rules)
]
"""The others have settings of their own: test_families_moe.py."""


def config(architecture: str = "LlamaForCausalLM", **more: Any) -> dict[str, Any]:
    return {**CONFIG, "architectures": [architecture], **more}


def model(architecture: str = "LlamaForCausalLM", **more: Any) -> families.Model:
    made = config(architecture, **more)
    return family_for(made).model(made)


def test_qkv_is_interleaved_by_group() -> None:
    """MAPPINGS.md 1.1, by hand: 4 heads, 2 groups, head size 1."""

    class Heads:
        heads, groups, head_dim = 4, 2, 1

    task_rows = [4, 2, 2]
    regions = qkv(Heads(), task_rows)
    q, k, v = torch.tensor([10, 11, 12, 13]), torch.tensor([20, 21]), torch.tensor([30, 31])
    native = families.pack_rows(regions, 8, [q, k, v])
    assert native.tolist() == [10, 11, 20, 30, 12, 13, 21, 31]
    assert [t.tolist() for t in families.unpack_rows(regions, native)] == [q.tolist(), k.tolist(), v.tolist()]
    assert check_regions(regions, task_rows, 8, "qkv") == 0


@pytest.mark.parametrize("family", DENSE, ids=lambda family: family.name)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("padding", [1, 64, 128])
def test_every_element_is_packed_once_and_comes_back(family: families.Family, tied: bool, padding: int) -> None:
    made = model(family.architecture, tie_word_embeddings=tied, head_dim=8)
    seen: list[str] = []
    for task in tasks(made, padding):
        count = 0
        sources = []
        for spec in task.hf:
            size = torch.Size(spec.shape).numel()
            sources.append(torch.arange(count + 1, count + size + 1).reshape(spec.shape))
            count += size
            seen.append(spec.name)
        native = pack(task, sources)
        assert native.shape == task.shape
        assert native.count_nonzero() == count
        assert native.unique().numel() == count + (1 if task.padding else 0)
        if task.padding:
            assert not native[-task.padding :].any()
        assert all(torch.equal(a, b) for a, b in zip(sources, unpack(task, native), strict=True))
        assert task.padding == 0 or task.shape[0] % padding == 0
    assert len(seen) == len(set(seen))
    assert ("output_layer.weight" in {task.native for task in tasks(made)}) is not tied


def test_the_same_map_serves_biases_and_lora_b() -> None:
    task = next(t for t in tasks(model()) if t.key.endswith("linear_qkv.weight"))
    b = [torch.randn(spec.shape[0], 3) for spec in task.hf]
    a = torch.randn(3, 32)
    assert torch.equal(pack(task, b) @ a, pack(task, [part @ a for part in b]))
    assert pack(task, [part[:, 0] for part in b]).shape == (task.shape[0],)


@pytest.mark.parametrize(
    "regions",
    [
        (Region(0, 0, 0, 2), Region(0, 1, 2, 1)),  # source row 1 twice
        (Region(0, 0, 0, 2),),  # source row 2 never
        (Region(0, 0, 0, 2), Region(0, 2, 1, 1)),  # native row 1 twice
        (Region(0, 0, 0, 3), Region(1, 0, 3, 1)),  # more rows than the tensor has
    ],
)
def test_a_wrong_map_is_refused(regions: tuple[Region, ...]) -> None:
    with pytest.raises(InputError):
        check_regions(regions, [3], 3, "test")


def test_concat_keeps_the_order() -> None:
    class Heads:
        heads = groups = head_dim = 1

    assert concat(Heads(), [2, 3]) == (Region(0, 0, 0, 2), Region(1, 0, 2, 3))


def test_native_names_are_those_of_torch_dist() -> None:
    task = next(t for t in tasks(model()) if t.native.endswith("layers.1.mlp.linear_fc1.layer_norm_weight"))
    assert (task.key, task.layer, task.layers) == ("decoder.layers.mlp.linear_fc1.layer_norm_weight", 1, 2)
    assert task.hf[0].name == "model.layers.1.post_attention_layernorm.weight"


def test_dims_follow_the_defaults_of_transformers() -> None:
    assert model(num_key_value_heads=None).dims.groups == 8
    assert model().dims.head_dim == 4
    assert model("Qwen3ForCausalLM").dims.head_dim == 128
    assert model("MistralForCausalLM", head_dim=16).dims.head_dim == 16
    assert "qkv_bias" in model("Qwen2ForCausalLM").facts
    assert model().parameters == 130 * 32 * 2 + 32 + 2 * (2 * 32 + 32 * 32 * 2 + 8 * 32 * 2 + 3 * 32 * 48)


@pytest.mark.parametrize(
    ("broken", "word"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"architectures": ["LlamaForTokenClassification"], "model_type": "llama"}, "LlamaForTokenClassification"),
        ({"architectures": ["LlamaForSequenceClassification"], "model_type": "llama"}, "classifier of 2 labels"),
        ({"architectures": None, "model_type": None}, "names no architecture"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"vocab_size": "130"}, "vocab_size"),
        ({"num_attention_heads": True}, "num_attention_heads"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"num_attention_heads": 5, "num_key_value_heads": 5}, "hidden_size"),
    ],
)
def test_a_config_that_cannot_be_read_is_refused(broken: dict[str, Any], word: str) -> None:
    made = {**CONFIG, **broken}
    with pytest.raises(InputError, match=word):
        family_for(made, "here").model(made, "here")


def test_model_type_serves_where_no_architecture_is_named() -> None:
    assert family_for({"model_type": "qwen3"}).name == "qwen3"


def groups(architecture: str = "LlamaForCausalLM", **more: Any) -> dict[str, dict[str, Any]]:
    made = config(architecture, **more)
    return family_for(made).megatron(made)


def test_megatron_settings() -> None:
    made = groups("Qwen3ForCausalLM", head_dim=16, tie_word_embeddings=True, rms_norm_eps=1e-5, rope_theta=5e5)
    assert made["transformer"]["kv_channels"] == 16
    assert made["transformer"]["num_query_groups"] == 2
    assert made["transformer"]["qk_layernorm"] is True
    assert made["transformer"]["layernorm_epsilon"] == 1e-5
    assert made["gpt"]["share_embeddings_and_output_weights"] is True
    assert made["gpt"]["rotary_base"] == 5e5
    assert made["rope"] == {}
    assert groups("Qwen2ForCausalLM")["transformer"]["add_qkv_bias"] is True


def test_windows() -> None:
    """Hugging Face counts the token itself, Megatron those before it."""
    assert groups("MistralForCausalLM", sliding_window=8)["transformer"]["window_size"] == (7, 0)
    assert groups("MistralForCausalLM")["transformer"]["window_size"] == (4095, 0)
    assert "window_size" not in groups("MistralForCausalLM", sliding_window=None)["transformer"]
    assert "window_size" not in groups("Qwen2ForCausalLM", sliding_window=8, use_sliding_window=False)["transformer"]
    mixed = groups("Qwen2ForCausalLM", sliding_window=8, use_sliding_window=True, max_window_layers=1)["transformer"]
    assert (mixed["window_size"], mixed["window_attn_skip_freq"]) == ((7, 0), [0, 1])


def test_rope_scaling_keeps_its_constants() -> None:
    standard = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    standard["original_max_position_embeddings"] = 8192
    made = groups(rope_theta=5e5, rope_scaling=standard)
    assert (made["gpt"]["rope_scaling"], made["gpt"]["rope_scaling_factor"], made["rope"]) == (True, 8.0, {})
    own = groups(rope_parameters={**standard, "low_freq_factor": 2.0, "rope_theta": 1e4})
    assert "rope_scaling" not in own["gpt"]
    assert own["rope"]["low_freq_factor"] == 2.0
    assert own["gpt"]["rotary_base"] == 1e4
    assert groups(rope_scaling={"type": "linear", "factor": 2.0})["gpt"]["seq_len_interpolation_factor"] == 2.0
    with pytest.raises(InputError, match="yarn"):
        groups(rope_scaling={"rope_type": "yarn", "factor": 4.0})
    with pytest.raises(InputError, match="gelu"):
        groups(hidden_act="gelu")
