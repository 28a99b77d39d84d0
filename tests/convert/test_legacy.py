"""Legacy ``mp_rank_*`` files of every parallel layout and back, bit for bit; which stage and rank has what."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.convert.test_layouts import CONFIGS, MOE, MTP, SIZES, convert, make, same

from mst_convert.spec import ConvertSpec
from mst_core import manifest
from mst_core.errors import InputError, SettingsError
from mst_core.families import family_for

PARALLEL = [(tp, pp, vp, ep) for tp in (1, 2, 4) for pp, vp in ((1, 1), (2, 1), (2, 2)) for ep in (1, 2)]
EXPERTS = ("grouped", "sequential", "legacy-grouped")


@pytest.mark.parametrize("spec", ["te", "local"])
@pytest.mark.parametrize("name", CONFIGS)
def test_legacy_and_back(tmp_path: Path, name: str, spec: str) -> None:
    hf = make(tmp_path / "hf", name)
    # Megatron cuts no biases of experts, and GroupedMLP had none.
    etp, namings = (1, EXPERTS[:2]) if name == "gpt-oss" else (None, EXPERTS)
    cases = [case for case in PARALLEL if case[-1] == 1 or name in MOE]
    for number, (tp, pp, vp, ep) in enumerate([*cases, (1, 1, 1, 4 if name in MOE else 1)]):
        out = convert(
            model=hf, to="megatron-legacy", out=tmp_path / f"{number}", tp=tp, pp=pp, vp=vp, ep=ep, etp=etp, spec=spec,
            experts=namings[number % len(namings)], vocab_padding=8, verify="none",
        )  # fmt: skip
        assert len(list((out / "release").iterdir())) == (pp * max(tp, ep) if etp else tp * pp * ep)
        same(hf, convert(model=out, to="hf", out=tmp_path / f"{number}-back", verify="none"))
    again = convert(model=out, to="megatron", out=tmp_path / "dist", form="per-layer")
    same(hf, convert(model=again, to="hf", out=tmp_path / "last"))


STAGES: dict[str, tuple[dict[str, Any], list[list[int]]]] = {
    "first": ({"pp": 2, "first_stage_layers": 1}, [[1], [3]]),
    "last": ({"pp": 3, "last_stage_layers": 2}, [[1], [1], [2]]),
    "both": ({"pp": 3, "first_stage_layers": 2, "last_stage_layers": 1}, [[2], [1], [1]]),
    "virtual": (
        {"pp": 2, "vp": 2, "account_for_embedding": True, "account_for_loss": True, "layers": 6}, [[1, 2], [2, 1]],
    ),
    "first, virtual": ({"pp": 2, "vp": 2, "decoder_first_pipeline_num_layers": 2, "layers": 6}, [[1, 1], [2, 2]]),
    "embedding": ({"pp": 5, "account_for_embedding": True}, [[0], [1], [1], [1], [1]]),
    "loss": ({"pp": 5, "account_for_loss_in_pipeline_split": True}, [[1], [1], [1], [1], [0]]),
}  # fmt: skip
"""Settings, and the layers of each stage's virtual stages; test_convert_layouts.py holds them by megatron-core."""


@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("name", ["llama", "qwen3-moe", *MTP])
def test_uneven_stages_and_back(tmp_path: Path, name: str, stages: str) -> None:
    settings, dealt = STAGES[stages]
    settings = dict(settings)
    hf = make(tmp_path / "hf", name, layers=settings.pop("layers", 4))
    out = convert(model=hf, to="megatron-legacy", out=tmp_path / "m", vocab_padding=8, **settings)
    for number, counts in enumerate(dealt):
        file = torch.load(out / "release" / f"mp_rank_00_{number:03d}" / "model_optim_rng.pt", weights_only=False)
        models = [file["model"]] if len(counts) == 1 else [file[f"model{stage}"] for stage in range(len(counts))]
        found = [{key.split(".")[2] for key in model if key.startswith("decoder.layers.")} for model in models]
        assert found == [set(map(str, range(count))) for count in counts]
    same(hf, convert(model=out, to="hf", out=tmp_path / "back"))


def test_mtp_layers_are_on_the_last_stage_with_the_embedding_they_use(tmp_path: Path) -> None:
    hf = make(tmp_path / "hf", "deepseek-v3, mtp")
    out = convert(model=hf, to="megatron-legacy", out=tmp_path / "m", pp=2, vp=2, vocab_padding=8)
    files = [
        torch.load(out / f"release/mp_rank_00_00{stage}/model_optim_rng.pt", weights_only=False) for stage in (0, 1)
    ]
    has = {(pp, vp): files[pp][f"model{vp}"] for pp in (0, 1) for vp in (0, 1)}
    mtp = {at: sorted({key.split(".")[2] for key in model if key.startswith("mtp.")}) for at, model in has.items()}
    assert mtp == {(0, 0): [], (0, 1): [], (1, 0): [], (1, 1): ["0", "1"]}
    embedding = "embedding.word_embeddings.weight"
    assert {at for at, model in has.items() if embedding in model} == {(0, 0), (1, 1)}
    assert torch.equal(has[0, 0][embedding], has[1, 1][embedding])
    # TransformerEngine's modules have an extra state each, and a strict load misses none.
    extra = {
        key.removesuffix("._extra_state") for key in has[1, 1] if key.startswith("mtp.layers.0.") and "extra" in key
    }
    own = {"enorm", "hnorm", "eh_proj", "final_layernorm"}
    assert {name.removeprefix("mtp.layers.0.") for name in extra if "mtp_model_layer" not in name} == own
    assert "mtp.layers.0.mtp_model_layer.self_attention.core_attention" in extra


def edit_ranks(place: Path, edit: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Change the state dict of every rank, and take mst's manifest away."""
    for file in (place / "release").glob("*/*.pt"):
        whole = torch.load(file, weights_only=False)
        torch.save({**whole, "model": edit(whole["model"])}, file)
    (place / "mst.json").unlink()


def test_mtp_layers_under_their_older_name_are_read(tmp_path: Path) -> None:
    """megatron-core up to 0.16 calls the body of an MTP layer transformer_layer, in state dicts too."""
    hf = make(tmp_path / "hf", "deepseek-v3, mtp")
    out = convert(model=hf, to="megatron-legacy", out=tmp_path / "m", pp=2)
    edit_ranks(out, lambda model: {k.replace("mtp_model_layer", "transformer_layer"): v for k, v in model.items()})
    same(hf, convert(model=out, to="hf", out=tmp_path / "back"))


def test_a_copy_of_the_embedding_for_mtp_layers_that_differs_is_refused(tmp_path: Path) -> None:
    hf = make(tmp_path / "hf", "deepseek-v3, mtp")
    out = convert(model=hf, to="megatron-legacy", out=tmp_path / "m", pp=2)

    def spoil(model: dict[str, Any]) -> dict[str, Any]:
        if "mtp.layers.0.enorm.weight" in model:
            model["embedding.word_embeddings.weight"][3, 3] += 1
        return model

    edit_ranks(out, spoil)
    with pytest.raises(InputError, match=r"word_embeddings\.weight differs"):
        convert(model=out, to="hf", out=tmp_path / "back")


def test_a_model_that_ships_no_mtp_layers_has_none_in_legacy(tmp_path: Path) -> None:
    """config.json counts them where transformers saved the model without: names decide."""
    hf = make(tmp_path / "hf", "deepseek-v3")
    config = json.loads((hf / "config.json").read_text())
    (hf / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    out = convert(model=hf, to="megatron-legacy", out=tmp_path / "m", pp=2)
    again = convert(model=out, to="megatron", out=tmp_path / "dist")
    same(hf, convert(model=again, to="hf", out=tmp_path / "back"))


def test_a_tied_head_that_was_shipped_comes_back_from_expert_ranks_too(tmp_path: Path) -> None:
    hf = make(tmp_path / "hf", "glm4-moe, mtp, tied")
    state = load_file(hf / "model.safetensors")
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    save_file(state, hf / "model.safetensors", metadata={"format": "pt"})
    out = convert(model=hf, to="megatron-legacy", out=tmp_path / "m", tp=2, pp=2, ep=2)
    assert manifest.read(out).encoding["duplicates"] == ["lm_head.weight"]
    same(hf, convert(model=out, to="hf", out=tmp_path / "back"))


@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss"])
@pytest.mark.parametrize(("tp", "ep", "etp", "met"), [(2, 2, 1, 2), (4, 2, 2, 4), (4, 2, 1, 4), (2, 4, 1, 4)])
def test_experts_cut_less_than_the_rest(tmp_path: Path, name: str, tp: int, ep: int, etp: int, met: int) -> None:
    """Only tensor and expert ranks that meet have a file."""
    hf = make(tmp_path / "hf", name)
    settings: dict[str, Any] = {"model": hf, "to": "megatron-legacy", "out": tmp_path / "m", "tp": tp, "ep": ep}
    if name == "gpt-oss" and etp > 1:
        with pytest.raises(InputError, match="biases, which Megatron does not cut"):
            convert(**settings, etp=etp)
        return
    out = convert(**settings, etp=etp, pp=2)
    assert manifest.read(out).encoding["etp"] == etp
    assert len(list((out / "release").iterdir())) == 2 * met
    same(hf, convert(model=out, to="hf", out=tmp_path / "back"))


def test_a_vision_tower_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    config = {
        **SIZES,
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "rope_scaling": {"mrope_section": [1, 1, 2]},
    }
    model = family_for(config).model(config)
    (tmp_path / "hf").mkdir()
    state = {spec.name: torch.zeros(spec.shape) for spec in model.hf_tensors()} | {"visual.x.weight": torch.ones(3, 4)}
    save_file(state, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"1 tensors that no layer of Megatron has, like visual\.x"):
        convert(model=tmp_path / "hf", to="megatron-legacy", out=tmp_path / "m")


def test_megatrons_own_names_of_the_settings() -> None:
    words = {
        "tensor-model-parallel-size": 4, "pipeline-model-parallel-size": 2, "num-virtual-stages-per-pipeline-rank": 2,
        "expert-model-parallel-size": 2, "expert-tensor-parallel-size": 2, "decoder-first-pipeline-num-layers": 2,
        "decoder-last-pipeline-num-layers": 6,
    }  # fmt: skip
    given = ["--model", "m", "--to", "megatron-legacy", "--out", "o"]
    spec = ConvertSpec.parse([*given, *(word for name, n in words.items() for word in (f"--{name}", str(n)))])
    assert (spec.tp, spec.pp, spec.vp, spec.ep, spec.etp) == (4, 2, 2, 2, 2)
    assert (spec.first_stage_layers, spec.last_stage_layers) == (2, 6)
    both = ["--pp", "2", "--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"]
    spec = ConvertSpec.parse([*given, *both])
    assert spec.account_for_embedding
    assert spec.account_for_loss
    with pytest.raises(SettingsError, match="--first-stage-layers belongs to --to megatron-legacy"):
        ConvertSpec.parse(["--model", "m", "--to", "hf", "--out", "o", "--first-stage-layers", "1"])


def test_the_old_grouped_mlp_is_one_buffer_for_all_experts_of_a_rank(tmp_path: Path) -> None:
    """weight1 is viewed as (experts, in, gate and up), weight2 as (experts, in, out). Also seen, once: strict loads in
    megatron-core 0.16.1, the last that had it."""
    hf = make(tmp_path / "hf", "glm4-moe, mtp, tied")
    out = convert(
        model=hf, to="megatron-legacy", out=tmp_path / "m", tp=2, ep=2, spec="local", experts="legacy-grouped"
    )
    weights = load_file(hf / "model.safetensors")
    hidden, seen = SIZES["hidden_size"], 0
    for tp, ep in product((0, 1), (0, 1)):
        file = out / "release" / f"mp_rank_{tp:02d}_{ep:03d}" / "model_optim_rng.pt"
        assert zipfile.ZipFile(file).testzip() is None
        model = torch.load(file, weights_only=False)["model"]
        for layer, name in ((2, "decoder.layers.2"), (4, "mtp.layers.0.transformer_layer")):
            first, second = (model[f"{name}.mlp.experts.weight{number}"] for number in (1, 2))
            assert first.shape == (hidden, 2 * 12)
            assert second.shape == (2 * 6, hidden)
            for local in (0, 1):
                p = f"model.layers.{layer}.mlp.experts.{2 * ep + local}"
                gate, up = (weights[f"{p}.{side}_proj.weight"].chunk(2)[tp] for side in ("gate", "up"))
                assert torch.equal(first.view(2, hidden, -1)[local], torch.cat([gate, up]).T)
                assert torch.equal(
                    second.view(2, -1, hidden)[local], weights[f"{p}.down_proj.weight"].chunk(2, 1)[tp].T
                )
                seen += 1
    assert seen == 16


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("gpt-oss", {"tp": 2}, "biases, which Megatron does not cut"),
        ("gpt-oss", {"experts": "legacy-grouped"}, "biases, which GroupedMLP never had"),
        ("qwen3-moe", {"tp": 8, "etp": 8}, "--etp 8 does not divide its 12"),
        ("qwen3-moe", {"ep": 3}, "--ep 3 does not divide 4 experts"),
        ("llama", {"pp": 3}, "4 layers do not divide into --pp 3 times --vp 1"),
        ("llama", {"pp": 2, "vp": 4}, "4 layers do not divide into --pp 2 times --vp 4"),
        ("llama", {"pp": 2, "first_stage_layers": 4}, "--pp 2 times --vp 1, --first-stage-layers 4"),
        ("llama", {"pp": 2, "first_stage_layers": 5}, "--first-stage-layers 5"),
        ("llama", {"pp": 2, "first_stage_layers": 2, "last_stage_layers": 1}, "--last-stage-layers 1"),
        ("llama", {"pp": 2, "vp": 2, "first_stage_layers": 1}, "--vp 2, --first-stage-layers 1"),
        ("llama", {"pp": 2, "account_for_loss": True}, "--vp 1, --account-for-loss"),
    ],
)
def test_sizes_that_megatron_refuses(tmp_path: Path, name: str, settings: dict[str, Any], words: str) -> None:
    hf = make(tmp_path / "hf", name)
    with pytest.raises(InputError, match=words):
        convert(model=hf, to="megatron-legacy", out=tmp_path / "m", **settings)
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"vp": 2}, "need --pp of 2 or more"),
        ({"first_stage_layers": 1}, "need --pp of 2 or more"),
        ({"pp": 2, "first_stage_layers": 1, "account_for_loss": True}, "for stages of equal size"),
        ({"tp": 2, "etp": 4}, "--etp 4 does not divide --tp 2"),
        ({"tp": 4, "etp": 3}, "--etp 3 does not divide --tp 4"),
        ({"first_stage_layers": 0}, "greater than or equal to 1"),
    ],
)
def test_sizes_that_no_model_has_in_megatron(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ConvertSpec(model="m", to="megatron-legacy", out=Path("o"), **settings)
