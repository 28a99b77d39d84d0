"""--add-tokens with LoRA against PEFT: it reads the adapter on the grown base and on the resized original, and merges
it to what mst-merge makes of either."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from mst_convert.merge import plan as planning
from mst_convert.merge import work as working
from mst_convert.merge.spec import MergeSpec
from mst_core import checkpoint, manifest
from mst_core.engine import lora
from mst_core.engine.plain import PlainEngine
from mst_core.errors import InputError, MstError
from mst_train.spec import TrainSpec
from tests.oracle.test_merge_peft import by_peft
from tests.train.test_add_tokens import TOKENS, grown_of, settings, train

IDS = torch.cat([torch.arange(3, 43), torch.tensor([320, 321])]).reshape(2, 21)
LORA: dict[str, Any] = {"lora_rank": 2, "lr": 1e-2, "epochs": 3}
Trained = tuple[TrainSpec, Path]


@pytest.fixture(scope="module", params=[("llama", 322), ("qwen2", 322), ("llama", 330)], ids=lambda p: f"{p[0]}-{p[1]}")
def trained(request: Any, tiny_hf: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """An adapter, and its base: untied and tied, with no row for the new tokens and with some that padded."""
    family, vocab = request.param
    data = tmp_path_factory.mktemp("tokens") / "rows.jsonl"
    rows = [{"prompt": f"call {n}", "completion": f"<tool>{n * 7}</tool>"} for n in range(6)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = settings(tiny_hf(family, vocab_size=vocab - 2 * (vocab == 322)), data, **LORA)
    done = train(spec)
    assert done["loss"] < done["first_loss"]
    return spec, Path(spec.model)


def on(base: Any, adapter: Path) -> Any:
    return PeftModel.from_pretrained(base, adapter).eval()


def load(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(IDS).logits
    return found


def merge(base: Path, adapter: Path, out: Path, **more: Any) -> Path:
    spec = MergeSpec(model=str(base), adapter=(str(adapter),), out=out, **more)
    working.work(spec, planning.plan(spec))
    return out


def test_peft_reads_it_on_either_base(trained: Trained) -> None:
    """Our logits, and no more in the file than the rows: on the grown base, and on the original that PEFT's users
    resize to the tokenizer."""
    spec, base = trained
    held = load_file(spec.out / "adapter_model.safetensors")
    tied = json.loads((base / "config.json").read_text())["tie_word_embeddings"]
    rows = {name: tensor for name, tensor in held.items() if "lora_" not in name}
    assert sorted(rows) == [
        f"base_model.model.{name}.token_adapter.trainable_tokens_delta"
        for name in (["lm_head"] if not tied else []) + ["model.embed_tokens"]
    ]
    assert all(tensor.shape == (2, 64) for tensor in rows.values())
    engine = PlainEngine(spec, grown_of(spec))  # with our tensors in it, by our own names
    with torch.no_grad():
        for name, parameter in engine.trained:
            parameter.copy_(held[lora.peft_name(name)])
    ours, resized = logits(engine.model), load(base)
    tokenizer = AutoTokenizer.from_pretrained(spec.out)
    assert tokenizer.convert_tokens_to_ids(list(TOKENS)) == [320, 321]
    if len(tokenizer) > resized.get_input_embeddings().num_embeddings:
        resized.resize_token_embeddings(len(tokenizer))
    for model in (load(grown_of(spec)), resized):
        plain = logits(model)
        assert (logits(on(model, spec.out)) - ours).abs().max() <= 1e-5
        assert (plain - ours).abs().max() > 0.1


def test_a_merge_into_either_is_pefts(trained: Trained, tmp_path: Path) -> None:
    spec, base = trained
    theirs = by_peft(on(load(grown_of(spec)), spec.out), tmp_path / "peft")
    one, two = (merge(d, spec.out, tmp_path / name) for d, name in ((base, "original"), (grown_of(spec), "grown")))
    ours = load_file(one / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert (tensor - theirs[name]).abs().max() <= 1e-6, name
    for name in ("model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja"):
        assert (one / name).read_bytes() == (two / name).read_bytes(), name
    assert checkpoint.verify(one) == []
    assert json.loads((one / "config.json").read_text())["vocab_size"] == max(
        322, len(ours["model.embed_tokens.weight"])
    )
    assert manifest.read(one).model.dims["vocab"] == len(ours["model.embed_tokens.weight"])
    assert AutoTokenizer.from_pretrained(one).convert_tokens_to_ids("</tool>") == 321
    assert manifest.read(one).encoding.get("base") is None  # verified
    assert manifest.read(one).parents[0].id == manifest.identify(base).id


def test_through_megatron_it_is_the_same(trained: Trained, tmp_path: Path, mst: Callable[..., Any]) -> None:
    """The original as a Megatron directory, merged into one, and back."""
    spec, base = trained
    straight = merge(base, spec.out, tmp_path / "straight")
    mst("mst-convert", "--model", base, "--to", "megatron", "--out", tmp_path / "mcore")
    merge(tmp_path / "mcore", spec.out, tmp_path / "merged", to="megatron")
    mst("mst-convert", "--model", tmp_path / "merged", "--to", "hf", "--out", tmp_path / "back")
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (tmp_path / "back" / name).read_bytes() == (straight / name).read_bytes(), name


def test_untied_it_has_the_rows_twice(tiny_hf: Callable[..., Path], trained: Trained, tmp_path: Path) -> None:
    spec, base = trained
    if not json.loads((base / "config.json").read_text())["tie_word_embeddings"]:
        with pytest.raises(InputError, match="its head is not tied"):
            merge(base, spec.out, tmp_path / "untied", untie=True)
        return
    ours = load_file(merge(base, spec.out, tmp_path / "untied", untie=True) / "model.safetensors")
    assert torch.equal(ours["lm_head.weight"], ours["model.embed_tokens.weight"])
    assert len(ours["lm_head.weight"]) == 322
    config = json.loads((tmp_path / "untied" / "config.json").read_text())
    assert (config["vocab_size"], config["tie_word_embeddings"]) == (322, False)


def test_rows_that_are_gone_are_missed(trained: Trained, tmp_path: Path) -> None:
    spec, base = trained
    shutil.copytree(spec.out, tmp_path / "cut")
    held = load_file(tmp_path / "cut" / "adapter_model.safetensors")
    kept = {name: tensor for name, tensor in held.items() if "embed_tokens" not in name}
    save_file(kept, tmp_path / "cut" / "adapter_model.safetensors")
    for directory in (base, grown_of(spec)):
        with pytest.raises(MstError, match=r"has no rows of them for the base's model\.embed_tokens\.weight"):
            merge(directory, tmp_path / "cut", tmp_path / "merged")


def test_beside_another_adapter(trained: Trained, tmp_path: Path) -> None:
    """One on the model of before: the deltas are summed, the rows are the first one's."""
    spec, base = trained
    other = spec.model_copy(update={"add_tokens": (), "out": tmp_path / "other"})
    train(other)
    both = (str(spec.out), str(other.out))
    merge_spec = MergeSpec(model=str(base), adapter=both, out=tmp_path / "both")
    working.work(merge_spec, planning.plan(merge_spec))
    one, two = (merge(base, d, tmp_path / f"only-{d.name}") for d in (spec.out, other.out))
    found, first, second, plain = (load_file(d / "model.safetensors") for d in (tmp_path / "both", one, two, base))
    assert torch.equal(found["model.embed_tokens.weight"], first["model.embed_tokens.weight"])
    name = "model.layers.1.mlp.up_proj.weight"
    assert (found[name] - (first[name] + second[name] - plain[name])).abs().max() <= 1e-6
    assert (tmp_path / "both" / "tokenizer.json").read_bytes() == (spec.out / "tokenizer.json").read_bytes()


def test_other_bases_are_refused(trained: Trained, tiny_hf: Callable[..., Path], tmp_path: Path) -> None:
    """Another model of its shape; and the original, of an adapter on the grown base that has no rows."""
    spec, base = trained
    with pytest.raises(MstError, match=rf"adapts blake3:.*, but {base.name} is"):
        merge(tiny_hf(base.name, vocab_size=330, seed=7), spec.out, tmp_path / "other")
    plain = spec.model_copy(update={"model": str(grown_of(spec)), "add_tokens": (), "out": tmp_path / "norows"})
    train(plain)
    with pytest.raises(MstError, match=r"norows adapts blake3:"):
        merge(base, plain.out, tmp_path / "merged")
    merge(grown_of(spec), plain.out, tmp_path / "merged")
