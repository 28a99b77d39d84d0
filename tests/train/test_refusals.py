"""What mst-train and mst-align refuse before the first step: one error, its place, a hint, nothing left behind."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mst_align.cli import main as align_main
from mst_train.cli import main as train_main

Mst = Callable[..., Any]


def row(question: str = "yes or no?", answer: str = "yes") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row(f"number {i}?")) + "\n" for i in range(8)))
    return path


@pytest.fixture(scope="module")
def megatron(tiny_hf: Callable[..., Path], mst: Mst, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("m") / "llama"
    mst("mst-convert", "--model", tiny_hf("llama"), "--to", "megatron", "--out", out)
    return out


MAIN = {"mst-train": train_main, "mst-align": align_main}


@pytest.fixture
def here(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Mst]:
    """As ``mst``, in this process: a program of its own would spend its time on importing transformers."""
    before = signal.getsignal(signal.SIGTERM)

    def run(tool: str, *words: Any, code: int = 0) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", [tool, *map(str, words)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            MAIN[tool]()
        out, err = capfd.readouterr()
        assert ended.value.code == code, err
        return subprocess.CompletedProcess([tool], code, out, err)

    yield run
    signal.signal(signal.SIGTERM, before)


def refused(mst: Mst, tmp_path: Path, *words: Any, code: int = 3, tool: str = "mst-train") -> str:
    done = mst(tool, *words, "--out", tmp_path / "out", code=code)
    assert done.stdout == ""
    assert done.stderr.count("error:") == 1, done.stderr
    assert not list(tmp_path.glob("out*"))
    return str(done.stderr)


def test_wrong_directories(here: Mst, tmp_path: Path, data: Path, tiny_hf: Callable[..., Path], megatron: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "is no model" in refused(here, tmp_path, "--model", tmp_path / "empty", "--data", data)
    assert "no such directory" in refused(here, tmp_path, "--model", tmp_path / "none", "--data", data)
    said = refused(here, tmp_path, "--model", megatron, "--data", data, "--engine", "plain")
    assert "hint: mst-convert --model" in said
    said = refused(here, tmp_path, "--model", tiny_hf("llama"), "--data", data, "--pp", 2)
    assert "hint: --engine megatron" in said


def test_broken_models(here: Mst, tmp_path: Path, data: Path, tiny_hf: Callable[..., Path]) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_hf("llama"), model)
    weights = model / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    assert "model.safetensors" in refused(here, tmp_path, "--model", model, "--data", data)
    weights.write_bytes(whole)
    config = json.loads((model / "config.json").read_text())
    for change, says in (
        ({"architectures": ["FancyForCausalLM"], "model_type": "fancy"}, "FancyForCausalLM"),
        ({"num_hidden_layers": 5}, "lacks 9 tensors"),
        ({"intermediate_size": 128}, "the config says"),
    ):
        (model / "config.json").write_text(json.dumps({**config, **change}))
        assert says in refused(here, tmp_path, "--model", model, "--data", data)
    (model / "config.json").write_text(json.dumps(config))
    (model / "chat_template.jinja").unlink()
    said = refused(here, tmp_path, "--model", model, "--data", data)
    assert "no chat template" in said
    assert "hint: put the template" in said


def test_layouts_that_do_not_fit(here: Mst, tmp_path: Path, data: Path, megatron: Path) -> None:
    words = ("--model", megatron, "--data", data)
    said = refused(here, tmp_path, *words, "--tp", 4)
    assert "--tp 4 does not divide 2 key-value heads" in said
    assert "--tp of 1, 2" in said
    assert "--pp 3 does not divide 4 layers" in refused(here, tmp_path, *words, "--pp", 3)
    assert "--pp 8 needs as many layers" in refused(here, tmp_path, *words, "--pp", 8)
    assert "is beyond the model's 256 positions" in refused(here, tmp_path, *words, "--seq-length", 512, code=2)
    assert "--warmpu: no such flag; did you mean --warmup?" in refused(here, tmp_path, *words, "--warmpu", 1, code=2)


def test_all_bad_rows_are_named(here: Mst, tmp_path: Path, tiny_hf: Callable[..., Path]) -> None:
    bad: list[Any] = [
        row(),
        {"messages": [{"role": "human", "content": "x"}]},
        row(answer="  "),
        {"instruction": "do", "outptu": "done"},
        {"messages": [{"role": "user", "content": "x"}]},
        row("long " * 300),
        "not an object",
    ]
    path = tmp_path / "bad.jsonl"
    path.write_text("".join(json.dumps(item) + "\n" for item in bad) + "{broken\n")
    said = refused(here, tmp_path, "--model", tiny_hf("llama"), "--data", path)
    assert "7 of 8 rows cannot be used" in said
    for text in (
        "bad.jsonl:2: messages[0] has the role 'human'",
        "bad.jsonl:3: has an empty answer",
        "bad.jsonl:4: ",
        "'outptu'; did you mean 'output'?",
        "bad.jsonl:5: ends with the user",
        "bad.jsonl:6: has 1",
        "bad.jsonl:7: is text, not an object",
        "bad.jsonl:8: is not JSON",
    ):
        assert text in said
    done = here(
        "mst-train", "--model", tiny_hf("llama"), "--data", path, "--bad-rows", "skip", "--out", tmp_path / "out",
        "--json", "--precision", "fp32",
    )  # fmt: skip
    assert "7 of 8 rows were set aside, see rejected.jsonl" in done.stderr
    rejected = [json.loads(line) for line in (tmp_path / "out" / "rejected.jsonl").read_text().splitlines()]
    assert [item["line"] for item in rejected] == list(range(2, 9))
    assert json.loads(done.stdout)["steps"] == 1
    only_bad = tmp_path / "only.jsonl"
    only_bad.write_text(json.dumps(bad[1]) + "\n")
    words = ("--model", tiny_hf("llama"), "--data", only_bad, "--bad-rows", "skip")
    shutil.rmtree(tmp_path / "out")
    assert "none of 1 rows can be used" in refused(here, tmp_path, *words)


def test_nothing_left_to_learn_after_truncation(here: Mst, tmp_path: Path, tiny_hf: Callable[..., Path]) -> None:
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps(row("long " * 40)) + "\n")
    words = ("--model", tiny_hf("llama"), "--data", path, "--seq-length", 32)
    assert "tokens, --seq-length is 32" in refused(here, tmp_path, *words)
    assert "nothing left to learn in its first 32 tokens" in refused(here, tmp_path, *words, "--truncate", "right")


@pytest.mark.parametrize(
    ("pair", "says"),
    [
        ({"prompt": "a?", "chosen": "b", "rejected": "b"}, "chosen and rejected are the same"),
        ({"prompt": "a?", "chosen": "b"}, "does not have rejected"),
        ({"prompt": "a?", "chosen": "b", "rejected": ""}, "has an empty answer"),
        ({"prompt": "a?", "chosen": "b", "rejected": None}, "does not have rejected"),
        ({"chosen": "b", "rejected": "c"}, "has no prompt"),
    ],
)
def test_bad_pairs(here: Mst, tmp_path: Path, tiny_hf: Callable[..., Path], pair: dict[str, Any], says: str) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps(pair) + "\n")
    assert says in refused(here, tmp_path, "--model", tiny_hf("llama"), "--data", path, tool="mst-align")


def test_a_rank_that_dies_or_diverges_leaves_nothing(mst: Mst, tmp_path: Path, data: Path, megatron: Path) -> None:
    words = ("--model", megatron, "--data", data, "--pp", 2, "--precision", "fp32", "--lr", "1e30", "--clip-grad", 0)
    said = refused(mst, tmp_path, *words, "--epochs", 20, "--global-batch", 4, code=5)
    assert "gradient norm" in said
    assert "Traceback" not in said
