"""--add-tokens: what a grown model holds, that it is trained as any other, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from mst_core import checkpoint, lineage, manifest
from mst_core.engine.plain import PlainEngine
from mst_core.errors import MstError
from mst_train.plan import plan
from mst_train.spec import TrainSpec
from mst_train.work import work

HEADS = ("model.embed_tokens.weight", "lm_head.weight")
TOKENS = ("<tool>", "</tool>")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"call {n}", "completion": f"<tool>{n * 7}</tool>"} for n in range(6)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def settings(model: Path, data: Path, out: str = "out", **more: Any) -> TrainSpec:
    fields = {"add_tokens": TOKENS, "global_batch": 6, "micro_batch": 3, "epochs": 2, "precision": "fp32", **more}
    where = data.parent
    return TrainSpec(**{"model": str(model), "data": (data,), "out": where / out, "cache": where / "cache", **fields})


def train(spec: TrainSpec) -> dict[str, Any]:
    return dict(work(spec, plan(spec)).data)


def grown_of(spec: TrainSpec) -> Path:
    (found,) = (path for path in (spec.cache / "grown").iterdir() if path.is_dir())
    return found


@pytest.mark.parametrize(("family", "vocab"), [("llama", 330), ("qwen2", 330), ("llama", 322), ("qwen3_moe", 321)])
def test_rows_are_the_mean_of_those_that_were(
    tiny_hf: Callable[..., Path], data: Path, family: str, vocab: int
) -> None:
    """In rows that padded the vocabulary, or in new ones; nothing else of the model changes."""
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32} if family == "qwen3_moe" else {}
    model = tiny_hf(family, vocab_size=vocab, dtype="bfloat16", **moe)
    old = len(AutoTokenizer.from_pretrained(model))
    spec = settings(model, data, lr=1e-9)
    train(spec)
    before, after = load_file(model / "model.safetensors"), load_file(grown_of(spec) / "model.safetensors")
    assert before.keys() == after.keys() == load_file(spec.out / "model.safetensors").keys()
    rows = max(vocab, old + 2)
    for name, tensor in before.items():
        if name not in HEADS:
            assert torch.equal(tensor, after[name]), name
            continue
        assert after[name].shape == (rows, 64)
        mean = tensor[:old].double().mean(0)
        for row in (old, old + 1):
            assert torch.allclose(after[name][row].double(), mean, atol=1e-3, rtol=1e-2)
        kept = [row for row in range(vocab) if row not in (old, old + 1)]
        assert torch.equal(after[name][kept], tensor[kept])
    assert json.loads((spec.out / "config.json").read_text())["vocab_size"] == rows
    assert manifest.read(spec.out).model.dims["vocab"] == rows
    probe = torch.arange(3, 40)[None]
    with torch.no_grad():
        models = [AutoModelForCausalLM.from_pretrained(d, dtype=torch.float32) for d in (model, grown_of(spec))]
        one, two = (found(probe).logits for found in models)
    same = [row for row in range(min(vocab, rows)) if row not in (old, old + 1)]
    assert torch.equal(one[..., same], two[..., same])


def test_the_tokens_are_whole_learnt_and_come_out(tiny_hf: Callable[..., Path], data: Path) -> None:
    spec = settings(tiny_hf("llama"), data, lr=1e-2)
    done = train(spec)
    assert done["loss"] < done["first_loss"]
    tokenizer = AutoTokenizer.from_pretrained(spec.out)
    first = len(AutoTokenizer.from_pretrained(tiny_hf("llama")))
    assert tokenizer.convert_tokens_to_ids(list(TOKENS)) == [first, first + 1]
    ids = tokenizer("a<tool>b</tool>", add_special_tokens=False).input_ids
    assert (ids[1], ids[3]) == (first, first + 1)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<tool>b</tool>"
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(tiny_hf("llama")).chat_template
    after, grown = (load_file(d / "model.safetensors") for d in (spec.out, grown_of(spec)))
    for name in HEADS:
        one, two = after[name][first : first + 2]
        assert not torch.equal(one, two)  # they learnt what tells them apart
        assert not torch.equal(after[name][first], grown[name][first])
    assert checkpoint.verify(spec.out) == checkpoint.verify(grown_of(spec)) == []
    parent = manifest.read(spec.out).parent("base")
    assert parent is not None
    assert parent.id == manifest.read(grown_of(spec)).id
    base = manifest.read(grown_of(spec)).parent("base")
    assert base is not None
    assert base.id == manifest.identify(tiny_hf("llama")).id
    assert parent.id in lineage.ancestors(spec.out)
    # Without a cache it is made again, the same.
    shutil.rmtree(spec.cache)
    assert train(settings(tiny_hf("llama"), data, "again", lr=1e-2))["id"] == done["id"]
    PlainEngine(spec, spec.out)


def test_a_file_of_tokens_and_other_engines(tiny_hf: Callable[..., Path], data: Path, mst: Callable[..., Any]) -> None:
    """Two ranks of megatron, TP 2: its own padding of the vocabulary, and the same model comes out."""
    where, model = data.parent, tiny_hf("llama", vocab_size=322)
    (where / "tokens.txt").write_text("<tool>\n</tool>\n<third>\n")
    words = ["--model", model, "--data", data, "--cache", where / "cache", "--add-tokens", where / "tokens.txt",
             "--global-batch", 6, "--epochs", 2, "--precision", "fp32", "--lr", "1e-3"]  # fmt: skip
    mst("mst-train", *words, "--out", where / "plain")
    mst("mst-train", *words, "--out", where / "megatron", "--engine", "megatron", "--tp", 2)
    mst("mst-train", *words, "--out", where / "fsdp", "--engine", "fsdp", "--nproc", 2)
    plain = load_file(where / "plain" / "model.safetensors")
    assert plain["lm_head.weight"].shape[0] == len(AutoTokenizer.from_pretrained(model)) + 3
    for other in ("megatron", "fsdp"):
        found = load_file(where / other / "model.safetensors")
        assert found.keys() == plain.keys()
        for name, tensor in plain.items():
            assert (found[name] - tensor).abs().max() <= 1e-4, (other, name)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"add_tokens": ("qu",)}, "'qu' is in the tokenizer already"),
        ({"add_tokens": ("<|im_end|>", "<a>")}, "'<|im_end|>' is in the tokenizer already"),
        ({"add_tokens": ("<a>", "<a>")}, "'<a>' is given twice"),
        ({"add_tokens": (" <a>",)}, "token 1 is ' <a>'"),
        ({"add_tokens": ("",)}, "token 1 is ''"),
    ],
)
def test_what_is_refused(tiny_hf: Callable[..., Path], data: Path, more: dict[str, Any], says: str) -> None:
    with pytest.raises(MstError) as caught:
        plan(settings(tiny_hf("llama"), data, **more))
    assert says in str(caught.value)


def test_an_adapter_and_a_megatron_directory(tiny_hf: Callable[..., Path], data: Path, mst: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"--add-tokens with --lora-rank: the megatron engine trains no single rows"):
        settings(tiny_hf("llama"), data, lora_rank=2, engine="megatron")
    made = data.parent / "mcore"
    mst("mst-convert", "--model", tiny_hf("llama"), "--to", "megatron", "--out", made)
    with pytest.raises(MstError, match="grows Hugging Face directories only") as caught:
        plan(settings(made, data))
    assert (
        str(caught.value.hint)
        == f"mst-convert --model {made} --to hf --out {made}-hf, and --model {made}-hf --engine megatron"
    )
