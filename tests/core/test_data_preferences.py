"""Preference rows: every shape gives the same pair, what repeats or contradicts is told with its place, margins."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mst_core.data import load, sources
from mst_core.data.render import Renderer, load_tokenizer
from mst_core.engine.batches import collate, interleave
from mst_core.errors import RowError

ASK, GOOD, BAD = (
    {"role": role, "content": text} for role, text in (("user", "q"), ("assistant", "a"), ("assistant", "b"))
)
SHARE_GPT = {"conversations": [{"from": "human", "value": "q"}]}
SHAPES: list[dict[str, Any]] = [
    {"prompt": "q", "chosen": "a", "rejected": "b"},
    {"prompt": [ASK], "chosen": [GOOD], "rejected": [BAD]},
    {"prompt": "q", "chosen": [ASK, GOOD], "rejected": [ASK, BAD]},
    {"chosen": [ASK, GOOD], "rejected": [ASK, BAD]},
    {"messages": [ASK, GOOD], "rejected_response": "b"},
    {"messages": [ASK, GOOD], "rejected_messages": [ASK, BAD]},
    {**SHARE_GPT, "chosen": {"from": "gpt", "value": "a"}, "rejected": {"from": "gpt", "value": "b"}},
    {"instruction": "q", "input": "", "chosen": "a", "rejected": "b"},
]


@pytest.fixture
def model(tiny_hf: Callable[..., Path]) -> Path:
    return tiny_hf("llama")


@pytest.fixture
def renderer(model: Path) -> Renderer:
    return Renderer(load_tokenizer(model), 200)


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def told(loaded: load.Loaded[Any], capsys: pytest.CaptureFixture[str]) -> list[str]:
    loaded.report("rows")
    return [line for line in capsys.readouterr().err.splitlines() if "warning" in line]


def test_every_shape_is_the_same_pair(renderer: Renderer, tmp_path: Path) -> None:
    """With a margin or without: all are copies of the first."""
    rows = [*SHAPES, *({**row, "margin": number} for number, row in enumerate(SHAPES))]
    found = load.pairs([write(tmp_path / "rows.jsonl", rows)], renderer)
    tokens = [[answer.tokens for answer in pair] for pair in found.samples]
    assert tokens == [tokens[0]] * 16
    assert [chosen.margin for chosen, _ in found.samples] == [None] * 8 + [float(number) for number in range(8)]
    assert found.preferences["copies"]["count"] == 15
    assert found.preferences["margins"] == 8


def test_copies_contradictions_and_equal_answers_are_told(
    renderer: Renderer, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = write(tmp_path / "one.jsonl", [SHAPES[0], {"prompt": "q", "chosen": "a", "rejected": "a "}, SHAPES[1]])
    turned = {"prompt": "q", "chosen": "b", "rejected": "a"}
    other = {"prompt": "r", "chosen": "b", "rejected": "a"}
    two = tmp_path / "two.json"
    two.write_text(json.dumps([other, turned, turned, SHAPES[2], SHAPES[3]]))
    given, cache = sources.resolve([one, two]), load.Cache(tmp_path / "cache", model)
    with pytest.raises(RowError, match=f"1 of 8 rows cannot be used:\n  {one}:2: chosen and rejected are the same"):
        load.pairs(given, renderer)
    copies = f"{one}:3 (of {one}:1), {two}: row 3 (of {two}: row 2), {two}: row 4 (of {one}:1), ..."
    for found in (load.pairs(given, renderer, "skip"), *(load.pairs(given, renderer, "skip", cache) for _ in "ab")):
        assert found.preferences["contradictions"] == {
            "count": 4,
            "first": [
                f"{two}: row 2 (of {one}:1)", f"{two}: row 3 (of {one}:1)", f"{two}: row 4 (of {two}: row 2)",
            ],
        }  # fmt: skip
        copied, contradicted, equal, aside = told(found, capsys)
        assert copied.endswith(f"rows: 4 copies of earlier ones, which are kept: {copies}")
        assert contradicted.startswith("warning: rows: 4 contradictions of earlier ones (answers exchanged")
        assert equal.endswith(f"1 pairs with two equal answers, which teach nothing and were set aside: {one}:2")
        assert "1 of 8 rows were set aside" in aside
        assert len(found.samples) == 7


def test_the_places_are_those_of_the_files_as_they_are_called_now(
    renderer: Renderer, model: Path, tmp_path: Path
) -> None:
    cache = load.Cache(tmp_path / "cache", model)
    path = write(tmp_path / "a.jsonl", [SHAPES[0]] * 2)
    load.pairs([path], renderer, cache=cache)
    moved = path.rename(tmp_path / "b.jsonl")
    assert load.pairs([moved], renderer, cache=cache).preferences["copies"]["first"] == [f"{moved}:2 (of {moved}:1)"]
    assert len(list((tmp_path / "cache" / "rows").iterdir())) == 1


def test_an_answer_that_is_good_and_bad(renderer: Renderer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"prompt": "q", "completion": "a"}
    rows = [{**row, "label": True}, {"prompt": "r", "completion": "a", "label": False}, {**row, "label": False}]
    path = write(tmp_path / "rows.jsonl", [*rows, {"messages": [ASK, GOOD], "label": True}])
    copied, contradicted = told(load.judged([path], renderer), capsys)
    assert copied.endswith(f"1 copies of earlier ones, which are kept: {path}:4 (of {path}:1)")
    assert contradicted.endswith(f": {path}:3 (of {path}:1), {path}:4 (of {path}:3)")


def test_nothing_is_told_of_rows_that_differ(
    renderer: Renderer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": "q", "chosen": "a", "rejected": "b"}, {"prompt": "q", "chosen": "a", "rejected": "c"}]
    assert told(load.pairs([write(tmp_path / "rows.jsonl", rows)], renderer), capsys) == []


def test_margins_come_through_the_cache_to_the_batch(renderer: Renderer, model: Path, tmp_path: Path) -> None:
    rows = [{**SHAPES[0], "margin": margin} for margin in (0.3, None, 0, -2)]
    path = write(tmp_path / "rows.jsonl", rows)
    found = load.pairs([path], renderer, cache=load.Cache(tmp_path / "cache", model))
    assert list(found.samples) == list(load.pairs([path], renderer).samples)
    assert [chosen.margin for chosen, _ in found.samples] == [0.3, None, 0.0, -2.0]
    assert found.preferences["margins"] == 3
    batch = collate(interleave(found.samples))
    torch.testing.assert_close(batch.extra["margin_B"], torch.tensor([0.3, 0, 0, 0, 0, 0, -2, 0]))
    assert "margin_B" not in collate(interleave(found.samples[1:2])).extra


@pytest.mark.parametrize(
    ("margin", "reason"),
    [("true", "true or false, not a number"), ('"1"', "text, not a number"), ("[1]", "a list, not a number"),
     ("1e999", "no finite number"), ("-1e39", "no finite number"), ("9" * 400, "no finite number"),
     ("NaN", "is not JSON: NaN is no JSON value")],
)  # fmt: skip
def test_a_margin_is_a_finite_number(renderer: Renderer, tmp_path: Path, margin: str, reason: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{json.dumps(SHAPES[0])}\n{{"prompt": "q", "chosen": "a", "rejected": "b", "margin": {margin}}}\n')
    with pytest.raises(RowError, match=f"rows.jsonl:2: .*{reason}"):
        load.pairs([path], renderer)


@pytest.mark.parametrize("label", ['"true"', "0", "1", "null", "1.0", "[]"])
def test_a_label_is_true_or_false(renderer: Renderer, tmp_path: Path, label: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f'\n{{"prompt": "q", "completion": "a", "label": {label}}}\n')
    with pytest.raises(RowError, match=r"rows\.jsonl:2: label must be true or false, not"):
        load.judged([path], renderer)


def test_tables_have_labels_and_margins_too(renderer: Renderer, tmp_path: Path) -> None:
    (tmp_path / "judged.csv").write_text("prompt,completion,label\nq,a,true\nq,b,false\n")
    assert [sample.desirable for sample in load.judged([tmp_path / "judged.csv"], renderer).samples] == [True, False]
    (tmp_path / "pairs.csv").write_text("prompt,chosen,rejected,margin\nq,a,b,0.5\nq,a,c,\n")
    found = load.pairs([tmp_path / "pairs.csv"], renderer).samples
    assert [chosen.margin for chosen, _ in found] == [0.5, None]
    (tmp_path / "judged.csv").write_text("prompt,completion,label\nq,a,True\n")
    with pytest.raises(RowError, match=r"judged\.csv:2: label is not JSON"):
        load.judged([tmp_path / "judged.csv"], renderer)
