"""GGUF to Hugging Face: a tiny file written as llama.cpp writes it comes back as the model it was made from."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mst_convert import plan as planning
from mst_convert import work as working
from mst_convert.gguf import read_header
from mst_convert.spec import ConvertSpec
from mst_core import checkpoint, manifest
from mst_core.errors import InputError

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def write_gguf(path: Path, hf: Path) -> None:
    """What llama.cpp's convert_hf_to_gguf.py does for a Llama: q and k rows permuted, everything in fp32."""
    import gguf

    config = json.loads((hf / "config.json").read_text())
    tokenizer = json.loads((hf / "tokenizer.json").read_text())["model"]
    weights = load_file(hf / "model.safetensors")
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]

    def permuted(tensor: torch.Tensor, count: int) -> torch.Tensor:
        rows, columns = tensor.shape
        return tensor.reshape(count, 2, rows // count // 2, columns).swapaxes(1, 2).reshape(rows, columns)

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(groups)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    words = sorted(tokenizer["vocab"], key=tokenizer["vocab"].__getitem__)
    words += [f"<unused{i}>" for i in range(config["vocab_size"] - len(words))]
    writer.add_token_list(words)
    writer.add_token_types([3 if word.startswith("<|") else 1 for word in words])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    names = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    names["lm_head.weight"] = "output.weight"
    parts = {
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    for i in range(config["num_hidden_layers"]):
        names |= {f"model.layers.{i}.{long}.weight": f"blk.{i}.{short}.weight" for long, short in parts.items()}
    for name, tensor in weights.items():
        if "q_proj" in name or "k_proj" in name:
            tensor = permuted(tensor, heads if "q_proj" in name else groups)
        writer.add_tensor(names[name], tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def made(tiny_hf: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    hf = tiny_hf("llama")
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path, hf)
    return hf, path


def convert(**settings: Any) -> Path:
    spec = ConvertSpec(**settings)
    working.work(spec, planning.plan(spec))
    return spec.out


def test_the_weights_come_back(made: tuple[Path, Path], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    hf, path = made
    out = convert(model=str(path), to="hf", out=tmp_path / "out", dtype="fp32")
    want, found = load_file(hf / "model.safetensors"), load_file(out / "model.safetensors")
    assert want.keys() == found.keys()
    assert all(torch.equal(want[name], found[name]) for name in want)
    config = json.loads((out / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["architectures"] == ["LlamaForCausalLM"]
    model = AutoModelForCausalLM.from_pretrained(out)
    reference = AutoModelForCausalLM.from_pretrained(hf)
    tokens = torch.arange(3, 40)[None]
    with torch.no_grad():
        assert (model(tokens).logits - reference(tokens).logits).abs().max() <= 1e-5
    tokenizer = AutoTokenizer.from_pretrained(out)
    text = "The quick brown fox, 0123!"
    assert tokenizer(text).input_ids == AutoTokenizer.from_pretrained(hf)(text).input_ids
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer.eos_token == "<|im_end|>"
    assert checkpoint.verify(out) == []


def test_bf16_by_default_and_the_same_id_twice(made: tuple[Path, Path], tmp_path: Path) -> None:
    first = convert(model=str(made[1]), to="hf", out=tmp_path / "one", max_shard_size=200_000)
    second = convert(model=str(made[1]), to="hf", out=tmp_path / "two", max_shard_size=200_000)
    assert manifest.read(first).id == manifest.read(second).id
    model = manifest.read(first).model
    assert model is not None
    assert model.dtype == json.loads((first / "config.json").read_text())["dtype"] == "bfloat16"
    parent = manifest.read(first).parent("source")
    assert parent is not None
    assert not parent.lossless
    megatron = convert(model=str(first), to="megatron", out=tmp_path / "m")
    assert checkpoint.verify(megatron) == []


def _replace(path: Path, old: bytes, new: bytes) -> None:
    path.write_bytes(path.read_bytes().replace(old, new, 1))


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut data": (lambda p: os.truncate(p, p.stat().st_size - 5000), "truncated"),
    "cut header": (lambda p: os.truncate(p, 3000), "truncated"),
    "empty": (lambda p: os.truncate(p, 0), "no GGUF"),
    "version": (lambda p: _replace(p, b"GGUF\3", b"GGUF\1"), "version 1"),
    "architecture": (lambda p: _replace(p, struct.pack("<Q", 5) + b"llama", struct.pack("<Q", 5) + b"mamba"), "mamba"),
    "count": (lambda p: p.write_bytes(b"GGUF\3\0\0\0" + b"\xff" * 16), "damaged"),
    "type": (lambda p: _replace(p, b"general.architecture\x08", b"general.architecture\x63"), "type 99"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_file_is_refused_by_the_plan(made: tuple[Path, Path], tmp_path: Path, fault: str) -> None:
    damage, word = FAULTS[fault]
    path = tmp_path / "damaged.gguf"
    path.write_bytes(made[1].read_bytes())
    damage(path)
    with pytest.raises(InputError, match=word):
        planning.plan(ConvertSpec(model=str(path), to="hf", out=tmp_path / "out"))


def test_a_gguf_file_goes_to_hf_only(made: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(InputError, match="two steps") as raised:
        planning.plan(ConvertSpec(model=str(made[1]), to="megatron", out=tmp_path / "out"))
    assert "--to hf" in (raised.value.hint or "")
    with pytest.raises(InputError, match="hf-config"):
        planning.plan(ConvertSpec(model=str(made[1]), to="hf", out=tmp_path / "out", hf_config=tmp_path))
    with pytest.raises(InputError) as raised:
        planning.plan(ConvertSpec(model=str(made[1].parent), to="hf", out=tmp_path / "out"))
    assert "tiny.gguf" in (raised.value.hint or "")
    assert read_header(made[1]).kinds == "F32"
