"""mst-convert: round trips, accounting, what it refuses."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mst_convert import plan as planning
from mst_convert import work as working
from mst_convert.spec import ConvertSpec
from mst_core import checkpoint, files, lineage, manifest, torch_dist
from mst_core.errors import InputError, SettingsError

FAMILIES = ["llama", "qwen2", "qwen3", "mistral"]
TinyHF = Callable[..., Path]


def convert(**settings: Any) -> Path:
    spec = ConvertSpec(**{key: str(value) if key == "model" else value for key, value in settings.items()})
    working.work(spec, planning.plan(spec))
    return spec.out


def weights(directory: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        found |= load_file(file)
    return found


def assert_equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype, name
        assert torch.equal(tensor, second[name]), name


@pytest.fixture
def source(tiny_hf: TinyHF, tmp_path: Path) -> Path:
    """An HF directory that a test may damage."""
    return Path(shutil.copytree(tiny_hf("llama"), tmp_path / "source"))


def edit(directory: Path, change: Callable[[dict[str, torch.Tensor]], object], file: str = "model.safetensors") -> None:
    tensors = load_file(directory / file)
    change(tensors)
    save_file(tensors, directory / file, metadata={"format": "pt"})


def edit_config(directory: Path, **changes: Any) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **changes}))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_round_trip(tiny_hf: TinyHF, tmp_path: Path, family: str, dtype: str) -> None:
    hf = tiny_hf(family, dtype=dtype)
    megatron = convert(model=hf, to="megatron", out=tmp_path / "m")
    back = convert(model=megatron, to="hf", out=tmp_path / "b", max_shard_size=200_000)
    assert_equal(weights(hf), weights(back))
    assert (back / "model.safetensors.index.json").is_file()
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (megatron / "hf" / name).read_bytes() == (hf / name).read_bytes() == (back / name).read_bytes()
    again = convert(model=back, to="megatron", out=tmp_path / "m2")
    for path in sorted((megatron / "release").iterdir()):
        assert path.read_bytes() == (again / "release" / path.name).read_bytes(), path.name
    assert checkpoint.verify(megatron) == checkpoint.verify(back) == checkpoint.verify(again) == []


@pytest.mark.parametrize(("padding", "rows"), [(1, 130), (64, 192), (128, 256)])
@pytest.mark.parametrize("tied", [True, False])
def test_the_vocabulary_is_padded_with_zeros_and_cut_again(
    tiny_hf: TinyHF, tmp_path: Path, padding: int, rows: int, tied: bool
) -> None:
    """Megatron-Bridge #1853, Pai #149: from config.json, not from the tokenizer."""
    hf = tiny_hf("llama", vocab_size=130, tie_word_embeddings=tied)
    megatron = convert(model=hf, to="megatron", out=tmp_path / "m", vocab_padding=padding)
    stored = torch_dist.metadata(megatron)
    assert ("output_layer.weight" in stored) is not tied
    embedding = torch_dist.read(stored["embedding.word_embeddings.weight"])
    assert embedding.shape[0] == rows
    assert not embedding[130:].any()
    assert manifest.read(megatron).encoding["vocab_rows"] == rows
    assert_equal(weights(hf), weights(convert(model=megatron, to="hf", out=tmp_path / "b")))


def test_the_lineage_says_lossless(tiny_hf: TinyHF, tmp_path: Path) -> None:
    hf = tiny_hf("qwen3")
    megatron = convert(model=hf, to="megatron", out=tmp_path / "m")
    back = convert(model=megatron, to="hf", out=tmp_path / "b")
    parent = manifest.read(megatron).parent("source")
    assert parent is not None
    assert (parent.id, parent.lossless) == (manifest.identify(hf).id, True)
    chain = [identity for _, _, _, identity in lineage.walk(back)]
    assert chain == [manifest.read(back).id, manifest.read(megatron).id, manifest.identify(hf).id]
    made = manifest.read(megatron).model
    assert made is not None
    assert (made.family, made.dtype, made.tied) == ("qwen3", "float32", False)
    assert made.parameters == sum(tensor.numel() for tensor in weights(hf).values())


def test_the_same_command_gives_the_same_id(tiny_hf: TinyHF, tmp_path: Path) -> None:
    hf = tiny_hf("qwen2")
    megatron = [convert(model=hf, to="megatron", out=tmp_path / name) for name in ("one", "two")]
    assert manifest.read(megatron[0]).id == manifest.read(megatron[1]).id
    back = [convert(model=m, to="hf", out=tmp_path / f"{m.name}-back") for m in megatron]
    assert manifest.read(back[0]).id == manifest.read(back[1]).id


def test_a_cast_is_one_rounding_and_not_lossless(tiny_hf: TinyHF, tmp_path: Path) -> None:
    hf = tiny_hf("llama")
    megatron = convert(model=hf, to="megatron", out=tmp_path / "m", dtype="bf16")
    parent = manifest.read(megatron).parent("source")
    assert parent is not None
    assert not parent.lossless
    back = convert(model=megatron, to="hf", out=tmp_path / "b")
    assert_equal({name: tensor.bfloat16() for name, tensor in weights(hf).items()}, weights(back))
    assert json.loads((back / "config.json").read_text())["dtype"] == "bfloat16"
    assert torch_dist.common_state(megatron)["args"].state["num_layers"] == 4


def test_tied_and_still_shipping_lm_head(tiny_hf: TinyHF, tmp_path: Path) -> None:
    hf = Path(shutil.copytree(tiny_hf("llama", tie_word_embeddings=True), tmp_path / "hf"))
    edit(hf, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    megatron = convert(model=hf, to="megatron", out=tmp_path / "m")
    assert "output_layer.weight" not in torch_dist.metadata(megatron)
    assert_equal(weights(hf), weights(convert(model=megatron, to="hf", out=tmp_path / "b")))
    edit(hf, lambda t: t["lm_head.weight"][3].add_(1))
    with pytest.raises(InputError, match="differs") as raised:
        convert(model=hf, to="megatron", out=tmp_path / "refused")
    assert "tie_word_embeddings" in (raised.value.hint or "")
    assert not (tmp_path / "refused").exists()


def test_computed_buffers_of_old_checkpoints_are_accounted_for(source: Path, tmp_path: Path) -> None:
    plain = weights(source)
    edit(
        source, lambda t: t.update({f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(8) for i in range(4)})
    )
    planned = planning.plan(ConvertSpec(model=str(source), to="megatron", out=tmp_path / "m"))
    assert any("4 computed buffers" in line for line in planned.left_out)
    back = convert(model=convert(model=source, to="megatron", out=tmp_path / "m"), to="hf", out=tmp_path / "b")
    assert_equal(plain, weights(back))
    edit(source, lambda t: t.update({"model.layers.4.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    with pytest.raises(InputError, match=r"layers\.4\.self_attn\.rotary_emb"):
        planning.plan(ConvertSpec(model=str(source), to="megatron", out=tmp_path / "x"))


def test_a_mixed_dtype_is_kept_where_torch_dist_can(source: Path, tmp_path: Path) -> None:
    def halve(tensors: dict[str, torch.Tensor]) -> None:
        for name in tensors:
            if "norm" not in name:
                tensors[name] = tensors[name].half()

    edit(source, halve)
    megatron = convert(model=source, to="megatron", out=tmp_path / "m")
    assert_equal(weights(source), weights(convert(model=megatron, to="hf", out=tmp_path / "b")))
    edit(source, lambda t: t.update({k: t[k].float() for k in ["model.layers.1.self_attn.k_proj.weight"]}))
    with pytest.raises(InputError, match="several dtypes") as raised:
        convert(model=source, to="megatron", out=tmp_path / "x")
    assert "--dtype" in (raised.value.hint or "") + str(raised.value)


def test_a_megatron_directory_without_hf_needs_a_config(tiny_hf: TinyHF, tmp_path: Path) -> None:
    """Also: training state is left aside, and a directory that mst did not write is named by its hashes."""
    import torch.distributed.checkpoint as dcp

    hf = tiny_hf("llama")
    megatron = convert(model=hf, to="megatron", out=tmp_path / "m")
    stored = torch_dist.metadata(megatron)
    foreign = tmp_path / "foreign" / "iter_0000003"
    foreign.mkdir(parents=True)
    state = {key: torch_dist.read(tensor) for key, tensor in stored.items()}
    state["optimizer.state.exp_avg.output_layer.weight"] = torch.zeros(3)
    dcp.save(state, checkpoint_id=str(foreign), no_dist=True)
    (tmp_path / "foreign" / "latest_checkpointed_iteration.txt").write_text("3")
    with pytest.raises(InputError, match=r"hf/config\.json") as raised:
        planning.plan(ConvertSpec(model=str(tmp_path / "foreign"), to="hf", out=tmp_path / "x"))
    assert "--hf-config" in (raised.value.hint or "")
    with pytest.raises(InputError, match="optimizer state") as raised:
        convert(model=tmp_path / "foreign", to="hf", out=tmp_path / "b", hf_config=hf)
    assert "--weights-only" in (raised.value.hint or "")
    back = convert(model=tmp_path / "foreign", to="hf", out=tmp_path / "b", hf_config=hf, weights_only=True)
    assert_equal(weights(hf), weights(back))
    assert manifest.read(back).parents[0].id.startswith("blake3:")
    assert checkpoint.verify(back) == []


def shard(directory: Path) -> None:
    """Cut model.safetensors into two shards and an index."""
    tensors = weights(directory)
    (directory / "model.safetensors").unlink()
    names, index = sorted(tensors), {}
    for number, part in enumerate((names[:20], names[20:])):
        file = f"model-0000{number + 1}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, directory / file)
        index.update(dict.fromkeys(part, file))
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def second(directory: Path) -> Path:
    shard(directory)
    return directory / "model-00002-of-00002.safetensors"


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "not a model": (lambda d: [path.unlink() for path in d.iterdir()], "neither a Hugging Face nor"),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), "neither model.safetensors"),
    "no config": (lambda d: (d / "config.json").unlink(), "neither a Hugging Face nor"),
    "broken config": (lambda d: (d / "config.json").write_text("{"), "JSON"),
    "missing shard": (lambda d: second(d).unlink(), "missing"),
    "truncated shard": (lambda d: os.truncate(second(d), 5000), "truncated"),
    "shards without index": (
        lambda d: (second(d), (d / "model.safetensors.index.json").unlink()),
        "no model.safetensors",
    ),
    "pickles": (lambda d: (d / "model.safetensors").rename(d / "pytorch_model.bin"), "damaged"),
    "empty": (lambda d: edit(d, lambda t: t.clear()), "missing"),
    "missing tensor": (lambda d: edit(d, lambda t: t.pop("model.norm.weight")), "model.norm.weight: missing"),
    "wrong shape": (
        lambda d: edit(d, lambda t: t.update({"model.layers.2.mlp.up_proj.weight": torch.zeros(96, 65)})),
        r"layers.2.mlp.up_proj.weight: \[96, 65\], expected \[96, 64\]",
    ),
    "unknown tensor": (lambda d: edit(d, lambda t: t.update({"mtp.weight": torch.zeros(3)})), "mtp.weight: not known"),
    "too many layers": (lambda d: edit_config(d, num_hidden_layers=3), "model.layers.3.input_layernorm.weight: not"),
    "integers": (
        lambda d: edit(d, lambda t: t.update({"model.norm.weight": torch.zeros(64, dtype=torch.int8)})),
        "I8",
    ),
    "unknown architecture": (lambda d: edit_config(d, architectures=["MambaForCausalLM"]), "MambaForCausalLM"),
    "other family": (lambda d: edit_config(d, architectures=["Qwen2ForCausalLM"]), "q_proj.bias: missing"),
    "quantised": (lambda d: edit_config(d, quantization_config={"quant_method": "gptq"}), "gptq"),
    "attention bias": (lambda d: edit_config(d, attention_bias=True), "q_proj.bias: missing"),
    "untied without head": (lambda d: edit(d, lambda t: t.pop("lm_head.weight")), "lm_head.weight: missing"),
    "an adapter": (lambda d: (d / "adapter_config.json").write_text("{}"), "LoRA adapter"),
}


@pytest.mark.parametrize("fault", BAD)
def test_bad_hf_input_is_refused_by_the_plan(source: Path, tmp_path: Path, fault: str) -> None:
    damage, word = BAD[fault]
    damage(source)
    with pytest.raises(InputError, match=word):
        planning.plan(ConvertSpec(model=str(source), to="megatron", out=tmp_path / "out"))


def test_all_faults_are_listed(source: Path, tmp_path: Path) -> None:
    edit(source, lambda t: (t.pop("model.norm.weight"), t.update({"x": torch.zeros(1), "y": torch.zeros(1)})))
    with pytest.raises(InputError) as raised:
        planning.plan(ConvertSpec(model=str(source), to="megatron", out=tmp_path / "out"))
    for name in ("model.norm.weight: missing", "x: not known", "y: not known"):
        assert name in str(raised.value)


def _as_kind(directory: Path, kind: Any) -> bytes:
    return manifest.Manifest.model_validate({**manifest.read(directory).model_dump(), "kind": kind}).dump()


BAD_MEGATRON: dict[str, tuple[Callable[[Path], object], str]] = {
    "tracker": (lambda d: (d / "latest_checkpointed_iteration.txt").unlink(), "neither a Hugging Face nor"),
    "no release": (lambda d: shutil.rmtree(d / "release"), "does not exist"),
    "truncated": (lambda d: os.truncate(d / "release" / "__0_0.distcp", 9999), "truncated"),
    "legacy": (lambda d: (shutil.rmtree(d / "release"), (d / "release" / "mp_rank_00").mkdir(parents=True)), "missing"),
    "another kind": (lambda d: (d / "mst.json").write_bytes(_as_kind(d, "report")), "of the kind report"),
    "edited manifest": (lambda d: (d / "mst.json").write_text((d / "mst.json").read_text().replace("te", "et")), "mst"),
    "fewer layers": (lambda d: edit_config(d / "hf", num_hidden_layers=2), "expected"),
    "other width": (lambda d: edit_config(d / "hf", intermediate_size=100), "linear_fc1.weight"),
    "tied": (lambda d: edit_config(d / "hf", tie_word_embeddings=True), "output_layer.weight: not known .*tied"),
    "bigger vocabulary": (lambda d: edit_config(d / "hf", vocab_size=385), "word_embeddings"),
    "other family": (lambda d: edit_config(d / "hf", architectures=["Qwen3ForCausalLM"], head_dim=16), "q_layernorm"),
}


@pytest.mark.parametrize("fault", BAD_MEGATRON)
def test_bad_megatron_input_is_refused_by_the_plan(tiny_hf: TinyHF, tmp_path: Path, fault: str) -> None:
    megatron = convert(model=tiny_hf("llama"), to="megatron", out=tmp_path / "m")
    damage, word = BAD_MEGATRON[fault]
    damage(megatron)
    with pytest.raises(InputError, match=word):
        planning.plan(ConvertSpec(model=str(megatron), to="hf", out=tmp_path / "out"))


def test_places_that_cannot_be(tiny_hf: TinyHF, tmp_path: Path) -> None:
    hf = tiny_hf("llama")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"model": hf, "to": "hf", "out": tmp_path / "x"}, "already"),
        ({"model": hf, "to": "megatron", "out": hf}, "itself"),
        ({"model": hf, "to": "megatron", "out": tmp_path}, "exists"),
        ({"model": hf / "config.json", "to": "megatron", "out": tmp_path / "x"}, "is a file"),
        ({"model": tmp_path / "nowhere", "to": "megatron", "out": tmp_path / "x"}, "no such"),
    ]
    for settings, word in cases:
        with pytest.raises(InputError, match=word):
            planning.plan(ConvertSpec(**{**settings, "model": str(settings["model"])}))
    megatron = convert(model=hf, to="megatron", out=tmp_path / "m")
    before = manifest.read(megatron).id
    assert convert(model=hf, to="megatron", out=megatron, overwrite=True, vocab_padding=64) == megatron
    assert manifest.read(megatron).id != before
    assert checkpoint.verify(megatron) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--to", "hf", "--vocab-padding", "64"], "--vocab-padding"),
        (["--to", "megatron-legacy", "--max-shard-size", "1GB"], "--max-shard-size"),
        (["--to", "hf", "--tp", "2"], "--tp"),
        (["--to", "megatron", "--experts", "sequential"], "--experts"),
        (["--to", "megatron-legacy", "--spec", "hybrid"], "--spec hybrid"),
        (["--to", "hf", "--max-shard-size", "many"], "max-shard-size"),
        (["--to", "megatron", "--vocab-padding", "0"], "vocab-padding"),
        (["--to", "zarr"], "--to"),
        (["--to", "hf", "--vocab-pading", "64"], "did you mean --vocab-padding"),
    ],
)
def test_wrong_settings(words: list[str], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        ConvertSpec.parse(["--model", "m", "--out", "o", *words])


def test_shard_sizes_have_units() -> None:
    """ms-swift: 500MB was refused."""
    for text, size in (("500MB", 500_000_000), ("5GB", 5_000_000_000), ("1GiB", 2**30), ("4096", 4096)):
        assert (
            ConvertSpec.parse(["--model", "m", "--out", "o", "--to", "hf", "--max-shard-size", text]).max_shard_size
            == size
        )


def test_a_disk_that_is_too_small(tiny_hf: TinyHF, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10, 10, 1000))
    with pytest.raises(InputError, match="free"):
        planning.plan(ConvertSpec(model=str(tiny_hf("llama")), to="megatron", out=tmp_path / "m"))


@pytest.mark.parametrize("to", ["megatron", "hf"])
def test_a_disk_that_fills_up_leaves_nothing(tiny_hf: TinyHF, tmp_path: Path, to: str) -> None:
    model = tiny_hf("llama")
    if to == "hf":
        model = convert(model=model, to="megatron", out=tmp_path / "m")
    before = files.listing(tmp_path)
    done = subprocess.run(
        [Path(sys.executable).parent / "mst-convert", "--model", model, "--to", to, "--out", tmp_path / "out"],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 3, done.stderr
    assert "disk is full" in done.stderr
    assert files.listing(tmp_path) == before


def test_a_kill_leaves_all_or_nothing(tiny_hf: TinyHF, tmp_path: Path) -> None:
    chosen = random.Random(0)
    out, staged = tmp_path / "out", tmp_path / "out.partial"
    command = [str(Path(sys.executable).parent / "mst-convert"), "--model", str(tiny_hf("llama", hidden_size=256))]
    for _ in range(5):
        process = subprocess.Popen([*command, "--to", "megatron", "--out", str(out)], stderr=subprocess.DEVNULL)
        while process.poll() is None and not staged.exists():
            time.sleep(0.001)
        time.sleep(chosen.random() * 0.1)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not out.exists() or checkpoint.verify(out) == []
        with pytest.raises(InputError):
            planning.plan(ConvertSpec(model=str(staged), to="hf", out=tmp_path / "x"))
        if out.exists():
            shutil.rmtree(out)
    convert(model=command[2], to="megatron", out=out)
    assert checkpoint.verify(out) == []
    assert not staged.exists()


def test_the_command(tiny_hf: TinyHF, tmp_path: Path, mst: Callable[..., Any]) -> None:
    hf = tiny_hf("llama")
    dry = mst("mst-convert", "--model", hf, "--to", "megatron", "--out", tmp_path / "m", "--dry-run", "--json")
    told = json.loads(dry.stdout)
    assert (told["tensors_in"], told["tensors_out"], told["lossless"]) == (39, 9, True)
    assert not (tmp_path / "m").exists()
    done = mst("mst-convert", "--model", hf, "--to", "megatron", "--out", tmp_path / "m")
    assert done.stdout == f"{tmp_path / 'm'}\n"
    assert "39 source tensors used once" in done.stderr
    back = mst("mst-convert", "--model", tmp_path / "m", "--to", "hf", "--out", tmp_path / "b", "--json")
    assert json.loads(back.stdout)["id"] == manifest.read(tmp_path / "b").id
    refused = mst("mst-convert", "--model", hf, "--to", "megatron", "--out", tmp_path / "m", code=3)
    assert "exists" in refused.stderr
    assert "--overwrite" in refused.stderr


def test_a_dry_run_loads_nothing_heavy(tiny_hf: TinyHF, tmp_path: Path) -> None:
    megatron = convert(model=tiny_hf("llama"), to="megatron", out=tmp_path / "m")
    script = (
        "import sys; from mst_convert.spec import ConvertSpec; from mst_convert.plan import plan\n"
        f"for model, to in (({str(tiny_hf('llama'))!r}, 'megatron'), ({str(megatron)!r}, 'hf')):\n"
        f"    plan(ConvertSpec(model=model, to=to, out={str(tmp_path / 'x')!r})).rows()\n"
        "heavy = {'torch', 'numpy', 'transformers', 'safetensors'} & sys.modules.keys()\n"
        "sys.exit(repr(heavy) if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
