"""mst-merge: what it writes, from both layouts, and that it streams. What it refuses is in test_merge_refusals.py."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mst_convert import plan as convert_planning
from mst_convert import work as convert_working
from mst_convert.merge import adapter as adapters
from mst_convert.merge import edits, merging, tying
from mst_convert.merge import plan as planning
from mst_convert.merge import work as working
from mst_convert.merge.spec import MergeSpec
from mst_convert.spec import ConvertSpec
from mst_core import checkpoint, lineage, manifest
from mst_core.spec import Result

TinyHF = Callable[..., Path]
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PREFIX = "base_model.model."


def weights(directory: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        found |= load_file(file)
    return found


def make_adapter(out: Path, base: Path, *, rank: int = 4, size: float = 0.1, seed: int = 0, **config: Any) -> Path:
    """A PEFT adapter with random A and B for every projection of every layer."""
    generator = torch.Generator().manual_seed(seed)
    factors = {}
    for name, weight in weights(base).items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in config.get("target_modules", TARGETS) and weight.ndim == 2:
            a = torch.randn(rank, weight.shape[1], generator=generator)
            b = torch.randn(weight.shape[0], rank, generator=generator)
            factors[f"{PREFIX}{module}.lora_A.weight"], factors[f"{PREFIX}{module}.lora_B.weight"] = a * size, b * size
    out.mkdir(parents=True)
    save_file(factors, out / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(TARGETS), **config}
    (out / "adapter_config.json").write_text(json.dumps(settings))
    return out


def edit(adapter: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    factors = load_file(adapter / "adapter_model.safetensors")
    change(factors)
    save_file(factors, adapter / "adapter_model.safetensors")
    return adapter


def merge(**settings: Any) -> Result:
    adapter = settings.pop("adapter")
    several = adapter if isinstance(adapter, list) else [adapter]
    spec = MergeSpec(**{**settings, "model": str(settings["model"]), "adapter": tuple(map(str, several))})
    return working.work(spec, planning.plan(spec))


def convert(**settings: Any) -> Path:
    spec = ConvertSpec(**{key: str(value) if key == "model" else value for key, value in settings.items()})
    convert_working.work(spec, convert_planning.plan(spec))
    return spec.out


def claim(out: Path, adapter: Path, base: Path) -> Path:
    """``adapter`` as mst-align would have finished it: with a manifest that names ``base``."""
    trained_on = manifest.identify(base)
    with checkpoint.stage(out) as staging:
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            staging.copy(adapter / name, name)
        staging.commit(
            kind="adapter",
            layout="peft",
            tool="mst-align",
            settings={},
            parents=[manifest.Parent(role="base", id=trained_on.id, weights=trained_on.digests.weights)],
            parent_dirs=[base],
        )
    return out


@pytest.fixture
def adapter(tiny_hf: TinyHF, tmp_path: Path) -> Path:
    return make_adapter(tmp_path / "lora", tiny_hf("llama"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_each_target_gets_its_delta_and_nothing_else_moves(
    tiny_hf: TinyHF, tmp_path: Path, family: str, dtype: str
) -> None:
    base = tiny_hf(family, dtype=dtype)
    lora = make_adapter(tmp_path / "lora", base)
    result = merge(model=base, adapter=lora, out=tmp_path / "out")
    before, after, factors = weights(base), weights(tmp_path / "out"), weights(lora)
    assert before.keys() == after.keys()
    for name, weight in before.items():
        assert after[name].dtype == weight.dtype
        stem = PREFIX + name.removesuffix("weight")
        if f"{stem}lora_A.weight" not in factors:
            assert torch.equal(after[name], weight), name
            continue
        truth = (
            weight.double() + factors[f"{stem}lora_B.weight"].double() @ factors[f"{stem}lora_A.weight"].double() * 2
        )
        assert not torch.equal(after[name], weight), name
        assert torch.allclose(after[name].double(), truth, rtol={"float32": 1e-6, "bfloat16": 2**-8}.get(dtype, 2**-11),
                              atol=1e-6), name  # fmt: skip
    assert result.data["changed"] == result.data["merged"] == 4 * len(TARGETS)
    assert sorted(f"{PREFIX}{name[:-6]}lora_A.weight" for name in result.data["changed_tensors"]) == sorted(
        name for name in factors if "lora_A" in name
    )
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (base / name).read_bytes()
    assert checkpoint.verify(tmp_path / "out") == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_megatron_base_gives_the_same_bytes(tiny_hf: TinyHF, tmp_path: Path, family: str, dtype: str) -> None:
    base = tiny_hf(family, dtype=dtype, vocab_size=331)
    megatron = convert(model=base, to="megatron", out=tmp_path / "megatron")
    lora = make_adapter(tmp_path / "lora", base)
    for name, model in (("from_hf", base), ("from_megatron", megatron)):
        merge(model=model, adapter=lora, out=tmp_path / name, max_shard_size=300_000)
    first, second = (manifest.read(tmp_path / name) for name in ("from_hf", "from_megatron"))
    assert [(f.path, f.blake3) for f in first.files] == [(f.path, f.blake3) for f in second.files]
    assert first.model == second.model
    assert first.id != second.id  # they have different parents


def test_a_tied_model_that_ships_its_head_keeps_it(tiny_hf: TinyHF, tmp_path: Path) -> None:
    base = Path(shutil.copytree(tiny_hf("llama", tie_word_embeddings=True), tmp_path / "base"))
    stored = weights(base)
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"].clone()
    stored["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(stored, base / "model.safetensors")
    lora = make_adapter(tmp_path / "lora", base)
    merge(model=base, adapter=lora, out=tmp_path / "out")
    assert weights(tmp_path / "out").keys() == stored.keys()
    megatron = convert(model=base, to="megatron", out=tmp_path / "megatron")
    merge(model=megatron, adapter=lora, out=tmp_path / "from_megatron")
    again = weights(tmp_path / "from_megatron")
    assert stored.keys() - again.keys() == {"model.layers.0.self_attn.rotary_emb.inv_freq"}
    assert torch.equal(again["lm_head.weight"], stored["lm_head.weight"])


def test_a_megatron_base_of_another_dtype_than_its_config(tiny_hf: TinyHF, tmp_path: Path, adapter: Path) -> None:
    """Left as it is, the config would make transformers load fp32 weights as bf16."""
    megatron = convert(model=tiny_hf("llama"), to="megatron", out=tmp_path / "megatron")
    config = json.loads((megatron / "hf" / "config.json").read_text())
    (megatron / "hf" / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    merge(model=megatron, adapter=adapter, out=tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {**config, "dtype": "float32"}
    assert all(tensor.dtype == torch.float32 for tensor in weights(tmp_path / "out").values())


def test_the_same_command_gives_the_same_id(tiny_hf: TinyHF, tmp_path: Path, adapter: Path) -> None:
    ids = [merge(model=tiny_hf("llama"), adapter=adapter, out=tmp_path / n).data["id"] for n in ("one", "two")]
    assert ids[0] == ids[1]
    other = merge(model=tiny_hf("llama"), adapter=adapter, out=tmp_path / "one", overwrite=True, max_shard_size=100_000)
    assert other.data["id"] != ids[0]
    assert (tmp_path / "one" / "model.safetensors.index.json").is_file()
    assert checkpoint.verify(tmp_path / "one") == []


def test_parents_and_report(tiny_hf: TinyHF, tmp_path: Path, adapter: Path) -> None:
    base = tiny_hf("llama")
    merge(model=base, adapter=adapter, out=tmp_path / "out")
    made = manifest.read(tmp_path / "out")
    assert [(parent.role, parent.id, parent.lossless) for parent in made.parents] == [
        ("base", manifest.identify(base).id, False),
        ("adapter", manifest.identify(adapter).id, False),
    ]
    assert made.notes["changed_tensors"] == 28
    assert {identity for _, _, kept, identity in lineage.walk(tmp_path / "out") if kept} == {
        made.id,
        *(parent.id for parent in made.parents),
    }
    report = json.loads((tmp_path / "out" / "merge.json").read_text())
    assert report["model.layers.3.mlp.up_proj.weight"] == {
        "edits": [{"kind": "LoRA", "rank": 4, "alpha": 8.0, "scale": 2.0}], "changed": 96 * 64, "elements": 96 * 64,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("config", "scales"),
    [
        ({}, {2.0}),
        ({"use_rslora": True}, {4.0}),
        ({"alpha_pattern": {"q_proj": 1, r"layers\.[01]\.mlp\.up_proj": 40}}, {0.25, 10.0, 2.0}),
        ({"alpha_pattern": {"proj": 1}}, {2.0}),  # no dotted tail of any name
    ],
)
def test_scales(tiny_hf: TinyHF, tmp_path: Path, config: dict[str, Any], scales: set[float]) -> None:
    lora = make_adapter(tmp_path / "lora", tiny_hf("llama"), **config)
    spec = MergeSpec(model=str(tiny_hf("llama")), adapter=str(lora), out=tmp_path / "out")
    assert set(planning.plan(spec).scales) == scales


def test_what_changes_nothing_is_said(
    tiny_hf: TinyHF, tmp_path: Path, adapter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """trl #386: the merge did nothing and reported success."""
    edit(adapter, lambda f: f.update({name: t * 0 for name, t in f.items() if "lora_B" in name}))
    result = merge(model=tiny_hf("llama"), adapter=adapter, out=tmp_path / "out")
    said = capsys.readouterr().err
    assert "changes nothing" in said
    assert "0 of 39 tensors changed (28 merged)" in said
    assert (result.data["changed"], result.data["merged"]) == (0, 28)
    assert len(manifest.read(tmp_path / "out").notes["unchanged"]) == 28


def test_deltas_that_round_away_are_named(tiny_hf: TinyHF, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = tiny_hf("llama", dtype="bfloat16")
    lora = make_adapter(tmp_path / "lora", base)
    edit(lora, lambda f: f[f"{PREFIX}model.layers.1.mlp.up_proj.lora_B.weight"].mul_(1e-9))
    result = merge(model=base, adapter=lora, out=tmp_path / "out")
    assert result.data["unchanged_tensors"] == ["model.layers.1.mlp.up_proj.weight"]
    said = capsys.readouterr().err
    assert "27 of 39 tensors changed (28 merged)" in said
    assert "layers.1.mlp.up_proj" in said
    assert "changes nothing" not in said


class TestLineage:
    """An adapter goes into the weights it was trained on, in whatever layout, and into no other."""

    def test_the_same_weights_in_every_form(self, tiny_hf: TinyHF, tmp_path: Path, adapter: Path) -> None:
        base = tiny_hf("llama")
        megatron = convert(model=base, to="megatron", out=tmp_path / "megatron")
        other = convert(model=base, to="megatron", out=tmp_path / "other", vocab_padding=64)
        back = convert(model=megatron, to="hf", out=tmp_path / "back", max_shard_size=100_000)
        for number, trained_on in enumerate((base, megatron, back)):
            claimed = claim(tmp_path / f"claimed{number}", adapter, trained_on)
            for model in (base, megatron, other, back):
                result = merge(model=model, adapter=claimed, out=tmp_path / "out", overwrite=True)
                assert result.data["base"] == "verified", (trained_on, model)
        assert "base" not in manifest.read(tmp_path / "out").encoding

    def test_another_base(self, tiny_hf: TinyHF, tmp_path: Path, adapter: Path) -> None:
        base = tiny_hf("llama")
        claimed = claim(tmp_path / "dpo-run", adapter, base)
        cast = convert(model=base, to="megatron", out=tmp_path / "cast", dtype="bf16")
        for model in (tiny_hf("llama", seed=1), cast):
            with pytest.raises(planning.InputError) as raised:
                merge(model=model, adapter=claimed, out=tmp_path / "out")
            given, meant = manifest.short(manifest.identify(model).id), manifest.short(manifest.identify(base).id)
            assert str(raised.value) == f"dpo-run adapts {meant}, but {model.name} is {given}"
            assert (raised.value.hint or "").startswith("give the base it was trained on; its lineage calls it llama")
            assert not list(tmp_path.glob("out*"))

    def test_an_edited_template_is_the_same_base(self, tiny_hf: TinyHF, tmp_path: Path, adapter: Path) -> None:
        claimed = claim(tmp_path / "claimed", adapter, tiny_hf("llama"))
        base = Path(shutil.copytree(tiny_hf("llama"), tmp_path / "base"))
        (base / "chat_template.jinja").write_text("{{ messages }}")
        assert merge(model=base, adapter=claimed, out=tmp_path / "out").data["base"] == "verified"
        assert (tmp_path / "out" / "chat_template.jinja").read_text() == "{{ messages }}"

    def test_a_plain_adapter_is_unverified(
        self, tiny_hf: TinyHF, tmp_path: Path, adapter: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        result = merge(model=tiny_hf("llama", seed=1), adapter=adapter, out=tmp_path / "out")
        assert "warning: lora does not say what it was trained on" in capsys.readouterr().err
        made = manifest.read(tmp_path / "out")
        assert result.data["base"] == made.encoding["base"] == made.notes["base"] == "unverified"

    def test_megatron_weights_of_others(self, tiny_hf: TinyHF, tmp_path: Path, adapter: Path) -> None:
        """They have an id but no manifest: a plain adapter is merged, one of another base refused."""
        megatron = convert(model=tiny_hf("llama"), to="megatron", out=tmp_path / "megatron")
        claimed = claim(tmp_path / "claimed", adapter, megatron)
        (megatron / "mst.json").unlink()
        assert merge(model=megatron, adapter=adapter, out=tmp_path / "out").data["base"] == "unverified"
        with pytest.raises(planning.InputError, match="adapts"):
            merge(model=megatron, adapter=claimed, out=tmp_path / "other")


class TestTokenizer:
    """The base's files, unless the adapter's would make other ids of a text: then the user says."""

    def test_files_that_mean_the_same(
        self, tiny_hf: TinyHF, tmp_path: Path, adapter: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        base = tiny_hf("llama")
        content = json.loads((base / "tokenizer.json").read_text())
        content["truncation"] = {"max_length": 5, "direction": "Right", "stride": 0, "strategy": "LongestFirst"}
        content["model"]["merges"] = [" ".join(pair) for pair in content["model"]["merges"]]
        (adapter / "tokenizer.json").write_text(json.dumps(dict(reversed(content.items()))))
        merge(model=base, adapter=adapter, out=tmp_path / "out")
        assert "tokenizer" not in capsys.readouterr().err
        assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()

    def test_another_template_is_said(
        self, tiny_hf: TinyHF, tmp_path: Path, adapter: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (adapter / "chat_template.jinja").write_text("{{ messages }}")
        merge(model=tiny_hf("llama"), adapter=adapter, out=tmp_path / "out")
        assert "the adapter's differs in chat_template.jinja (--tokenizer adapter" in capsys.readouterr().err
        template = tiny_hf("llama") / "chat_template.jinja"
        assert (tmp_path / "out" / template.name).read_bytes() == template.read_bytes()

    def test_another_vocabulary_needs_a_choice(self, tiny_hf: TinyHF, tmp_path: Path, adapter: Path) -> None:
        base = tiny_hf("llama")
        content = json.loads((base / "tokenizer.json").read_text())
        content["added_tokens"].append({**content["added_tokens"][0], "id": 325, "content": "<|new|>"})
        (adapter / "tokenizer.json").write_text(json.dumps(content))
        with pytest.raises(planning.InputError, match=r"another vocabulary.*tokenizer\.json") as raised:
            merge(model=base, adapter=adapter, out=tmp_path / "out")
        assert "--tokenizer" in (raised.value.hint or "")
        assert not list(tmp_path.glob("out*"))
        merge(model=base, adapter=adapter, out=tmp_path / "b", tokenizer="base")
        assert (tmp_path / "b" / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
        merge(model=base, adapter=adapter, out=tmp_path / "a", tokenizer="adapter")
        assert (tmp_path / "a" / "tokenizer.json").read_bytes() == (adapter / "tokenizer.json").read_bytes()
        assert not (tmp_path / "a" / "tokenizer_config.json").exists()
        second = make_adapter(tmp_path / "second", base)
        merge(model=base, adapter=[second, adapter], out=tmp_path / "s", tokenizer="adapter")
        assert (tmp_path / "s" / "tokenizer.json").read_bytes() == (adapter / "tokenizer.json").read_bytes()
        shutil.copy(base / "tokenizer.json", second)
        with pytest.raises(planning.InputError, match="the adapters have different tokenizers"):
            merge(model=base, adapter=[second, adapter], out=tmp_path / "t", tokenizer="adapter")
        assert (tmp_path / "a" / "config.json").read_bytes() == (base / "config.json").read_bytes()


@pytest.mark.parametrize("layout", ["hf", "megatron"])
def test_one_tensor_at_a_time(
    tiny_hf: TinyHF, tmp_path: Path, adapter: Path, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes of tensors read from the base and not yet freed: never more than the largest one."""
    model = tiny_hf("llama")
    if layout == "megatron":
        model = convert(model=model, to="megatron", out=tmp_path / "megatron")
    alive, peak, seen = 0, 0, 0

    def count(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal alive, peak, seen
        size = tensor.nbytes

        def freed() -> None:
            nonlocal alive
            alive -= size

        alive, seen = alive + size, seen + size
        peak = max(peak, alive)
        weakref.finalize(tensor, freed)
        return tensor

    stream = working.stream

    def counted(job: Any) -> Iterator[tuple[str, torch.Tensor]]:
        tensors = stream(job)
        while (found := next(tensors, None)) is not None:
            name, tensor = found[0], count(found[1])
            del found
            yield name, tensor
            del tensor

    monkeypatch.setattr(working, "stream", counted)
    merge(model=model, adapter=adapter, out=tmp_path / "out")
    largest = 384 * 64 * 4  # the padded embedding
    assert seen > 6 * largest
    assert peak <= largest


def test_memory_does_not_grow_with_the_model(tiny_hf: TinyHF, tmp_path: Path) -> None:
    """Peak resident memory above the imports and the plan, for weights of 100 MB."""
    dims = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8}
    base = tiny_hf("llama", **dims)
    lora = make_adapter(tmp_path / "lora", base)
    script = (
        "import resource, sys, torch\n"
        "from mst_convert.merge import plan, work\n"
        "from mst_convert.merge.spec import MergeSpec\n"
        "torch.ones(64, 64) @ torch.ones(64, 64)\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024\n"
        f"spec = MergeSpec(model={str(base)!r}, adapter={str(lora)!r}, out={str(tmp_path / 'out')!r})\n"
        "planned = plan.plan(spec)\n"
        "before = peak()\n"
        "work.work(spec, planned)\n"
        "print(planned.bytes_out, peak() - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    size, grown = map(int, done.stdout.split())
    assert size > 95_000_000
    assert grown < 48 << 20, f"{grown:,} bytes for {size:,}"
    shutil.rmtree(tmp_path / "out")


def test_a_dry_run_reads_headers_only(tiny_hf: TinyHF, tmp_path: Path, adapter: Path) -> None:
    base = tiny_hf("llama")
    megatron = convert(model=base, to="megatron", out=tmp_path / "megatron")
    script = (
        "import sys; from mst_convert.merge.spec import MergeSpec; from mst_convert.merge.plan import plan\n"
        f"for model in ({str(base)!r}, {str(megatron)!r}):\n"
        f"    plan(MergeSpec(model=model, adapter={str(adapter)!r}, out={str(tmp_path / 'x')!r})).rows()\n"
        "heavy = {'torch', 'numpy', 'transformers', 'safetensors', 'peft'} & sys.modules.keys()\n"
        "sys.exit(repr(heavy) if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_the_command(tiny_hf: TinyHF, tmp_path: Path, adapter: Path, mst: Callable[..., Any]) -> None:
    base = tiny_hf("llama")
    words = ["mst-merge", "--model", base, "--adapter", adapter, "--out", tmp_path / "out"]
    told = json.loads(mst(*words, "--dry-run", "--json").stdout)
    assert (told["tensors"], len(told["edited"]), told["kinds"]["q_proj"], told["scales"]) == (39, 28, 4, [2.0])
    assert told["trained_on"] == ["unverified"]
    assert "28 of 39 tensors" in mst(*words, "--dry-run").stderr
    assert not (tmp_path / "out").exists()
    done = mst(*words, "--tokenizer", "base", "--to", "hf", "--max-shard-size", "200kB")
    assert done.stdout == f"{tmp_path / 'out'}\n"
    assert "28 of 39 tensors changed" in done.stderr
    data = json.loads(mst(*words, "--overwrite", "--json").stdout)
    assert data["id"] == manifest.read(tmp_path / "out").id
    assert data["changed"] == 28


def test_several_adapters_by_flags_and_by_yaml(tiny_hf: TinyHF, tmp_path: Path, mst: Callable[..., Any]) -> None:
    base = tiny_hf("llama")
    one, two = (make_adapter(tmp_path / name, base, seed=seed) for name, seed in (("one", 1), ("two", 2)))
    flags = ["--adapter", one, "--adapter", two, "--weights", "0.75,-0.25"]
    mst("mst-merge", "--model", base, *flags, "--out", tmp_path / "flags")
    settings = {"model": str(base), "adapter": [str(one), str(two)], "weights": [0.75, -0.25]}
    (tmp_path / "merge.yaml").write_text(json.dumps(settings))
    mst("mst-merge", "--config", tmp_path / "merge.yaml", "--out", tmp_path / "yaml")
    made = manifest.read(tmp_path / "flags")
    assert made.id == manifest.read(tmp_path / "yaml").id
    assert made.made_by.settings["weights"] == [0.75, -0.25]
    roles = [("base", base), ("adapter", one), ("adapter", two)]
    assert [(p.role, p.id) for p in made.parents] == [(role, manifest.identify(path).id) for role, path in roles]
    name = "model.layers.2.mlp.up_proj.weight"
    deltas = [load_file(lora / "adapter_model.safetensors") for lora in (one, two)]
    stem = PREFIX + name.removesuffix("weight")
    first, second = (delta[f"{stem}lora_B.weight"] @ delta[f"{stem}lora_A.weight"] * 2 for delta in deltas)
    merged = weights(tmp_path / "flags")[name]
    assert torch.allclose(merged, weights(base)[name] + 0.75 * first - 0.25 * second, atol=1e-6)


def test_each_of_several_adapters_must_fit_the_base(tiny_hf: TinyHF, tmp_path: Path) -> None:
    base, other = tiny_hf("llama"), tiny_hf("llama", seed=1)
    mine = claim(tmp_path / "mine", make_adapter(tmp_path / "a", base, seed=1), base)
    also = claim(tmp_path / "also", make_adapter(tmp_path / "b", base, seed=2), base)
    alien = claim(tmp_path / "alien", make_adapter(tmp_path / "c", base, seed=3), other)
    plain = make_adapter(tmp_path / "plain", base, seed=4)
    assert merge(model=base, adapter=[mine, also], out=tmp_path / "out").data["base"] == "verified"
    assert merge(model=base, adapter=[mine, plain], out=tmp_path / "p").data["base"] == "unverified"
    with pytest.raises(planning.InputError, match="alien adapts"):
        merge(model=base, adapter=[mine, alien], out=tmp_path / "no")


@pytest.mark.parametrize("shipped", [False, True])
def test_untying_is_the_same_from_both_layouts(tiny_hf: TinyHF, tmp_path: Path, shipped: bool) -> None:
    base = Path(shutil.copytree(tiny_hf("llama", tie_word_embeddings=True), tmp_path / "base"))
    stored = weights(base)
    if shipped:
        save_file({**stored, "lm_head.weight": stored["model.embed_tokens.weight"].clone()}, base / "model.safetensors")
    lora = make_adapter(tmp_path / "lora", base, target_modules=["q_proj"])
    a, b = torch.ones(4, 64) * 0.1, torch.ones(330, 4)
    head = {f"{PREFIX}lm_head.lora_A.weight": a, f"{PREFIX}lm_head.lora_B.weight": b}
    edit(lora, lambda f: f.update(head))
    megatron = convert(model=base, to="megatron", out=tmp_path / "megatron")
    for model in (base, megatron):
        out = tmp_path / f"from_{model.name}"
        merge(model=model, adapter=lora, out=out, untie=True)
        merged = weights(out)
        assert torch.equal(merged["model.embed_tokens.weight"], stored["model.embed_tokens.weight"])
        assert torch.allclose(merged["lm_head.weight"], stored["model.embed_tokens.weight"] + b @ a * 2, atol=1e-6)
        config = json.loads((out / "config.json").read_text())
        assert config == {**json.loads((base / "config.json").read_text()), "tie_word_embeddings": False}
        assert manifest.read(out).model.parameters == sum(tensor.numel() for tensor in merged.values())
    first, second = (manifest.read(tmp_path / f"from_{name}") for name in ("base", "megatron"))
    assert [f.blake3 for f in first.files] == [f.blake3 for f in second.files]


def test_a_shipped_head_follows_its_embedding(tiny_hf: TinyHF, tmp_path: Path) -> None:
    """Trained token rows change both, as in PEFT: the copy that the base ships changes with the embedding."""
    base = Path(shutil.copytree(tiny_hf("llama", tie_word_embeddings=True), tmp_path / "base"))
    stored = weights(base)
    save_file({**stored, "lm_head.weight": stored["model.embed_tokens.weight"].clone()}, base / "model.safetensors")
    lora = make_adapter(tmp_path / "lora", base, trainable_token_indices=[7, 3])
    rows = {f"{PREFIX}model.embed_tokens.token_adapter.trainable_tokens_delta": torch.arange(128.0).reshape(2, 64)}
    edit(lora, lambda f: f.update(rows))
    merge(model=base, adapter=lora, out=tmp_path / "out")
    merged = weights(tmp_path / "out")
    assert torch.equal(merged["lm_head.weight"], merged["model.embed_tokens.weight"])
    assert torch.equal(merged["lm_head.weight"][[7, 3]], torch.arange(128.0).reshape(2, 64))
    assert torch.equal(merged["lm_head.weight"][8:], stored["model.embed_tokens.weight"][8:])


def test_the_flag_unties(tiny_hf: TinyHF, tmp_path: Path, mst: Callable[..., Any]) -> None:
    base = tiny_hf("llama", tie_word_embeddings=True)
    lora = make_adapter(tmp_path / "lora", base)
    planned = mst("mst-merge", "--model", base, "--adapter", lora, "--untie", "--out", tmp_path / "out", "--dry-run")
    assert "tie_word_embeddings becomes false" in planned.stderr
    mst("mst-merge", "--model", base, "--adapter", lora, "--untie", "--out", tmp_path / "out")
    merged = weights(tmp_path / "out")
    assert torch.equal(merged["lm_head.weight"], merged["model.embed_tokens.weight"])


def test_every_place_of_the_flag_in_config_json() -> None:
    inner = {"hidden_size": 8, "tie_word_embeddings": True}
    nested = {"thinker_config": {"text_config": inner, "vision_config": {"depth": 2}}, "model_type": "x"}
    changed = tying.untied(nested)
    assert changed["tie_word_embeddings"] is False
    assert changed["thinker_config"]["text_config"] == {"hidden_size": 8, "tie_word_embeddings": False}
    assert changed["thinker_config"]["vision_config"] == {"depth": 2}
    assert nested["thinker_config"]["text_config"] == inner, "the argument stays as it is"
    assert tying.untied({"text_config": {"a": 1}})["text_config"] == {"a": 1, "tie_word_embeddings": False}


@pytest.mark.parametrize(
    ("stored", "named"),
    [
        ("model.layers.0.q_proj.weight", "model.language_model.layers.0.q_proj"),
        ("model.language_model.layers.0.q_proj.weight", "model.layers.0.q_proj"),
        ("visual.blocks.0.q_proj.weight", "model.visual.blocks.0.q_proj"),
        ("model.layers.0.block_sparse_moe.gate.weight", "model.layers.0.mlp.gate"),
    ],
)
def test_other_names_of_the_same_layer(tmp_path: Path, stored: str, named: str) -> None:
    """transformers renames on loading; adapters have the names of its memory, of whichever release trained them."""
    target = named.rpartition(".")[2]
    make_adapter(tmp_path / "lora", tmp_path, target_modules=[target])
    factors = {f"{PREFIX}{named}.lora_{half}.weight": torch.ones(4, 4) for half in "AB"}
    save_file(factors, tmp_path / "lora" / "adapter_model.safetensors")
    matcher = edits.Matcher(adapters.read(tmp_path / "lora"), {stored: (4, 4)}, "model.embed_tokens.weight")
    matcher.match()
    assert not matcher.faults
    assert [name for name, _ in matcher.edits] == [stored]


def test_the_golden_number(tmp_path: Path) -> None:
    """By hand: W = 1, A = [1, 2], B = [3], alpha 2, r 1: W + 2 * B A = [7, 13]."""
    outcome = merging.merge(torch.ones(1, 2), [merging.Term(torch.tensor([[3.0]]), torch.tensor([[1.0, 2.0]]), 2.0)])
    assert outcome.tensor.tolist() == [[7.0, 13.0]]
