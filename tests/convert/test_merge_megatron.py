"""mst-merge --to megatron: the same bytes as merging into Hugging Face and converting that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.convert.test_layouts import convert, make, same
from tests.convert.test_merge import make_adapter, merge

from mst_convert.merge.spec import MergeSpec
from mst_core import checkpoint, files, manifest
from mst_core.errors import SettingsError

TARGETS = ["q_proj", "v_proj", "o_proj", "down_proj"]


def release(directory: Path) -> dict[str, str]:
    """The hash of every weight file."""
    return {name: files.hash_file(directory / name)[1] for name in files.listing(directory) if "release" in name}


@pytest.mark.parametrize("name", ["llama", "llama, biases", "qwen3", "mixtral", "qwen3-moe", "deepseek-v3", "gpt-oss"])
@pytest.mark.parametrize("base", ["hf", "megatron"])
def test_the_same_bytes_as_in_two_steps(tmp_path: Path, name: str, base: str) -> None:
    hf = make(tmp_path / "hf", name)
    lora = make_adapter(tmp_path / "lora", hf, target_modules=TARGETS)
    model = hf if base == "hf" else convert(model=hf, to="megatron", out=tmp_path / "base")
    merge(model=model, adapter=lora, out=tmp_path / "one", to="megatron")
    merge(model=hf, adapter=lora, out=tmp_path / "merged")
    two = convert(model=tmp_path / "merged", to="megatron", out=tmp_path / "two")
    assert release(tmp_path / "one") == release(two)
    first, second = manifest.read(tmp_path / "one"), manifest.read(two)
    assert first.encoding == {**second.encoding, "base": "unverified"}
    assert first.model == second.model
    assert checkpoint.verify(tmp_path / "one") == []


def test_an_untied_head_is_written(tmp_path: Path) -> None:
    hf = make(tmp_path / "hf", "llama")
    lora = make_adapter(tmp_path / "lora", hf, target_modules=TARGETS)
    settings: dict[str, Any] = {"model": hf, "adapter": lora, "untie": True}
    merge(**settings, out=tmp_path / "one", to="megatron")
    merge(**settings, out=tmp_path / "merged")
    # The head follows its embedding here, so the files differ in their order; the model does not.
    same(tmp_path / "merged", convert(model=tmp_path / "one", to="hf", out=tmp_path / "back"))


def test_shards_belong_to_hf() -> None:
    with pytest.raises(SettingsError, match="--max-shard-size belongs to --to hf"):
        MergeSpec.parse(["--model", "m", "--adapter", "a", "--out", "o", "--to", "megatron", "--max-shard-size", "1GB"])
