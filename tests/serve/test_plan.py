"""Directories that must not be served: one clear error before torch is loaded."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mst_core.errors import InputError, SettingsError
from mst_serve.plan import ServePlan, plan
from mst_serve.spec import ServeSpec

Change = Callable[[Path], None]


def planned(model: Path, **options: Any) -> ServePlan:
    return plan(ServeSpec(model=str(model), **options))


def edit(name: str, **changes: Any) -> Change:
    def change(directory: Path) -> None:
        path = directory / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


def without(*names: str) -> Change:
    def change(directory: Path) -> None:
        for name in names:
            (directory / name).unlink(missing_ok=True)

    return change


def write(name: str, text: str = "{}") -> Change:
    return lambda directory: void((directory / name).write_text(text))


def void(_: object) -> None:
    return None


def rename_tensor(old: str, new: str) -> Change:
    def change(directory: Path) -> None:
        from safetensors.torch import load_file, save_file

        tensors = load_file(directory / "model.safetensors")
        if new:
            tensors[new] = tensors[old]
        del tensors[old]
        save_file(tensors, directory / "model.safetensors")

    return change


def truncate(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


BROKEN: list[tuple[Change, str]] = [
    (write("adapter_config.json"), "mst-merge --model BASE --adapter"),
    (write("latest_checkpointed_iteration.txt", "release"), "mst-convert --model"),
    (without("config.json"), "no config.json"),
    (without("model.safetensors"), "model.safetensors"),
    (truncate, "model.safetensors"),
    (rename_tensor("lm_head.weight", ""), "lm_head.weight: is missing and config.json does not tie it"),
    (rename_tensor("model.norm.weight", "base_model.model.norm.weight"), "base_model.model.norm.weight: is not"),
    (edit("config.json", vocab_size=320), "has shape (330, 64), config.json says (320, 64)"),
    (edit("config.json", architectures=["NoSuchModel"]), "NoSuchModel"),
    (edit("config.json", max_position_embeddings=None), "max_position_embeddings"),
    (without("tokenizer.json"), "has no tokenizer"),
    (write("config.json", "{"), "config.json"),
]


@pytest.mark.parametrize(("change", "says"), BROKEN)
def test_broken_directory(tiny_hf: Callable[..., Path], tmp_path: Path, change: Change, says: str) -> None:
    copy = tmp_path / "model"
    shutil.copytree(tiny_hf("llama"), copy)
    change(copy)
    with pytest.raises(InputError) as caught:
        planned(copy)
    assert says in f"{caught.value} {caught.value.hint}"
    assert str(copy) in f"{caught.value} {caught.value.hint}"


def test_wrong_places(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such directory"):
        planned(tmp_path / "nothing")
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + bytes(20))
    for place in (tmp_path, tmp_path / "m.gguf"):
        with pytest.raises(InputError) as caught:
            planned(place)
        assert "mst-convert" in (caught.value.hint or "")
    (tmp_path / "run.partial").mkdir()
    with pytest.raises(InputError, match="work in progress"):
        planned(tmp_path / "run.partial")


def test_plan_says_what_will_be(tiny_hf: Callable[..., Path]) -> None:
    model = tiny_hf("qwen2", template=None)
    found = planned(model, seq_length=100, host="0.0.0.0")
    assert (found.context, found.eos, found.chat, found.name) == (100, (2,), False, "qwen2")
    assert found.cache_bytes_per_token == 2 * 4 * 2 * 16 * 4
    assert len(found.warnings) == 2
    assert planned(tiny_hf("llama")).chat
    with pytest.raises(InputError, match="more than the model's 256"):
        planned(model, seq_length=257)
    with pytest.raises(SettingsError, match="port"):
        ServeSpec.parse(["--model", str(model), "--port", "70000"])


def test_help_and_dry_run_load_nothing_heavy(tiny_hf: Callable[..., Path]) -> None:
    code = "import sys; from mst_serve.cli import main\ntry: main()\nexcept SystemExit as e: code = e.code\n"
    code += "heavy = {'torch', 'numpy', 'transformers', 'fastapi', 'uvicorn', 'safetensors'} & sys.modules.keys()\n"
    code += "sys.exit(code or (heavy and str(heavy)) or 0)"
    for words in (["--help"], ["--model", str(tiny_hf("llama")), "--dry-run", "--json"]):
        done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["architecture"] == "LlamaForCausalLM"
