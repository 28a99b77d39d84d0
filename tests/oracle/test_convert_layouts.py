"""Every layout that mst-convert writes and reads, against real megatron-core: one torchrun of four ranks serves all.

There: torch_dist (stacked, per layer, hybrid) and legacy ``mp_rank_*`` files load strictly into GPTModel and
HybridModel at several parallel sizes, bit for bit. Back: what those models save is Hugging Face's again, bit for bit.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mst_convert import plan as planning
from mst_convert import work as working
from mst_convert.spec import ConvertSpec
from mst_core.families import family_for
from tests.launch import torchrun

SIZES: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 50, "max_position_embeddings": 64,
}  # fmt: skip
ROWS = 64
"""Rows of the padded vocabulary, the same at every tensor parallel size."""
QWEN: dict[str, Any] = {"num_experts": 4, "moe_intermediate_size": 12, "num_experts_per_tok": 2}
QWEN2: dict[str, Any] = {**QWEN, "shared_expert_intermediate_size": 20}
ROUTED: dict[str, Any] = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
MLA: dict[str, Any] = {
    **ROUTED, "num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4, "v_head_dim": 8,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "llama-tied": {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"]},
    "mixtral": {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2-moe": {"architectures": ["Qwen2MoeForCausalLM"], **QWEN2},
    "qwen2-moe-mixed": {"architectures": ["Qwen2MoeForCausalLM"], **QWEN2, "decoder_sparse_step": 2},
    "qwen3-moe": {"architectures": ["Qwen3MoeForCausalLM"], **QWEN},
    "qwen3-moe-tied": {"architectures": ["Qwen3MoeForCausalLM"], **QWEN, "tie_word_embeddings": True},
    "deepseek-v3": {"architectures": ["DeepseekV3ForCausalLM"], **MLA},
    "deepseek-v3-mtp": {"architectures": ["DeepseekV3ForCausalLM"], **MLA, "num_nextn_predict_layers": 2},
    "glm4-moe-mtp": {
        "architectures": ["Glm4MoeForCausalLM"], **ROUTED, "num_hidden_layers": 3, "attention_bias": True,
        "use_qk_norm": True, "num_nextn_predict_layers": 1,
    },
    "glm4-moe-mtp-tied": {
        "architectures": ["Glm4MoeForCausalLM"], **ROUTED, "num_hidden_layers": 3, "num_nextn_predict_layers": 1,
        "tie_word_embeddings": True,
    },
    "llama-6": {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 6, "tie_word_embeddings": True},
    "gpt-oss": {"architectures": ["GptOssForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2},
}  # fmt: skip
LAYOUTS = {
    "tp1": (1, 1, 1, 1), "tp2": (2, 1, 1, 1), "tp2pp2": (2, 2, 1, 1), "pp2vp2": (1, 2, 2, 1), "ep2": (1, 1, 1, 2),
    "tp2ep2": (2, 1, 1, 2), "tp2ep2etp1": (2, 1, 1, 2), "pp2first1": (1, 2, 1, 1), "pp2last1": (1, 2, 1, 1),
    "pp2vp2first2": (1, 2, 2, 1), "pp4ends": (1, 4, 1, 1), "pp2vp2both": (1, 2, 2, 1), "tp2pp2loss": (2, 2, 1, 1),
    "pp4loss": (1, 4, 1, 1),
}  # fmt: skip
"""tp, pp, vp, ep; experts are cut by tp too, but at "etp1", where only two of the four tp and ep ranks meet."""
STAGES: dict[str, dict[str, int]] = {
    "pp2first1": {"first_stage_layers": 1}, "pp2last1": {"last_stage_layers": 1},
    "pp2vp2first2": {"first_stage_layers": 2}, "pp4ends": {"first_stage_layers": 1, "last_stage_layers": 1},
    "pp2vp2both": {"account_for_embedding": True, "account_for_loss": True}, "tp2pp2loss": {"account_for_loss": True},
    "pp4loss": {"account_for_loss": True},
}  # fmt: skip
FIELDS = {
    "first_stage_layers": "num_layers_in_first_pipeline_stage",
    "last_stage_layers": "num_layers_in_last_pipeline_stage",
    "account_for_embedding": "account_for_embedding_in_pipeline_split",
    "account_for_loss": "account_for_loss_in_pipeline_split",
}  # fmt: skip
"""What TransformerConfig calls the settings of uneven stages."""
LOADED: dict[str, tuple[str, ...]] = {
    "llama": ("tp1", "tp2", "pp2vp2"),
    "llama-tied": ("tp1", "tp2pp2", "pp2vp2"),
    "mixtral": ("tp1", "tp2pp2", "ep2"),
    "qwen2-moe": ("tp1", "tp2pp2", "ep2"),
    "qwen2-moe-mixed": ("tp2pp2", "ep2"),
    "qwen3-moe": ("tp1", "tp2pp2", "pp2vp2", "ep2", "tp2ep2", "tp2ep2etp1"),
    "deepseek-v3": ("tp1", "tp2", "pp2vp2", "ep2"),
    "deepseek-v3-mtp": ("tp1", "pp2vp2", "pp2first1", "ep2", "tp2ep2"),
    "glm4-moe-mtp": ("tp2pp2loss", "pp4loss", "tp2ep2etp1"),
    "glm4-moe-mtp-tied": ("tp2pp2loss",),
    "llama-6": ("pp2first1", "pp2last1", "pp2vp2first2", "pp4ends", "pp2vp2both"),
    "gpt-oss": ("tp1", "pp2vp2", "ep2", "tp2ep2etp1"),
}
DEALT = {
    ("llama-6", "pp2first1"): [[1], [5]],
    ("llama-6", "pp2last1"): [[5], [1]],
    ("llama-6", "pp2vp2first2"): [[1, 1], [2, 2]],
    ("llama-6", "pp4ends"): [[1], [2], [2], [1]],
    ("llama-6", "pp2vp2both"): [[1, 2], [2, 1]],
    ("glm4-moe-mtp", "tp2pp2loss"): [[2], [1]],
    ("glm4-moe-mtp", "pp4loss"): [[1], [1], [1], [0]],
}
"""The layers that megatron-core itself gives to the virtual stages of each stage."""
PER_LAYER_ONLY = ("deepseek-v3", "qwen2-moe-mixed", "deepseek-v3-mtp", "glm4-moe-mtp")
LEGACY_ONLY = ("glm4-moe-mtp-tied",)
"""``sharded_state_dict`` of a tied model with MTP layers and pipeline stages fails in megatron-core 0.19 itself: it
asserts that the last stage has no output layer, which the same model has built."""


def forms_of(name: str) -> tuple[str, ...]:
    """The torch_dist forms of a case."""
    if name in LEGACY_ONLY:
        return ()
    return ("per-layer",) if name in PER_LAYER_ONLY else ("stacked", "per-layer")


SAVED: dict[tuple[str, str], tuple[str, ...]] = {
    ("llama", "tp2"): ("legacy",),
    ("llama-tied", "tp2pp2"): ("legacy-uneven",),
    ("llama-tied", "pp2vp2"): ("legacy",),
    ("mixtral", "tp2pp2"): ("stacked",),
    ("qwen2-moe", "tp2pp2"): ("stacked", "legacy"),
    ("qwen2-moe", "ep2"): ("stacked",),
    ("qwen3-moe", "tp2pp2"): ("per-layer", "legacy-uneven"),
    ("qwen3-moe", "pp2vp2"): ("legacy",),
    ("qwen3-moe", "ep2"): ("legacy",),
    ("qwen3-moe", "tp2ep2"): ("stacked", "legacy"),
    ("deepseek-v3", "tp2"): ("per-layer", "legacy"),
    ("deepseek-v3", "ep2"): ("per-layer", "legacy"),
    ("deepseek-v3-mtp", "pp2first1"): ("per-layer", "legacy"),
    ("deepseek-v3-mtp", "pp2vp2"): ("legacy",),
    ("glm4-moe-mtp", "pp4loss"): ("legacy", "legacy-layout"),
    ("glm4-moe-mtp", "tp2pp2loss"): ("per-layer", "legacy"),
    ("glm4-moe-mtp-tied", "tp2pp2loss"): ("legacy",),
    ("llama-6", "pp2vp2both"): ("legacy",),
    ("llama-6", "pp4ends"): ("legacy",),
    ("gpt-oss", "ep2"): ("stacked", "legacy"),
    ("gpt-oss", "tp2ep2etp1"): ("stacked", "legacy"),
    ("qwen3-moe", "tp2ep2etp1"): ("legacy",),
}
HYBRIDS = {"qwen2": ("*-*-|*-*-", "tp2pp2"), "qwen3-moe": ("*E*E*E*E", "ep2"), "llama-tied": ("*-*-|*-*-", "tp2pp2")}


def make(directory: Path, name: str) -> Path:
    """A Hugging Face directory of random weights; test_families.py and test_families_moe.py hold its names."""
    config = {**SIZES, **CONFIGS[name]}
    directory.mkdir()
    generator = torch.Generator().manual_seed(len(name))
    specs = family_for(config).model(config).hf_tensors()
    state = {spec.name: torch.randn(spec.shape, generator=generator) for spec in specs}
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def convert(**settings: Any) -> Path:
    settings["model"] = str(settings["model"])
    spec = ConvertSpec(**settings)
    working.work(spec, planning.plan(spec))
    return spec.out


def case_of(where: Path, name: str) -> dict[str, Any]:
    hf = make(where / f"{name}-hf", name)
    case: dict[str, Any] = {"hf": str(hf), "vocab_rows": ROWS, "layouts": LOADED[name], "dist": {}, "legacy": {}}
    config = {**SIZES, **CONFIGS[name]}
    case["settings"] = family_for(config).megatron(config)
    if mtp := config.get("num_nextn_predict_layers"):
        case["settings"]["transformer"]["mtp_num_layers"] = mtp
    for form in forms_of(name):
        out = where / f"{name}-{form}"
        convert(model=hf, to="megatron", out=out, spec="local", form=form, vocab_padding=ROWS, verify="none")
        case["dist"][form] = str(out)
    for layout in LOADED[name]:
        tp, pp, vp, ep = LAYOUTS[layout]
        out = where / f"{name}-legacy-{layout}"
        convert(
            model=hf, to="megatron-legacy", out=out, spec="local", experts="sequential", tp=tp, pp=pp, vp=vp, ep=ep,
            etp=1 if layout.endswith("etp1") else None, vocab_padding=ROWS // 2 // tp, verify="none",
            **STAGES.get(layout, {}),
        )  # fmt: skip
        case["legacy"][layout] = str(out)
    case["save"] = {
        layout: {form: str(where / f"{name}-{layout}-{form}" / "iter_0000007") for form in forms}
        for (of, layout), forms in SAVED.items()
        if of == name
    }
    return case


def hybrid_of(where: Path, name: str) -> dict[str, Any]:
    hf = where / f"{name}-hf"
    if not hf.exists():
        make(hf, name)
    config = {**SIZES, **CONFIGS[name]}
    case = {"hf": str(hf), "vocab_rows": ROWS, "settings": family_for(config).megatron(config)}
    case["pattern"], case["layout"] = HYBRIDS[name]
    case["hybrid"] = str(
        convert(model=hf, to="megatron", out=where / f"{name}-h", spec="hybrid", vocab_padding=ROWS, verify="none")
    )
    case["stacked"] = str(convert(model=hf, to="megatron", out=where / f"{name}-te", vocab_padding=ROWS, verify="none"))
    case["save"] = str(where / f"{name}-hybrid-saved" / "iter_0000007")
    return case


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    where = tmp_path_factory.mktemp("layouts")
    plan: dict[str, Any] = {"cases": {name: case_of(where, name) for name in LOADED}}
    plan["hybrids"] = {name: hybrid_of(where, name) for name in HYBRIDS}
    keys = ("tp", "pp", "vp", "ep")
    plan["layouts"] = [
        {
            "name": name,
            **dict(zip(keys, sizes, strict=True)),
            "etp": 1 if name.endswith("etp1") else sizes[0],
            "fields": {FIELDS[key]: value for key, value in STAGES.get(name, {}).items()},
        }
        for name, sizes in LAYOUTS.items()
    ]
    plan["ranks"] = torchrun("tests.oracle.convert_layouts_ranks", plan, where)
    return plan


PAIRS = [(name, layout) for name, layouts in LOADED.items() for layout in layouts]


@pytest.mark.parametrize(("name", "layout"), [pair for pair in PAIRS if pair[0] not in LEGACY_ONLY])
def test_torch_dist_loads_at_default_strictness_bit_for_bit(ran: dict[str, Any], name: str, layout: str) -> None:
    for rank in ran["ranks"]:
        found = rank[f"{name} {layout}"]
        assert found["tensors"] > 6
        assert {form: found["wrong"][form] for form in forms_of(name)} == {form: [] for form in forms_of(name)}


@pytest.mark.parametrize(("name", "layout"), PAIRS)
def test_legacy_ranks_load_strictly_bit_for_bit(ran: dict[str, Any], name: str, layout: str) -> None:
    for rank in ran["ranks"]:
        assert rank[f"{name} {layout}"]["wrong"]["legacy"] == []
        assert rank[f"{name} {layout}"]["extra"] == []
    if dealt := DEALT.get((name, layout)):
        assert [each for each in dealt for _ in range(4 // len(dealt))] == [
            rank[f"{name} {layout}"]["layers"] for rank in ran["ranks"]
        ]


@pytest.mark.parametrize("name", ["qwen3-moe", "deepseek-v3"])
def test_transformer_engines_legacy_names_have_an_extra_state_for_every_module(tmp_path: Path, name: str) -> None:
    """Read in TransformerEngine, not run: linear layers, core attention, and norms that are modules of their own."""
    hf = make(tmp_path / "hf", name)
    out = convert(model=hf, to="megatron-legacy", out=tmp_path / "te", vocab_padding=ROWS, verify="none")
    model = torch.load(out / "release" / "mp_rank_00" / "model_optim_rng.pt", weights_only=False)["model"]
    found = {key.removeprefix("decoder.layers.1.").removesuffix("._extra_state") for key in model if "extra" in key}
    want = {"decoder.final_layernorm", "self_attention.core_attention", "self_attention.linear_proj"}
    want |= {"pre_mlp_layernorm", "mlp.experts.linear_fc1", "mlp.experts.linear_fc2"}
    if name == "qwen3-moe":
        want |= {"self_attention.linear_qkv", "self_attention.q_layernorm", "self_attention.k_layernorm"}
    else:
        want |= {"input_layernorm", "mlp.shared_experts.linear_fc1", "mlp.shared_experts.linear_fc2"}
        want |= {f"self_attention.linear_{kind}_{way}_proj" for kind in ("q", "kv") for way in ("up", "down")}
    assert {key for key in found if not key.startswith("decoder.layers.")} == want


SAVES = [(name, layout, form) for (name, layout), forms in SAVED.items() for form in forms]


@pytest.mark.parametrize(("name", "layout", "form"), SAVES)
def test_what_megatron_saved_comes_back_bit_for_bit(
    ran: dict[str, Any], name: str, layout: str, form: str, tmp_path: Path
) -> None:
    case = ran["cases"][name]
    saved = Path(case["save"][layout][form]).parent
    (saved / "latest_checkpointed_iteration.txt").write_text("7\n")
    if form == "legacy-layout":
        assert [rank[f"{name} {layout}"]["saved_layers"] for rank in ran["ranks"]] == [[1], [2], [0], [0]]
    if form == "legacy-uneven":
        assert sorted({rank[f"{name} {layout}"]["saved_layers"][0] for rank in ran["ranks"]}) == [1, 3]
    back = convert(model=saved, to="hf", out=tmp_path / "back", hf_config=Path(case["hf"]), weights_only=True)
    _equal(Path(case["hf"]), back)


@pytest.mark.parametrize("layout", ["ep2", "tp2ep2", "tp2ep2etp1"])
def test_the_removed_grouped_mlp_comes_back_bit_for_bit(ran: dict[str, Any], layout: str, tmp_path: Path) -> None:
    """weight1 is [H, experts * 2F], viewed as (experts, H, 2F); weight2 [experts * F, H] (MAPPINGS.md 1.7)."""
    case = ran["cases"]["qwen3-moe"]
    source = Path(case["save"][layout]["legacy"])
    for file in sorted(source.glob("mp_rank_*/*.pt")):
        whole = torch.load(file, weights_only=False)
        model, found = whole["model"], defaultdict(list)
        for key in list(model):
            if match := re.fullmatch(r"(.*\.experts)\.local_experts\.(\d+)\.linear_fc([12])\.weight", key):
                found[match[1], match[3]].append((int(match[2]), model.pop(key)))
            elif ".local_experts." in key:
                del model[key]
        for (prefix, number), each in found.items():
            stacked = torch.stack([tensor.T for _, tensor in sorted(each, key=lambda item: item[0])])
            hidden = SIZES["hidden_size"]
            shape = (hidden, -1) if number == "1" else (-1, hidden)
            model[f"{prefix}.weight{number}"] = stacked.contiguous().view(shape)
        to = tmp_path / "grouped" / "iter_0000007" / file.relative_to(source)
        to.parent.mkdir(parents=True)
        torch.save(whole, to)
    (tmp_path / "grouped" / "latest_checkpointed_iteration.txt").write_text("7\n")
    back = convert(
        model=tmp_path / "grouped", to="hf", out=tmp_path / "back", hf_config=Path(case["hf"]), weights_only=True
    )
    _equal(Path(case["hf"]), back)


@pytest.mark.parametrize("form", ["hybrid", "stacked"])
@pytest.mark.parametrize("name", HYBRIDS)
def test_hybrid_model_loads_hybrid_names_and_retargets_gpt_ones(ran: dict[str, Any], name: str, form: str) -> None:
    """``--spec hybrid`` as it is; the stacked te form through megatron-core's gpt_checkpoint_interop."""
    for rank in ran["ranks"]:
        assert rank[f"{name} hybrid"]["tensors"] > 10
        assert rank[f"{name} hybrid"]["wrong"][form] == []


@pytest.mark.parametrize("name", HYBRIDS)
def test_what_hybrid_model_saved_comes_back_bit_for_bit(ran: dict[str, Any], name: str, tmp_path: Path) -> None:
    case = ran["hybrids"][name]
    saved = Path(case["save"]).parent
    (saved / "latest_checkpointed_iteration.txt").write_text("7\n")
    _equal(
        Path(case["hf"]),
        convert(model=saved, to="hf", out=tmp_path / "back", hf_config=Path(case["hf"]), weights_only=True),
    )


def _equal(first: Path, second: Path) -> None:
    ours, theirs = (load_file(place / "model.safetensors") for place in (first, second))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype
        assert torch.equal(tensor, theirs[name]), name
