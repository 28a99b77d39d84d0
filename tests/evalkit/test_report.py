"""mst-eval as a user runs it: the report directory, its page, and what is refused before anything is written."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from mst_core import checkpoint, manifest
from mst_core.data import rows as data_rows
from mst_core.errors import InputError
from mst_evalkit.plan import plan
from mst_evalkit.spec import EvalSpec
from mst_evalkit.work import work

Run = Callable[..., subprocess.CompletedProcess[str]]
EVIL = "<script>alert(1)</script>\" onload='x' & é"
ROWS = [
    *({"prompt": f"Is {n} even?", "choices": ["yes", "no"], "answer": n % 2} for n in range(9)),
    {"prompt": EVIL, "choices": ["</pre><img src=x>", "no"], "answer": 0},
    {"prompt": "q", "completion": "Pack my box"},
    {"text": "The quick brown fox jumps over the lazy dog."},
]


def write(path: Path, found: list[dict[str, Any]] = ROWS) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in found))
    return path


def measure(model: Path, data: Path, out: Path, tasks: Any = ("choice", "perplexity"), **settings: Any) -> None:
    """The Python API: the command without another process's start."""
    spec = EvalSpec(model=str(model), tasks=tasks, data=(data,), out=out, **settings)
    assert work(spec, plan(spec)).text == str(out)


class Page(HTMLParser):
    """Tags and attributes of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


@pytest.fixture(scope="module")
def report(mst: Run, tiny_hf: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    place = tmp_path_factory.mktemp("eval")
    out = place / "report"
    done = mst(
        "mst-eval", "--model", tiny_hf("llama"), "--tasks", "choice,perplexity", "--data", write(place / "rows.jsonl"),
        "--out", out,
    )  # fmt: skip
    return out, done


def test_the_report_directory(report: Any, tiny_hf: Callable[..., Path]) -> None:
    out, done = report
    assert done.stdout == f"{out}\n"
    assert "accuracy" in done.stderr
    assert checkpoint.verify(out) == []
    made = manifest.read(out)
    model, data = made.parents
    assert (made.kind, made.layout) == ("report", "report")
    assert (model.role, model.id) == ("model", manifest.identify(tiny_hf("llama")).id)
    assert (data.role, data.id) == ("data", data_rows.digest([out.parent / "rows.jsonl"]))
    assert [entry.path for entry in made.files] == ["report.json", "rows.jsonl"]
    body = json.loads((out / "report.json").read_text())
    assert (body["model"]["id"], body["model"]["weights"]) == (model.id, model.weights)
    rows = [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]
    assert [row["line"] for row in rows] == list(range(1, 13))
    choices = rows[:10]
    assert body["tasks"]["choice"]["accuracy"] == pytest.approx(sum(row["correct"] for row in choices) / 10)
    assert body["tasks"]["choice"]["margin"] == pytest.approx(sum(row["margin"] for row in choices) / 10, abs=1e-6)
    assert body["tasks"]["perplexity"]["tokens"] == rows[10]["tokens"] + rows[11]["tokens"]
    assert str(out.parent) not in (out / "report.json").read_text() + (out / "rows.jsonl").read_text()


def test_the_page_stands_alone_and_is_escaped(report: Any) -> None:
    text = (report[0] / "report.html").read_text()
    page = Page(text)
    kinds = [tag for tag, _ in page.tags]
    assert "script" not in kinds
    assert "link" not in kinds
    images = [attrs["src"] or "" for tag, attrs in page.tags if tag == "img"]
    assert len(images) == 2
    for source, name in zip(images, ("margins.png", "nll.png"), strict=True):
        assert base64.b64decode(source.removeprefix("data:image/png;base64,")) == (report[0] / name).read_bytes()
    assert not any(key.startswith("on") for _, attrs in page.tags for key in attrs)
    assert "&lt;script&gt;alert(1)&lt;/script&gt;&quot;" in text
    assert text.count("<tr>") > len(ROWS)


def test_twice_the_same_command_is_the_same_id(report: Any, mst: Run, tiny_hf: Callable[..., Path]) -> None:
    out, _ = report
    again = out.parent / "again"
    renamed = write(out.parent / "other-name.jsonl")  # names and the order of tasks do not change what is measured
    done = mst(
        "mst-eval", "--json", "--model", tiny_hf("llama"), "--tasks", "perplexity,choice",
        "--data", renamed, "--out", again,
    )  # fmt: skip
    said = json.loads(done.stdout)
    assert said["id"] == manifest.read(again).id == manifest.read(out).id
    assert said["model"]["id"] == manifest.identify(tiny_hf("llama")).id
    assert said["tasks"] == json.loads((out / "report.json").read_text())["tasks"]


def test_the_batch_size_does_not_matter(report: Any, tiny_hf: Callable[..., Path]) -> None:
    out, _ = report
    for size in (1, 5):
        other = out.parent / f"batch-{size}"
        measure(tiny_hf("llama"), out.parent / "rows.jsonl", other, batch_size=size)
        for one, two in zip(*((d / "rows.jsonl").read_text().splitlines() for d in (out, other)), strict=True):
            left, right = json.loads(one), json.loads(two)
            assert left.keys() == right.keys()
            for key, value in left.items():
                assert right[key] == (
                    pytest.approx(value, abs=1e-5) if key in ("logp", "nll", "margin") else right[key]
                )


def test_bf16_is_near(report: Any, tiny_hf: Callable[..., Path]) -> None:
    out, _ = report
    measure(tiny_hf("llama"), out.parent / "rows.jsonl", out.parent / "bf16", precision="bf16")
    full, half = (
        json.loads((d / "report.json").read_text())["tasks"]["perplexity"] for d in (out, out.parent / "bf16")
    )
    assert half["nll"] != full["nll"]
    assert half["nll"] == pytest.approx(full["nll"], rel=0.02)


def test_bad_rows(mst: Run, tiny_hf: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write(tmp_path / "rows.jsonl", [*ROWS[:3], {"prompt": "q", "choices": ["a", "b"], "answer": 7}])
    words = ("mst-eval", "--model", tiny_hf("llama"), "--tasks", "choice", "--data", data, "--out", tmp_path / "out")
    done = mst(*words, code=3)
    assert f"{data}:4: answer is 7" in done.stderr
    assert not (tmp_path / "out").exists()
    measure(tiny_hf("llama"), data, tmp_path / "out", ("choice",), bad_rows="skip")
    assert "1 of 4 rows were set aside" in capsys.readouterr().err
    (rejected,) = map(json.loads, (tmp_path / "out" / "rejected.jsonl").read_text().splitlines())
    assert rejected["line"] == 4
    assert json.loads((tmp_path / "out" / "report.json").read_text())["data"]["rejected"] == 1
    assert checkpoint.verify(tmp_path / "out") == []


def test_a_dry_run_writes_nothing(mst: Run, tiny_hf: Callable[..., Path], tmp_path: Path) -> None:
    words = ("mst-eval", "--model", tiny_hf("llama"), "--tasks", "choice", "--data", write(tmp_path / "r.jsonl"))
    done = mst(*words, "--out", tmp_path / "out", "--dry-run", "--json")
    assert json.loads(done.stdout)["seq_length"] == 256
    done = mst(*words, "--out", tmp_path / "out", "--dry-run", "--seq-length", 64)
    assert "64 tokens" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.jsonl"]


def test_refused_models(mst: Run, tiny_hf: Callable[..., Path], tmp_path: Path, report: Any) -> None:
    good, data = tiny_hf("llama"), write(tmp_path / "r.jsonl")
    adapter, megatron, cut = tmp_path / "adapter", tmp_path / "megatron", tmp_path / "cut"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    megatron.mkdir()
    (megatron / "latest_checkpointed_iteration.txt").write_text("release")
    shutil.copytree(good, cut)
    with (cut / "model.safetensors").open("r+b") as file:
        file.truncate(20_000)
    for model, words in (
        (tmp_path / "none", "no such directory"),
        (adapter, f"mst-merge --model BASE --adapter {adapter}"),
        (megatron, f"mst-convert --model {megatron} --to hf"),
        (cut, "is truncated"),
        (report[0], "holds a report"),
        (tiny_hf("llama", template=None), "no chat template"),
        (tmp_path, "no config.json"),
    ):
        done = mst("mst-eval", "--model", model, "--tasks", "choice", "--data", data, "--out", tmp_path / "o", code=3)
        assert words in done.stderr
        assert done.stderr.count("\n") <= 3, done.stderr
    assert not list(tmp_path.glob("o*"))


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (("--tasks", "choise"), 2, "--tasks"),
        (("--tasks", "choice,choice"), 2, "each task once"),
        (("--batch-size", "0"), 2, "--batch-size"),
        (("--seq-length", "500"), 3, "more than the model's 256 positions"),
        (("--data", "none.jsonl"), 3, "none.jsonl: no such file"),
        (("--precison", "bf16"), 2, "did you mean --precision"),
    ],
)
def test_refused_settings(
    mst: Run, tiny_hf: Callable[..., Path], tmp_path: Path, flags: tuple[str, str], code: int, words: str
) -> None:
    base = {"--model": tiny_hf("llama"), "--tasks": "choice", "--data": write(tmp_path / "r.jsonl")}
    settings = {**base, "--out": tmp_path / "out", flags[0]: flags[1]}
    done = mst("mst-eval", *(word for pair in settings.items() for word in pair), code=code)
    assert words in done.stderr
    assert not (tmp_path / "out").exists()


def test_an_output_that_exists(tiny_hf: Callable[..., Path], tmp_path: Path) -> None:
    model, data, out = tiny_hf("llama"), write(tmp_path / "r.jsonl", ROWS[:4]), tmp_path / "out"
    out.mkdir()
    with pytest.raises(InputError, match="exists") as error:
        measure(model, data, out, ("choice",))
    assert "--overwrite" in (error.value.hint or "")
    measure(model, data, out, ("choice",), overwrite=True)
    assert manifest.read(out).kind == "report"


def test_a_reward_model_ranks_answers(tiny_hf: Callable[..., Path], tmp_path: Path) -> None:
    """Each score is what transformers' own class gives the conversation alone; a choice of three is ranked as well."""
    import torch
    from transformers import AutoModelForSequenceClassification

    from mst_core.data.render import load_tokenizer

    model = tiny_hf("llama", scores=True)
    asked = [
        *({"prompt": f"Is {n} even?", "chosen": "yes" + "!" * n, "rejected": "no never"} for n in range(5)),
        {"prompt": "Pick", "choices": ["a", "fox jumps", "lazy dog"], "answer": 1},
    ]
    measure(model, write(tmp_path / "pairs.jsonl", asked), tmp_path / "out", tasks=("reward",), batch_size=4)
    found = [json.loads(line) for line in (tmp_path / "out/rows.jsonl").read_text().splitlines()]
    scorer = AutoModelForSequenceClassification.from_pretrained(model, dtype=torch.float32)
    tokenizer = load_tokenizer(model)
    for row, measured in zip(asked, found, strict=True):
        answers = row.get("choices") or [row["chosen"], row["rejected"]]
        for answer, score in zip(answers, measured["score"], strict=True):
            told = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": answer}]
            text = tokenizer.apply_chat_template(told, tokenize=False)
            given = tokenizer(text, return_tensors="pt", add_special_tokens=False)
            with torch.no_grad():
                assert score == pytest.approx(float(scorer(**given).logits), abs=1e-5)
        right = row.get("answer", 0)
        assert measured["correct"] == (max(measured["score"]) == measured["score"][right])
    body = json.loads((tmp_path / "out/report.json").read_text())["tasks"]["reward"]
    assert body["rows"] == 6
    assert body["accuracy"] == pytest.approx(sum(row["correct"] for row in found) / 6, abs=1e-6)
    assert body["guessing"] == pytest.approx((5 / 2 + 1 / 3) / 6, abs=1e-6)
    assert "margins.png" in {path.name for path in (tmp_path / "out").iterdir()}


def test_tasks_are_of_their_kind_of_model(tiny_hf: Callable[..., Path], tmp_path: Path) -> None:
    data = write(tmp_path / "rows.jsonl")
    with pytest.raises(InputError, match="is a reward model"):
        measure(tiny_hf("llama", scores=True), data, tmp_path / "out")
    with pytest.raises(InputError, match="is no reward model"):
        measure(tiny_hf("llama"), data, tmp_path / "out", tasks=("reward",))
