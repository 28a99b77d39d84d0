"""The commands of docs/data.md, docs/train.md and docs/align.md, each as it is written, on a tiny model."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMANDS = [
    line
    for page in ("data.md", "train.md", "align.md")
    for block in re.findall(r"```sh\n(.*?)```", (ROOT / "docs" / page).read_text(), flags=re.DOTALL)
    for line in block.splitlines()
]


@pytest.fixture(scope="module")
def place(tiny_hf: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with what the pages name."""
    folder = tmp_path_factory.mktemp("pages")
    shutil.copytree(tiny_hf("llama", num_hidden_layers=2), folder / "base-hf")
    shutil.copytree(folder / "base-hf", folder / "base")
    shutil.copytree(tiny_hf("llama", seed=1), folder / "sft")
    pairs = [{"prompt": f"Is number {i} odd?", "chosen": "yes", "rejected": "no"} for i in range(6)]
    for name in ("pairs", "held-out"):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    for name in ("rows", "texts"):
        (folder / name).mkdir()
    rows = [{"prompt": f"Is number {i} odd?", "completion": "yes" if i % 2 else "no"} for i in range(6)]
    (folder / "rows" / "one.json").write_text(json.dumps(rows))
    (folder / "more.csv").write_text("instruction,output\n" + "".join(f"pack box {i},dozen\n" for i in range(5)))
    (folder / "own.yaml").write_text("unicode: true\nwords: [2, 1000]\nnear_duplicates: {similarity: 0.9}\n")
    for i in range(6):
        (folder / "texts" / f"{i}.txt").write_text(
            f"The quick brown fox number {i} jumps over the lazy dog. " * i + "End."
        )
    return folder


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_pages(place: Path, command: str) -> None:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", "-euc", command], cwd=place, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    if "--print-launch" in command:
        assert "--node-rank 1" in done.stdout
        return
    assert (place / done.stdout.strip() / "mst.json").is_file()
