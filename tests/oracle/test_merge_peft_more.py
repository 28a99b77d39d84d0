"""mst-merge against PEFT, continued: tied heads, several adapters, experts. See test_merge_peft.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from mst_core import manifest
from mst_core.errors import InputError
from tests.oracle.test_merge_peft import adapt, by_peft, load, logits, merge

TinyHF = Callable[..., Path]
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def configure(adapter: Path, **changes: Any) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit(adapter: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(adapter / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, adapter / "adapter_model.safetensors")


APART: dict[str, dict[str, Any]] = {
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "both": {"target_modules": ["embed_tokens", "lm_head"]},
    "both, dora": {"target_modules": ["embed_tokens", "lm_head"], "use_dora": True},
    "module head": {"modules_to_save": ["lm_head"]},
    "module embedding": {"modules_to_save": ["embed_tokens"]},
    "tokens apart": {"trainable_token_indices": {"embed_tokens": [5, 6], "lm_head": [9]}},
    "tokens of the head": {"trainable_token_indices": {"lm_head": [9]}},
}


@pytest.mark.parametrize("case", APART)
def test_a_tied_head_is_untied_or_the_merge_refused(tiny_hf: TinyHF, tmp_path: Path, case: str) -> None:
    """transformers #45127, peft #2777: the merged model must be the adapted one after a reload, or not be written.

    PEFT's own merge is no reference: it adds the head's delta to the embedding too.
    """
    base = tiny_hf("qwen2")
    model = adapt(base, tmp_path / "lora", **APART[case])
    with pytest.raises(InputError, match=r"the head is tied to the embedding.*--untie"):
        merge(base, tmp_path / "lora", tmp_path / "out")
    assert not list(tmp_path.glob("out*"))
    ours = merge(base, tmp_path / "lora", tmp_path / "out", untie=True)
    assert not torch.equal(ours[HEAD], ours[EMBEDDING])
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    assert manifest.read(tmp_path / "out").model.tied is False
    assert (logits(load(tmp_path / "out")) - logits(model)).abs().max() <= 1e-4


TIED: dict[str, dict[str, Any]] = {
    "tokens": {"trainable_token_indices": [5, 6]},
    "modules": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "lora": {"target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": True},
}


@pytest.mark.parametrize("untie", [False, True])
@pytest.mark.parametrize("case", TIED)
def test_a_head_that_follows_its_embedding(tiny_hf: TinyHF, tmp_path: Path, case: str, untie: bool) -> None:
    base = tiny_hf("qwen2")
    model = adapt(base, tmp_path / "lora", **TIED[case])
    ours = merge(base, tmp_path / "lora", tmp_path / "out", untie=untie)
    assert (HEAD in ours) is untie
    assert not untie or torch.equal(ours[HEAD], ours[EMBEDDING])
    assert not torch.equal(ours[EMBEDDING], load_file(base / "model.safetensors")[EMBEDDING])
    assert (logits(load(tmp_path / "out")) - logits(model)).abs().max() <= 1e-4


def test_tied_parts_that_differ(tiny_hf: TinyHF, tmp_path: Path) -> None:
    for number, case in enumerate(("modules", "lora")):
        lora = tmp_path / f"lora{number}"
        adapt(tiny_hf("qwen2"), lora, **TIED[case])
        edit(lora, lambda f: [tensor.mul_(2) for name, tensor in f.items() if ".lm_head." in name])
        with pytest.raises(InputError, match=r"ensure_weight_tying is set, but .*lm_head"):
            merge(tiny_hf("qwen2"), lora, tmp_path / "out")


def test_a_copy_of_another_base(tiny_hf: TinyHF, tmp_path: Path) -> None:
    adapt(tiny_hf("llama", seed=1), tmp_path / "lora", target_modules=["q_proj", "lm_head"])
    with pytest.raises(InputError, match="is a copy of the base's tensor, but not of this base's"):
        merge(tiny_hf("llama"), tmp_path / "lora", tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


def test_copies_of_another_dtype_are_compared_as_such(tiny_hf: TinyHF, tmp_path: Path) -> None:
    adapt(tiny_hf("llama"), tmp_path / "lora", target_modules=["q_proj", "lm_head"])
    name = "base_model.model.lm_head.base_layer.weight"
    edit(tmp_path / "lora", lambda f: f.update({name: f[name].bfloat16()}))
    merge(tiny_hf("llama"), tmp_path / "lora", tmp_path / "out")


class TestSeveral:
    def test_weighted_sums(self, tiny_hf: TinyHF, tmp_path: Path) -> None:
        """As PEFT concatenates adapters: sum of weight * delta, of other ranks and other targets."""
        base = tiny_hf("llama")
        adapt(base, tmp_path / "a", seed=1)
        adapt(base, tmp_path / "b", seed=2, r=2, use_rslora=True, target_modules=["q_proj", "up_proj"])
        model = peft.PeftModel.from_pretrained(load(base), tmp_path / "a", adapter_name="a")
        model.load_adapter(tmp_path / "b", adapter_name="b")
        model.add_weighted_adapter(["a", "b"], [0.7, 0.3], "sum", combination_type="cat")
        model.set_adapter("sum")
        ours = merge(base, (tmp_path / "a", tmp_path / "b"), tmp_path / "out", weights=(0.7, 0.3))
        theirs = by_peft(model, tmp_path / "peft")
        for name, tensor in ours.items():
            assert (tensor - theirs[name]).abs().max() <= 2e-6, name
        parents = manifest.read(tmp_path / "out").parents
        assert [parent.role for parent in parents] == ["base", "adapter", "adapter"]

    def test_one_after_the_other_rounds_twice(self, tiny_hf: TinyHF, tmp_path: Path) -> None:
        base = tiny_hf("llama", dtype="bfloat16")
        for name, seed in (("a", 1), ("b", 2)):
            adapt(base, tmp_path / name, seed=seed)
        both = (tmp_path / "a", tmp_path / "b")
        errors = {}
        for dtype in ("bfloat16", "float32"):
            model = peft.PeftModel.from_pretrained(load(base, getattr(torch, dtype)), both[0], adapter_name="a")
            model.load_adapter(both[1], adapter_name="b")
            model.base_model.set_adapter(["a", "b"])
            errors[dtype] = by_peft(model, tmp_path / dtype)
        truth, theirs, ours = errors["float32"], errors["bfloat16"], merge(base, both, tmp_path / "out")
        off = {who: sum(float((found[name].float() - truth[name]).abs().mean()) for name in truth)
               for who, found in (("ours", ours), ("theirs", theirs))}  # fmt: skip
        assert off["ours"] < off["theirs"]
        for name, tensor in ours.items():
            error = (tensor.float() - truth[name]).abs()
            assert bool((error <= truth[name].abs() * 2**-8 * 1.001 + 1e-6).all()), name

    def test_one_may_replace_what_the_other_leaves_alone(self, tiny_hf: TinyHF, tmp_path: Path) -> None:
        base = tiny_hf("llama")
        adapt(base, tmp_path / "a", modules_to_save=["lm_head"], target_modules=["q_proj"])
        adapt(base, tmp_path / "b", seed=2)
        ours = merge(base, (tmp_path / "a", tmp_path / "b"), tmp_path / "out")
        saved = load_file(tmp_path / "a" / "adapter_model.safetensors")
        assert torch.equal(ours[HEAD], saved[f"base_model.model.{HEAD}"])
        with pytest.raises(InputError, match=r"lm_head.*replaced as a whole, which cannot be weighted with 0.5"):
            merge(base, tmp_path / "a", tmp_path / "half", weights=(0.5,))

    @pytest.mark.parametrize(
        ("first", "second", "said"),
        [
            ({"use_dora": True}, {}, "use_dora: DoRA rescales every row"),
            ({"modules_to_save": ["lm_head"]}, {"modules_to_save": ["norm"]}, "a and b replace tensors"),
            ({"modules_to_save": ["lm_head"]}, {"target_modules": ["lm_head"]}, "lm_head.weight: is replaced or"),
            ({"trainable_token_indices": [1]}, {"trainable_token_indices": [2]}, "a and b replace tensors"),
        ],
    )  # fmt: skip
    def test_what_is_no_sum(
        self, tiny_hf: TinyHF, tmp_path: Path, first: dict[str, Any], second: dict[str, Any], said: str
    ) -> None:
        base = tiny_hf("llama")
        adapt(base, tmp_path / "a", **first)
        adapt(base, tmp_path / "b", **second)
        with pytest.raises(InputError, match=said):
            merge(base, (tmp_path / "a", tmp_path / "b"), tmp_path / "out")

    def test_the_same_twice(self, tiny_hf: TinyHF, tmp_path: Path) -> None:
        adapt(tiny_hf("llama"), tmp_path / "a")
        with pytest.raises(InputError, match="is given twice"):
            merge(tiny_hf("llama"), (tmp_path / "a", tmp_path / "a"), tmp_path / "out")

    def test_dora_has_no_weight(self, tiny_hf: TinyHF, tmp_path: Path) -> None:
        adapt(tiny_hf("llama"), tmp_path / "a", use_dora=True)
        with pytest.raises(InputError, match="use_dora: DoRA"):
            merge(tiny_hf("llama"), tmp_path / "a", tmp_path / "out", weights=(0.5,))


def test_biases_that_the_base_has_no_place_for(tiny_hf: TinyHF, tmp_path: Path) -> None:
    adapt(tiny_hf("qwen2"), tmp_path / "lora", lora_bias=True, target_modules=["q_proj", "o_proj"])
    with pytest.raises(InputError, match=r"o_proj: lora_bias needs a bias in the base's layer, which has none"):
        merge(tiny_hf("qwen2"), tmp_path / "lora", tmp_path / "out")


def test_a_trained_bias_that_was_not_saved(tiny_hf: TinyHF, tmp_path: Path) -> None:
    """peft before 0.19 looked for lora_only biases under a name that they no longer had, and saved none."""
    adapt(tiny_hf("qwen2"), tmp_path / "lora", bias="lora_only", target_modules=["q_proj"])
    edit(tmp_path / "lora", lambda f: [f.pop(name) for name in list(f) if name.endswith(".bias")])
    with pytest.raises(InputError, match=r"q_proj\.bias: bias is 'lora_only', but the adapter does not hold it"):
        merge(tiny_hf("qwen2"), tmp_path / "lora", tmp_path / "out")
