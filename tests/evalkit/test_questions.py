"""Rows of evaluation: what each becomes, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mst_core.data.render import load_tokenizer
from mst_core.data.rows import Row
from mst_core.errors import InputError, MstError, RowError
from mst_evalkit import questions

USER = {"role": "user", "content": "q"}
SYSTEM = {"role": "system", "content": "s"}


def row(**data: Any) -> Row:
    return Row("rows.jsonl", 4, data)


@pytest.mark.parametrize(
    ("data", "prompt", "right"),
    [
        ({"prompt": "q", "choices": ["a", "b"], "answer": 1}, [USER], 1),
        ({"prompt": [USER], "choices": ["a", "b"], "answer": "a"}, [USER], 0),
        ({"messages": [SYSTEM, USER], "choices": ["a", "b"], "answer": 0, "id": 5}, [SYSTEM, USER], 0),
        ({"prompt": "q", "system": "s", "choices": ["a", "b"], "answer": 0}, [SYSTEM, USER], 0),
    ],
)
def test_choices(data: dict[str, Any], prompt: list[dict[str, str]], right: int) -> None:
    assert questions.choice(row(**data)) == (prompt, ["a", "b"], right)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ({"prompt": "q", "choices": ["a", "b"], "anwser": 1}, "did you mean 'answer'"),
        ({"prompt": "q", "choices": ["a", "b"], "answer": 2}, "index from 0 to 1"),
        ({"prompt": "q", "choices": ["a", "b"], "answer": -1}, "index from 0 to 1"),
        ({"prompt": "q", "choices": ["a", "b"], "answer": True}, "neither one of the choices"),
        ({"prompt": "q", "choices": ["a", "b"], "answer": "c"}, "neither one of the choices"),
        ({"prompt": "q", "choices": ["a"], "answer": 0}, "at least two"),
        ({"prompt": "q", "choices": "ab", "answer": 0}, "at least two"),
        ({"prompt": "q", "choices": ["a", " "], "answer": 0}, r"choices\[1\] is empty"),
        ({"prompt": "q", "choices": ["a", 3], "answer": 0}, r"choices\[1\] is a number"),
        ({"prompt": "q", "choices": ["a", "a "], "answer": 0}, "two choices are the same"),
        ({"prompt": "", "choices": ["a", "b"], "answer": 0}, "empty question"),
        ({"messages": [USER, {"role": "assistant", "content": "x"}], "choices": ["a", "b"], "answer": 0}, "to nobody"),
        ({"prompt": "q", "system": 3, "choices": ["a", "b"], "answer": 0}, "system is a number"),
    ],
)
def test_refused_choices(data: dict[str, Any], reason: str) -> None:
    with pytest.raises(RowError, match=reason):
        questions.choice(row(**data))


def read(path: Path, text: str, model: Path, *tasks: str, length: int = 64) -> Any:
    path.write_text(text)
    tokenizer = load_tokenizer(model, template=False)
    return questions.read([path], tasks, tokenizer, length, "error")


ROWS = """\
{"prompt": "q", "choices": ["yes", "no"], "answer": "no"}
{"prompt": "q", "chosen": "yes", "rejected": "no"}
{"prompt": "q", "completion": "yes"}
{"text": "The quick brown fox"}
"""


def test_each_row_goes_to_its_task(tiny_hf: Callable[..., Path], tmp_path: Path) -> None:
    loaded = read(tmp_path / "r.jsonl", ROWS, tiny_hf("llama"), "choice", "perplexity")
    assert [(q.task, q.line, q.right) for q in loaded.samples] == [
        ("choice", 1, 1), ("choice", 2, 0), ("perplexity", 3, -1), ("perplexity", 4, -1),
    ]  # fmt: skip
    with pytest.raises(MstError, match="2 of 4 rows cannot be used"):
        read(tmp_path / "r.jsonl", ROWS, tiny_hf("llama"), "choice")


def test_a_task_without_a_row(tiny_hf: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no row for the task choice"):
        read(tmp_path / "r.jsonl", '{"text": "The quick"}', tiny_hf("llama"), "perplexity", "choice")


def test_text_needs_no_chat_template_and_answers_do(tiny_hf: Callable[..., Path], tmp_path: Path) -> None:
    bare = tiny_hf("llama", template=None)
    assert read(tmp_path / "r.jsonl", '{"text": "The quick"}', bare, "perplexity").rows == 1
    with pytest.raises(InputError, match=r"r\.jsonl:1: the tokenizer has no chat template"):
        read(tmp_path / "r.jsonl", '{"prompt": "q", "completion": "a"}', bare, "perplexity")


@pytest.mark.parametrize("text", ['{"text": ""}', '{"text": 3}', '{"text": null}', '{"txet": "a"}'])
def test_refused_texts(tiny_hf: Callable[..., Path], tmp_path: Path, text: str) -> None:
    with pytest.raises(RowError):
        read(tmp_path / "r.jsonl", text, tiny_hf("llama"), "perplexity")


def test_long_texts_go_in_windows_and_long_answers_are_refused(tiny_hf: Callable[..., Path], tmp_path: Path) -> None:
    words = "lazy dogs " * 100
    (question,) = read(tmp_path / "r.jsonl", f'{{"text": "{words}"}}', tiny_hf("llama"), "perplexity").samples
    assert len(question.samples) > 2
    with pytest.raises(RowError, match="--seq-length is 64"):
        read(tmp_path / "r.jsonl", f'{{"prompt": "q", "completion": "{words}"}}', tiny_hf("llama"), "perplexity")
