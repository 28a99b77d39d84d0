"""What mst-merge refuses: each by name, all of one kind in one error, and nothing is left behind."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mst_convert.merge import plan as planning
from mst_convert.merge import targets
from mst_convert.merge import work as working
from mst_convert.merge.spec import MergeSpec
from mst_core import files
from mst_core.errors import InputError, SettingsError

TinyHF = Callable[..., Path]
Factors = dict[str, torch.Tensor]
PREFIX = "base_model.model."
FIRST = f"{PREFIX}model.layers.0.self_attn.q_proj."
LAST = f"{PREFIX}model.layers.3.self_attn.q_proj."


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """Rank 2 on the q_proj (64 to 64) of all four layers."""
    out = tmp_path / "lora"
    out.mkdir()
    factors: Factors = {}
    for layer in range(4):
        stem = f"{PREFIX}model.layers.{layer}.self_attn.q_proj."
        factors |= {f"{stem}lora_A.weight": torch.ones(2, 64) * 0.1, f"{stem}lora_B.weight": torch.ones(64, 2) * 0.1}
    save_file(factors, out / "adapter_model.safetensors")
    configure(out, peft_type="LORA", r=2, lora_alpha=4, target_modules=["q_proj"])
    return out


def configure(adapter: Path, **changes: Any) -> None:
    path = adapter / "adapter_config.json"
    config = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**config, **changes}))


def edit(adapter: Path, change: Callable[[Factors], object]) -> None:
    factors = load_file(adapter / "adapter_model.safetensors")
    change(factors)
    save_file(factors, adapter / "adapter_model.safetensors")


def add(name: str, *shape: int) -> Callable[[Path], None]:
    return lambda adapter: edit(adapter, lambda f: f.update({name: torch.ones(shape)}))


def rename(old: str, new: str) -> Callable[[Path], None]:
    def change(factors: Factors) -> None:
        for name in list(factors):
            factors[name.replace(old, new)] = factors.pop(name)

    return lambda adapter: edit(adapter, change)


def drop(name: str) -> Callable[[Path], None]:
    return lambda adapter: edit(adapter, lambda f: f.pop(name))


def config(**changes: Any) -> Callable[[Path], None]:
    return lambda adapter: configure(adapter, **changes)


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda a: (a / "adapter_config.json").unlink(), r"no adapter_config\.json"),
    "a whole model": (
        lambda a: ((a / "adapter_config.json").unlink(), (a / "config.json").write_text("{}")),
        "but a whole model",
    ),
    "broken config": (lambda a: (a / "adapter_config.json").write_text("{"), "JSON"),
    "config of another form": (lambda a: (a / "adapter_config.json").write_text("[]"), "not a JSON object"),
    "no weights": (lambda a: (a / "adapter_model.safetensors").unlink(), r"no adapter_model\.safetensors"),
    "pickle": (lambda a: (a / "adapter_model.safetensors").rename(a / "adapter_model.bin"), "pickle"),
    "truncated": (lambda a: os.truncate(a / "adapter_model.safetensors", 1500), "truncated"),
    "empty": (lambda a: edit(a, lambda f: f.clear()), "no tensors"),
    # the config
    "IA3": (config(peft_type="IA3"), "peft_type is 'IA3'"),
    "no type": (config(peft_type=None), "peft_type is None"),
    "DoRA without magnitudes": (config(use_dora=True), "use_dora is True, but there is no lora_magnitude_vector"),
    "DoRA with a bias of B": (config(use_dora=True, lora_bias=True), "use_dora and lora_bias"),
    "a module that was not saved": (
        config(modules_to_save=["lm_head"]), r"lm_head\.weight: modules_to_save names it, but the adapter",
    ),
    "a module that is not there": (config(modules_to_save=["score"]), "score: modules_to_save names it, but the"),
    "bias of another kind": (config(bias="some"), "bias is 'some'"),
    "lora_bias without biases": (config(lora_bias=True), "lora_bias is True, but there is no bias of B"),
    "tokens twice": (config(trainable_token_indices=[1, 1]), "names a token twice"),
    "tokens of another form": (config(trainable_token_indices={"embed_tokens": [-1]}), r"indices has \[-1"),
    "modules to save of another form": (config(modules_to_save="lm_head"), "must be a list of names"),
    "parameters of another form": (config(target_parameters="x"), "must be a list of names"),
    "KaSA": (config(kasa_config={"beta": 1}), "kasa_config: KaSA truncates"),
    "MonteCLoRA": (config(monteclora_config={"a": 1}), "monteclora_config"),
    "aLoRA": (config(alora_invocation_tokens=[1]), "alora_invocation_tokens"),
    "QALoRA": (config(use_qalora=True), "use_qalora"),
    "BD-LoRA": (config(use_bdlora={"nblocks": 2}), "use_bdlora"),
    "Arrow": (config(arrow_config={"top_k": 2}), "arrow_config"),
    "Megatron": (config(megatron_config={"a": 1}), "megatron_config"),
    "layer replication": (config(layer_replication=[[0, 4], [2, 4]]), "layer_replication"),
    "PiSSA": (config(init_lora_weights="pissa_niter_4"), "init_lora_weights is 'pissa_niter_4'"),
    "a number as init": (config(init_lora_weights=1), "init_lora_weights is 1"),
    "a field of the future": (config(use_magic={"strength": 3}), "use_magic: not known"),
    "no rank": (config(r=None), "r is None"),
    "rank 0": (config(r=0), "r is 0"),
    "alpha of words": (config(lora_alpha="16"), "lora_alpha is '16'"),
    "alpha NaN": (config(lora_alpha=float("nan")), "lora_alpha is nan"),
    "rank pattern": (config(rank_pattern={"q_proj": 2.5}), r"rank_pattern\['q_proj'\] is 2.5"),
    "alpha pattern": (config(alpha_pattern={"(": 2}), "not a regular expression"),
    "pattern of another form": (config(alpha_pattern=[1]), "not a mapping"),
    "targets of another form": (config(target_modules=3), "target_modules is 3"),
    "targets that are no expression": (config(target_modules="(q_proj"), "not a regular expression"),
    "layers of another form": (config(layers_to_transform=["1"]), "layers_to_transform"),
    # the tensors
    "half": (drop(f"{FIRST}lora_A.weight"), r"layers\.0\.self_attn\.q_proj\.lora_B\.weight: there is no lora_A"),
    "other half": (drop(f"{FIRST}lora_B.weight"), r"lora_A\.weight: there is no lora_B"),
    "rank differs": (config(r=4), r"shape \[2, 64\], but adapter_config\.json says rank 4"),
    "rank differs in a pattern": (config(rank_pattern={r"layers\.1\..*": 4}), r"layers\.1\..*says rank 4"),
    "three dimensions": (
        lambda a: edit(a, lambda f: f.update({f"{FIRST}lora_A.weight": torch.ones(2, 8, 8)})),
        r"shape \[2, 8, 8\]",
    ),
    "integers": (
        lambda a: edit(a, lambda f: f.update({f"{FIRST}lora_A.weight": torch.ones(2, 64, dtype=torch.int8)})),
        "dtype I8",
    ),
    "adapter name": (rename("lora_A.weight", "lora_A.default.weight"), "carries an adapter's name"),
    "no prefix": (rename(PREFIX, ""), r"not under base_model\.model\."),
    "magnitude": (add(f"{FIRST}lora_magnitude_vector", 64), "use_dora is False, but there is a lora_magnitude_vector"),
    "bias of B": (add(f"{FIRST}lora_B.bias", 64), "lora_bias is False, but there is a bias of B"),
    "embedding": (add(f"{PREFIX}model.embed_tokens.lora_embedding_A", 2, 330), "there is no lora_B"),
    "a norm that nobody saved": (add(f"{PREFIX}model.norm.weight", 64), "neither of LoRA nor in modules_to_save"),
    "resized embedding": (
        add(f"{PREFIX}model.embed_tokens.weight", 331, 64), r"\[331, 64\], the base's is \[330, 64\]: its vocab",
    ),
    "resized base layer": (add(f"{PREFIX}lm_head.base_layer.weight", 331, 64), r"lm_head.*its vocabulary was resized"),
    "memory of PEFT": (add(f"{PREFIX}lm_head.modules_to_save.weight", 330, 64), "of PEFT's memory"),
    "a bias that nobody trained": (add(f"{FIRST}bias", 64), "neither of LoRA nor"),
    "rows that nobody named": (
        add(f"{PREFIX}model.embed_tokens.token_adapter.trainable_tokens_delta", 2, 64),
        "trainable_token_indices does not name it",
    ),
    "wrapped": (rename("q_proj.lora", "q_proj.base_layer.lora"), "is wrapped as a stacked parameter is"),
    # the match
    "narrower": (
        lambda a: edit(a, lambda f: f.update({f"{LAST}lora_A.weight": torch.ones(2, 63)})),
        r"layers\.3\.self_attn\.q_proj: B \[64, 2\] times A \[2, 63\] is \[64, 63\], the base's weight \[64, 64\]",
    ),
    "transposed": (
        lambda a: edit(a, lambda f: f.update({f"{LAST}lora_A.weight": torch.ones(2, 96)})),
        r"is \[64, 96\]",
    ),
    "more layers than the base": (rename("layers.3", "layers.4"), r"model\.layers\.4\.self_attn\.q_proj: the base has"),
    "another architecture": (rename("self_attn", "attn"), "did you mean model.layers.0.self_attn.q_proj"),
    "a norm": (rename("layers.0.self_attn.q_proj", "layers.0.input_layernorm"), "is no linear layer"),
    "embedding as linear": (rename("model.layers.0.self_attn.q_proj", "model.embed_tokens"), "an embedding, adapted"),
    "fewer modules than the config targets": (
        config(target_modules=["q_proj", "v_proj"]),
        r"model\.layers\.2\.self_attn\.v_proj: target_modules names it",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", BAD)
def test_bad_adapters_are_refused_by_the_plan(tiny_hf: TinyHF, tmp_path: Path, adapter: Path, fault: str) -> None:
    damage, said = BAD[fault]
    damage(adapter)
    with pytest.raises(InputError, match=said) as raised:
        planning.plan(MergeSpec(model=str(tiny_hf("llama")), adapter=str(adapter), out=tmp_path / "out"))
    assert raised.value.exit_code == 3


def test_all_faults_are_listed(tiny_hf: TinyHF, tmp_path: Path, adapter: Path) -> None:
    spec = MergeSpec(model=str(tiny_hf("llama")), adapter=str(adapter), out=tmp_path / "out")
    configure(adapter, use_qalora=True, bias="some")
    with pytest.raises(InputError, match=r"use_qalora(.|\n)*bias is 'some'"):
        planning.plan(spec)
    configure(adapter, use_qalora=False, bias="none")
    rename("layers.0.self_attn.q_proj", "layers.9.self_attn.q_proj")(adapter)
    rename("layers.1.self_attn.q_proj", "layers.1.self_attn.k_proj")(adapter)
    with pytest.raises(InputError) as raised:
        planning.plan(spec)
    lines = str(raised.value).splitlines()
    assert "in 4 places" in lines[0]
    assert [line.split(":")[0].strip() for line in lines[1:]] == [
        "model.layers.1.self_attn.k_proj", "model.layers.9.self_attn.q_proj",
        "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj",
    ]  # fmt: skip
    drop(f"{LAST}lora_A.weight")(adapter)
    add("stray", 3)(adapter)
    with pytest.raises(InputError, match="2 tensors") as raised:
        planning.plan(spec)
    assert "stray: not under" in str(raised.value)
    assert f"{LAST}lora_B.weight: there is no lora_A" in str(raised.value)


def test_a_head_that_is_tied(tiny_hf: TinyHF, tmp_path: Path, adapter: Path) -> None:
    """transformers #45127: merged weights lost on reload. An untied head is a linear layer like any other."""
    configure(adapter, target_modules=["q_proj", "lm_head"])
    add(f"{PREFIX}lm_head.lora_A.weight", 2, 64)(adapter)
    add(f"{PREFIX}lm_head.lora_B.weight", 330, 2)(adapter)
    tied = tiny_hf("llama", tie_word_embeddings=True)
    with pytest.raises(InputError, match=r"lm_head: the head is tied to the embedding.*--untie writes both"):
        planning.plan(MergeSpec(model=str(tied), adapter=str(adapter), out=tmp_path / "out"))
    spec = MergeSpec(model=str(tiny_hf("llama")), adapter=str(adapter), out=tmp_path / "out")
    assert "lm_head.weight" in working.work(spec, planning.plan(spec)).data["changed_tensors"]


@pytest.mark.parametrize(
    ("config", "module", "expected"),
    [
        ({"target_modules": ["q_proj"]}, "model.layers.0.self_attn.q_proj", True),
        ({"target_modules": ["proj"]}, "model.layers.0.self_attn.q_proj", False),
        ({"target_modules": "all-linear"}, "model.layers.0.self_attn.q_proj", False),
        ({"target_modules": r".*\.q_proj"}, "model.layers.0.self_attn.q_proj", True),
        ({"target_modules": r"q_proj"}, "model.layers.0.self_attn.q_proj", False),
        ({"target_modules": ["q_proj"], "exclude_modules": ["layers.0.self_attn.q_proj"]},
         "model.layers.0.self_attn.q_proj", False),
        ({"target_modules": ["q_proj"], "exclude_modules": r".*\.1\..*"}, "model.layers.0.self_attn.q_proj", True),
        ({"target_modules": ["q_proj"], "layers_to_transform": [1, 2]}, "model.layers.1.self_attn.q_proj", True),
        ({"target_modules": ["q_proj"], "layers_to_transform": [1, 2]}, "model.layers.11.self_attn.q_proj", False),
        ({"target_modules": ["q_proj"], "layers_to_transform": 0}, "model.layers.0.self_attn.q_proj", True),
        ({"target_modules": ["q_proj"], "layers_to_transform": 0, "layers_pattern": "h"},
         "model.layers.0.self_attn.q_proj", False),
    ],
)  # fmt: skip
def test_targets_are_read_as_peft_reads_them(config: dict[str, Any], module: str, expected: bool) -> None:
    assert targets.is_target(config, module) is expected
    from peft import LoraConfig
    from peft.tuners.tuners_utils import check_target_module_exists

    if config["target_modules"] != "all-linear":
        assert bool(check_target_module_exists(LoraConfig(**config), module)) is expected


@pytest.mark.parametrize("key", ["q_proj", "self_attn.q_proj", r"layers\.1\..*", "proj", "^model.*", "layers.1"])
def test_patterns_are_read_as_peft_reads_them(key: str) -> None:
    from peft.utils.other import get_pattern_key

    for module in ("model.layers.1.self_attn.q_proj", "model.layers.2.mlp.up_proj", "lm_head"):
        matched = get_pattern_key([key], module) == key
        assert targets.pattern_value({key: 7}, module, 1) == (7 if matched else 1)


WORK = {
    "NaN in A": (lambda f: f[f"{FIRST}lora_A.weight"][1, 3].fill_(float("nan")), r"lora_A.weight: 1 of 128 values"),
    "infinity in B": (lambda f: f[f"{LAST}lora_B.weight"][:5].fill_(float("inf")), r"lora_B.weight: 10 of 128 values"),
}


@pytest.mark.parametrize("fault", WORK)
def test_damaged_factors(tiny_hf: TinyHF, tmp_path: Path, adapter: Path, mst: Any, fault: str) -> None:
    damage, said = WORK[fault]
    edit(adapter, damage)
    spec = MergeSpec(model=str(tiny_hf("llama")), adapter=str(adapter), out=tmp_path / "out")
    planned = planning.plan(spec)
    before = files.listing(tmp_path)
    with pytest.raises(InputError, match=said):
        working.work(spec, planned)
    assert files.listing(tmp_path) == before


def test_a_sum_too_large_for_the_dtype(tiny_hf: TinyHF, tmp_path: Path, adapter: Path) -> None:
    edit(adapter, lambda f: f[f"{LAST}lora_B.weight"].fill_(1e7))
    before = files.listing(tmp_path)
    spec = MergeSpec(model=str(tiny_hf("llama", dtype="float16")), adapter=str(adapter), out=tmp_path / "out")
    with pytest.raises(InputError, match=r"layers\.3.*: 4096 of 4096 merged values are not finite in float16"):
        working.work(spec, planning.plan(spec))
    assert files.listing(tmp_path) == before


def test_the_command_says_it_and_leaves_nothing(tiny_hf: TinyHF, tmp_path: Path, adapter: Path, mst: Any) -> None:
    base = tiny_hf("llama")
    cases: list[tuple[Callable[[], object], list[Any], str]] = [
        (lambda: None, ["--model", tmp_path / "nowhere"], "no such directory"),
        (lambda: None, ["--adapter", base], "but a whole model"),
        (lambda: None, ["--model", adapter], "is a LoRA adapter, not a model"),
        (lambda: None, ["--out", adapter, "--overwrite"], "--out is one of the inputs"),
        (lambda: edit(adapter, lambda f: f[f"{FIRST}lora_A.weight"].fill_(float("nan"))), [], "NaN"),
        (lambda: configure(adapter, use_dora=True), [], "use_dora"),
        (lambda: configure(adapter, use_dora=False), ["--untie"], "--untie: its head is not tied"),
    ]
    for prepare, words, said in cases:
        prepare()
        before = files.listing(tmp_path)
        # The last of two equal flags counts.
        command = ["mst-merge", "--model", base, "--adapter", adapter, "--out", tmp_path / "out", *words]
        done = mst(*command, code=3)
        assert done.stderr.count("mst-merge: error:") == 1
        assert said in done.stderr
        assert done.stdout == ""
        assert files.listing(tmp_path) == before
        assert not (tmp_path / "out").exists()


def test_bad_bases(tiny_hf: TinyHF, tmp_path: Path, adapter: Path) -> None:
    base = Path(shutil.copytree(tiny_hf("llama"), tmp_path / "base"))
    spec = MergeSpec(model=str(base), adapter=str(adapter), out=tmp_path / "out")
    tensors = load_file(base / "model.safetensors")
    tensors.pop("model.norm.weight")
    save_file(tensors, base / "model.safetensors")
    with pytest.raises(InputError, match=r"model\.norm\.weight: missing"):
        planning.plan(spec)
    os.truncate(base / "model.safetensors", 9999)
    with pytest.raises(InputError, match="truncated"):
        planning.plan(spec)
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(InputError, match="GGUF"):
        planning.plan(MergeSpec(model=str(tmp_path / "x.gguf"), adapter=str(adapter), out=tmp_path / "out"))
    partial = Path(shutil.copytree(adapter, tmp_path / "lora.partial"))
    with pytest.raises(InputError, match="work in progress"):
        planning.plan(MergeSpec(model=str(tiny_hf("llama")), adapter=str(partial), out=tmp_path / "out"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--to", "zarr"], "--to"),
        (["--max-shard-size", "0"], "max-shard-size"),
        (["--tokenizer", "both"], "--tokenizer"),
        (["--adaptor", "x"], "did you mean --adapter"),
        (["--weights", "0.5,0.5"], "--weights: 2 for 1 adapters"),
        (["--weights", "0"], "other than 0"),
        (["--weights", "1e999"], "finite"),
        (["--weights", "nan"], "--weights: each must be a finite number other than 0"),
        (["--weights", "inf"], "--weights: each must be a finite number other than 0"),
        (["--weights", "nan,1"], "--weights: 2 for 1 adapters"),
        (["--weights", "much"], "--weights"),
    ],
)
def test_wrong_settings(words: list[str], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        MergeSpec.parse(["--model", "m", "--adapter", "a", "--out", "o", *words])
