"""The frame of every command: stdout for results, stderr for people, exit codes, one report of an error."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

Mst = Callable[..., CompletedProcess[str]]


def test_inspect_and_lineage_of_a_plain_hf_directory(mst: Mst, tiny_hf: Callable[..., Path]) -> None:
    directory = tiny_hf("qwen2")
    shown = mst("mst", "inspect", directory)
    assert "qwen2 (Qwen2ForCausalLM)" in shown.stdout
    assert "tied embeddings" in shown.stdout
    data = json.loads(mst("mst", "inspect", directory, "--json").stdout)
    assert data["model"]["dims"]["layers"] == 4
    assert data["id"].startswith("blake3:")
    assert data["id"][:19] in mst("mst", "lineage", directory).stdout


def test_verify_wants_a_manifest(mst: Mst, tiny_hf: Callable[..., Path]) -> None:
    done = mst("mst", "verify", tiny_hf("llama"), code=3)
    assert done.stdout == ""
    assert "mst: error:" in done.stderr
    assert "has no mst.json" in done.stderr


def test_verify_finds_one_changed_byte(mst: Mst, tiny_hf: Callable[..., Path], tmp_path: Path) -> None:
    mst("mst-convert", "--model", tiny_hf("llama"), "--to", "megatron", "--out", tmp_path / "m")
    assert "as the manifest says" in mst("mst", "verify", tmp_path / "m").stdout
    path = next((tmp_path / "m").rglob("*.distcp"))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert (
        f"{path.relative_to(tmp_path / 'm')}: its content changed"
        in mst("mst", "verify", tmp_path / "m", code=3).stderr
    )


def test_nonsense_is_refused_in_one_line(mst: Mst, tmp_path: Path) -> None:
    assert "no such command" in mst("mst", "frobnicate", code=2).stderr
    assert "no such directory" in mst("mst", "inspect", tmp_path / "none", code=3).stderr
    (tmp_path / "empty").mkdir()
    assert "is no checkpoint" in mst("mst", "inspect", tmp_path / "empty", code=3).stderr
    for name in ("hf://nobody", "xx://a/b"):
        assert "is not a model's name" in mst("mst", "inspect", name, code=3).stderr
    assert mst("mst", "--version").stdout.startswith("mst 0.")


def test_hubs_without_a_network_say_so(mst: Mst, tmp_path: Path) -> None:
    offline = {"HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    said = mst("mst", "inspect", "hf://Qwen/Qwen3-0.6B", code=3, env=offline).stderr
    assert "cannot be reached" in said
    assert "hint: download it" in said


def test_a_snapshot_in_the_hub_cache_is_found_and_names_its_commit(
    mst: Mst, tiny_hf: Callable[..., Path], tmp_path: Path
) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "hub" / "models--org--tiny"
    shutil.copytree(tiny_hf("llama"), repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    shown = mst(
        "mst", "inspect", "hf://org/tiny", "--json", env={"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path / "hub")}
    )
    assert json.loads(shown.stdout)["notes"]["origin"] == f"hf://org/tiny@{commit}"
