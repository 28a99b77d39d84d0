"""Rows as what is scored: questions with candidate answers, and answers or texts on their own.

choice, reward
              {"prompt": "..." or messages, "choices": ["...", "..."], "answer": index or text, "system": "..."}
              ("messages" may stand for "prompt"; preference rows are choices between chosen and rejected)
perplexity    every SFT row (data/shapes.py), and {"text": "..."}
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mst_core.data import load, shapes
from mst_core.data.load import Loaded
from mst_core.data.records import Row, kind
from mst_core.data.render import TEMPLATE_HINT, Renderer, Sample
from mst_core.data.shapes import Message, Shape
from mst_core.errors import InputError, RowError

CHOICE_SHAPES = (
    Shape("prompt/choices/answer", ("prompt", "choices", "answer"), ("system",)),
    Shape("messages/choices/answer", ("messages", "choices", "answer")),
    *shapes.PAIR_SHAPES,
)
TEXT = Shape("text", ("text",))
SHAPES = {"choice": CHOICE_SHAPES, "reward": CHOICE_SHAPES, "perplexity": (*shapes.SFT_SHAPES, TEXT)}


@dataclass(frozen=True)
class Question:
    """One row to score. ``samples`` are candidates of a choice, or the parts of one text or conversation."""

    task: str
    file: str
    line: int
    samples: tuple[Sample, ...]
    asked: str
    """What was asked, for a reader."""
    answers: tuple[str, ...] = ()
    """The candidates' texts, for a reader."""
    right: int = -1
    """Which candidate is right; -1 where there is no question."""
    number: int = 0
    """Which of the files the row is from: in rows.jsonl, where a name would make the id depend on it."""


def read(
    paths: Sequence[Path],
    tasks: Sequence[str],
    tokenizer: Any,
    seq_length: int,
    bad_rows: load.BadRows,
) -> Loaded[Question]:
    """All rows as questions of their tasks. Raises one error for all bad rows, and if a task got no row."""
    maker = _Maker(tasks, tokenizer, seq_length)
    numbers = {str(path): number for number, path in enumerate(paths)}
    loaded = load.load(paths, lambda row: [replace(maker.question(row), number=numbers[row.file])], bad_rows)
    for task in tasks:
        if not any(question.task == task for question in loaded.samples):
            raise InputError(f"holds no row for the task {task}", where=", ".join(map(str, paths)))
    return loaded


def windows(tokens: Sequence[int], length: int) -> list[Sample]:
    """A long text as overlapping windows: each token is scored once, with at least half a window before it
    (but for the first window). The first token of all has no probability."""
    step = max(1, length // 2)
    samples = [Sample(list(tokens[:length]), [0] + [1] * (min(length, len(tokens)) - 1))]
    end = length
    while end < len(tokens):
        fresh = min(step, len(tokens) - end)
        end += fresh
        samples.append(Sample(list(tokens[end - length : end]), [0] * (length - fresh) + [1] * fresh))
    return samples


class _Maker:
    def __init__(self, tasks: Sequence[str], tokenizer: Any, seq_length: int) -> None:
        self.shapes = {shape: task for task in tasks for shape in SHAPES[task]}
        self.tokenizer = tokenizer
        self.seq_length = seq_length
        self.renderer = Renderer(tokenizer, seq_length) if tokenizer.chat_template else None

    def question(self, row: Row) -> Question:
        shape, _ = shapes.match(row, self.shapes)
        if shape == TEXT:
            return self._text(row)
        if self.renderer is None:
            raise InputError("the tokenizer has no chat template, and this row needs it", where=row.where, hint=_HINT)
        if self.shapes[shape] == "perplexity":
            found = shapes.conversation(row)
            samples = tuple(self.renderer.samples(found, row.where))
            return Question("perplexity", _name(row), row.line, samples, _shown(found.messages))
        if shape in shapes.PAIR_SHAPES:
            pair = shapes.pair(row)
            prompt, right = pair.prompt, 0
            answers = [pair.chosen[0]["content"], pair.rejected[0]["content"]]
        else:
            prompt, answers, right = choice(row)
        samples = tuple(
            self.renderer.answer(prompt, [{"role": "assistant", "content": answer}], row.where) for answer in answers
        )
        if len({tuple(sample.tokens) for sample in samples}) < len(samples):
            raise RowError("two choices are the same tokens", where=row.where)
        return Question(self.shapes[shape], _name(row), row.line, samples, _shown(prompt), tuple(answers), right)

    def _text(self, row: Row) -> Question:
        text = row.data["text"]
        if not isinstance(text, str):
            raise RowError(f"text is {kind(text)}, not text", where=row.where)
        tokens = list(self.tokenizer(text, verbose=False)["input_ids"])
        if len(tokens) < 2:
            raise RowError("has no token that follows another", where=row.where)
        return Question("perplexity", _name(row), row.line, tuple(windows(tokens, self.seq_length)), text)


_HINT = TEMPLATE_HINT


def choice(row: Row) -> tuple[list[Message], list[str], int]:
    """(prompt, candidates, index of the right one) of a choice row. Raises RowError."""
    shape, row = shapes.match(row, CHOICE_SHAPES)
    if "messages" in shape.needed:
        prompt = shapes.messages(row, "messages")
    else:
        system = row.data.get("system") or ""
        if not isinstance(system, str):
            raise RowError(f"system is {kind(system)}, not text", where=row.where)
        head = [{"role": "system", "content": system}] if system else []
        prompt = [*head, *shapes.side(row, "prompt", "user")]
    choices, answer = row.data["choices"], row.data["answer"]
    if not isinstance(choices, list) or len(choices) < 2:
        raise RowError("choices must be a list of at least two texts", where=row.where)
    for index, text in enumerate(choices):
        if not isinstance(text, str) or not text.strip():
            what = "empty" if isinstance(text, str) else f"{kind(text)}, not text"
            raise RowError(f"choices[{index}] is {what}", where=row.where)
    if len({text.strip() for text in choices}) < len(choices):
        raise RowError("two choices are the same", where=row.where)
    for text in choices:
        shapes.check(row, [*prompt, {"role": "assistant", "content": text}])
    if type(answer) is int and 0 <= answer < len(choices):
        return prompt, choices, answer
    if isinstance(answer, str) and answer in choices:
        return prompt, choices, choices.index(answer)
    raise RowError(
        f"answer is {answer!r}, neither one of the choices nor an index from 0 to {len(choices) - 1}", where=row.where
    )


def _name(row: Row) -> str:
    """The file's name without its directories: reports do not depend on where rows lie."""
    return Path(row.file).name


def _shown(messages: Sequence[Message]) -> str:
    if len(messages) == 1:
        return str(messages[0]["content"])
    return "\n".join(f"{message['role']}: {message['content']}" for message in messages)
