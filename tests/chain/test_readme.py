"""The README's own commands, in order, on a tiny model: the whole chain of tools as a newcomer types it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
WORDS = ["quick", "brown", "fox", "lazy", "dog", "jugs", "zebra", "wizard", "prize", "answer"]
ANSWERS = ("News", "Satire")


def blocks() -> list[str]:
    """Every sh block of the README, in order."""
    return re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)


def question(index: int) -> str:
    return f"Is this headline satire or news? {WORDS[index % 10]} {WORDS[index * 7 % 10]} {index}"


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def place(tiny_hf: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with what the README names: base-hf, sft.jsonl, pairs.jsonl, eval.jsonl."""
    folder = tmp_path_factory.mktemp("readme")
    shutil.copytree(tiny_hf("llama"), folder / "base-hf")
    write(
        folder / "sft.jsonl",
        [
            {"messages": [{"role": "user", "content": question(i)}, {"role": "assistant", "content": ANSWERS[i % 2]}]}
            for i in range(24)
        ],
    )
    write(
        folder / "pairs.jsonl",
        [{"prompt": question(i), "chosen": ANSWERS[i % 2], "rejected": ANSWERS[1 - i % 2]} for i in range(50, 66)],
    )
    write(
        folder / "eval.jsonl",
        [{"prompt": question(i), "choices": list(ANSWERS), "answer": i % 2} for i in range(100, 112)],
    )
    return folder


def shell(script: str, place: Path) -> str:
    environment = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    script = "\n".join(line for line in script.splitlines() if not line.startswith("pip install"))
    done = subprocess.run(
        ["bash", "-euc", script], cwd=place, env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def chained(place: Path) -> Path:
    """The first block has run."""
    shell(blocks()[0], place)
    return place


def test_the_chain(chained: Path) -> None:
    report = json.loads((chained / "report" / "report.json").read_text())
    assert report["tasks"]["choice"]["rows"] == 12
    lineage = shell("mst lineage merged", chained)
    for role in ("base", "adapter"):
        assert f"{role}: blake3:" in lineage
    assert "source, lossless: blake3:" in lineage
    for name in ("base", "sft", "dpo", "merged", "report"):
        shell(f"mst verify {name}", chained)
    losses = [json.loads(line)["loss"] for line in (chained / "sft" / "metrics.jsonl").read_text().splitlines()]
    assert losses[-1] < losses[0]
    for name in ("sft", "dpo"):
        assert (chained / name / "loss.png").stat().st_size > 5000
        assert list((chained / name / "tensorboard").iterdir())


def test_only_the_converter(chained: Path) -> None:
    from mst_core import tensors

    shell(blocks()[1], chained)
    ours, theirs = (tensors.headers(chained / name) for name in ("base-hf", "back-hf"))
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert tensors.read(ours[name]).equal(tensors.read(theirs[name])), name


def test_serve(chained: Path) -> None:
    from openai import OpenAI

    words = [*blocks()[2].replace("8000", "0").split()]
    words[0] = str(BIN / words[0])
    server = subprocess.Popen(words, cwd=chained, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        client = OpenAI(base_url=url, api_key="none")
        model = client.models.list().data[0].id
        message = {"role": "user", "content": question(3)}
        answer = client.chat.completions.create(model=model, messages=[message], max_tokens=4, temperature=0)  # type: ignore[list-item]
        assert answer.choices[0].message.content is not None
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0


def test_the_same_command_gives_the_same_id(chained: Path) -> None:
    from mst_core import manifest

    train, align = (
        next(line for line in blocks()[0].splitlines() if line.startswith(tool)) for tool in ("mst-train", "mst-align")
    )
    shell(train.replace("--out sft", "--out sft-again"), chained)
    shell(align.replace("--out dpo", "--out dpo-again"), chained)
    for name in ("sft", "dpo"):
        assert manifest.read(chained / name).id == manifest.read(chained / f"{name}-again").id


def test_another_base_is_refused_and_another_layout_is_not(chained: Path) -> None:
    """The adapter was trained on sft (Megatron): sft as Hugging Face is the same model, base is not."""
    from mst_core import manifest

    shell("mst-convert --model sft --to hf --out sft-hf", chained)
    shell("mst-merge --model sft-hf --adapter dpo --to hf --out merged-from-hf", chained)
    ours, theirs = (manifest.read(chained / name) for name in ("merged", "merged-from-hf"))
    assert ours.digests.weights == theirs.digests.weights
    done = subprocess.run(
        [BIN / "mst-merge", "--model", "base", "--adapter", "dpo", "--to", "hf", "--out", "wrong"],
        cwd=chained, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 3
    assert "adapts blake3:" in done.stderr
    assert "hint:" in done.stderr
    assert not list(chained.glob("wrong*"))


def test_dry_runs_load_nothing_heavy(chained: Path) -> None:
    script = (
        "import sys\nfrom {module} import main\ntry:\n    main()\nexcept SystemExit as stop: code = stop.code or 0\n"
        "print(code, [m for m in ('torch', 'numpy', 'transformers') if m in sys.modules])\n"
    )
    for line, module in zip(
        blocks()[0].splitlines(),
        ("mst_convert.cli", "mst_train.cli", "mst_align.cli", "mst_convert.merge.cli", "mst_evalkit.cli"),
        strict=False,
    ):
        words = [*re.sub(r"--out (\S+)", r"--out dry-\1", line).split()[1:], "--dry-run"]
        done = subprocess.run(
            [sys.executable, "-c", script.format(module=module), *words], cwd=chained, capture_output=True, text=True
        )
        assert done.stdout.strip() == "0 []", f"{line}\n{done.stdout}{done.stderr}"
        assert not list(chained.glob("dry-*"))
