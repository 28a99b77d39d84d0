"""Rows and their shapes: what is accepted, and what is refused with its place and its reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mst_core.data import rows, shapes
from mst_core.data.order import Order
from mst_core.data.records import BadLine, Row
from mst_core.errors import InputError, RowError


def row(**data: Any) -> Row:
    return Row("rows.jsonl", 7, data)


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def bot(text: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def test_rows_have_their_line_and_blank_lines_are_none(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\n  \n{"b": "\xe2\x80\xa8"}')
    found = list(rows.read([path]))
    assert [(r.line, r.data) for r in found if isinstance(r, Row)] == [(1, {"a": 1}), (4, {"b": "\u2028"})]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{'a': 1}", "is not JSON"),
        (b'{"a": 1} {"a": 2}', "is not JSON"),
        (b"[1, 2]", "is a list, not an object"),
        (b'"text"', "is text, not an object"),
        (b'{"a": "\xff"}', "is not UTF-8 (byte 8)"),
        (b'{"a": NaN}', "NaN is no JSON value"),
        (b'{"a": 1, "a": 2}', "'a' stands twice"),
        (b'{"a": "\\ud800"}', "surrogate"),
        (b"[" * 200_000, "nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "is not JSON"),
    ],
)
def test_a_line_that_is_no_row(tmp_path: Path, line: bytes, reason: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"ok": 1}\n' + line + b"\n")
    good, bad = rows.read([path])
    assert isinstance(good, Row)
    assert isinstance(bad, BadLine)
    assert bad.error.where == f"{path}:2"
    assert reason in bad.error.what


def test_files_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "b.xml").write_bytes(b"<")
    (tmp_path / "c.jsonl").write_text("{}")
    for paths, what in (
        ([], "no file"),
        ([tmp_path / "none.jsonl"], "no such file"),
        ([tmp_path], "is not a file"),
        ([tmp_path / "b.xml"], r"not \.xml"),
        ([tmp_path / "c.jsonl", tmp_path / ".." / tmp_path.name / "c.jsonl"], "given twice"),
    ):
        with pytest.raises(InputError, match=what):
            list(rows.read(paths))


def test_digest_is_of_the_contents_in_order(tmp_path: Path) -> None:
    for name, text in (("a", "{}\n"), ("b", "{ }\n"), ("c", "{}\n")):
        (tmp_path / name).write_text(text)
    a, b, c = (tmp_path / name for name in "abc")
    assert rows.digest([a, b]) == rows.digest([c, b]) != rows.digest([b, a])


HELLO = [user("q"), bot("a")]


@pytest.mark.parametrize(
    ("data", "messages", "learn_from"),
    [
        ({"messages": HELLO}, HELLO, 0),
        ({"messages": HELLO, "id": 3, "source": "x", "output": None}, HELLO, 0),
        ({"instruction": "q", "output": "a"}, HELLO, 0),
        ({"instruction": "q", "input": None, "system": "", "history": None, "output": "a"}, HELLO, 0),
        ({"instruction": "q", "input": "more", "output": "a"}, [user("q\nmore"), bot("a")], 0),
        (
            {"instruction": "q2", "output": "a2", "system": "s", "history": [["q", "a"]]},
            [{"role": "system", "content": "s"}, *HELLO, user("q2"), bot("a2")],
            0,
        ),
        ({"query": "q", "response": "a"}, HELLO, 0),
        (
            {"query": "q2", "response": "a2", "history": [["q", "a"]], "system": "s", "tools": None},
            [{"role": "system", "content": "s"}, *HELLO, user("q2"), bot("a2")],
            0,
        ),
        ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}, HELLO, 0),
        (
            {"conversations": [{"from": "user", "value": "q"}, {"from": "assistant", "value": "a"}], "system": "s"},
            [{"role": "system", "content": "s"}, *HELLO],
            0,
        ),
        ({"conversations": HELLO, "tools": "[]"}, HELLO, 0),
        ({"messages": [{**user("q"), "loss": False}, {**bot("a"), "loss": True}]}, HELLO, 0),
        ({"messages": [{**user("q"), "loss": None}, {**bot("a"), "tool_calls": None}], "tools": []}, HELLO, 0),
        ({"prompt": "q", "completion": "a"}, HELLO, 1),
        ({"prompt": [*HELLO, user("q2")], "completion": [bot("a2")]}, [*HELLO, user("q2"), bot("a2")], 3),
        ({"prompt": "q", "completion": bot("a"), "system": "s"}, [{"role": "system", "content": "s"}, *HELLO], 2),
        ({"messages": [{"role": "system", "content": ""}, *HELLO]}, [{"role": "system", "content": ""}, *HELLO], 0),
    ],
)
def test_conversations(data: dict[str, Any], messages: list[dict[str, str]], learn_from: int) -> None:
    found = shapes.conversation(row(**data))
    assert (found.messages, found.learn_from) == (messages, learn_from)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ({"instruction": "q", "outptu": "a"}, "does not have output and has unknown 'outptu'; did you mean 'output'?"),
        ({"mesages": HELLO}, "did you mean 'messages'?"),
        ({"prompt": "q"}, "does not have completion"),
        ({"messages": HELLO, "prompt": "q"}, "unknown 'prompt'"),
        ({"instruction": "q", "output": None}, "does not have output"),
        ({}, "has none of the fields"),
        ({"conversations": []}, "conversations must be a list of messages, not an empty list"),
        ({"conversations": [{"from": "human", "value": "q"}]}, "ends with the user"),
        ({"conversations": [{"from": "bot", "value": "q"}]}, "conversations[0] has the role 'bot'; roles are human"),
        ({"conversations": [{"from": "human", "vlaue": "q"}]}, "did you mean 'value'?"),
        ({"conversations": HELLO, "system": "s", "messages": HELLO}, "unknown"),
        ({"query": "q", "respnse": "a"}, "did you mean 'response'?"),
        ({"query": "q", "response": ""}, "empty answer"),
        ({"query": "q", "response": "a", "history": [["q", "a", "b"]]}, "history[0] must be"),
        ({"messages": [{**user("q"), "loss": True}, bot("a")]}, "message 1 is the user's and has loss: true"),
        ({"messages": [user("q"), {**bot("a"), "loss": 0}]}, "message 2 has a loss that is a number"),
        ({"text": "a"}, "is a text, not a conversation; --stage cpt learns texts"),
        ({"messages": []}, "must be a list of messages, not an empty list"),
        ({"messages": "hello"}, "not text"),
        ({"messages": ["hello"]}, "messages[0] is text, not a message"),
        ({"messages": [user("q"), {"role": "gpt", "content": "a"}]}, "messages[1] has the role 'gpt'"),
        ({"messages": [user("q"), {"role": ["x"], "content": "a"}]}, "messages[1] has the role ['x']"),
        ({"messages": [user("q"), {"from": "gpt", "value": "a"}]}, "messages[1] has a key 'from'"),
        ({"messages": [user("q"), {"role": "assistant", "contnet": "a"}]}, "did you mean 'content'?"),
        ({"messages": [user("q"), {"role": "assistant"}]}, "messages[1] has no content"),
        ({"messages": [user("q"), bot(None)]}, "content that is null"),
        ({"messages": [user([{"type": "image"}, {"type": "text"}]), bot("a")]}, "content parts (image, text)"),
        ({"messages": [user("q"), bot("a"), user("q")]}, "ends with the user"),
        ({"messages": [user("q"), bot("a"), bot("b")]}, "message 3 is an answer of the assistant to nobody"),
        ({"messages": [bot("a")]}, "answer of the assistant to nobody"),
        ({"messages": [user("q"), user("q"), bot("a")]}, "messages 1 and 2 are both the user's"),
        ({"messages": [user("q"), {"role": "system", "content": "s"}, bot("a")]}, "only the first may be"),
        ({"messages": [user("q"), bot(" \n")]}, "empty answer"),
        ({"messages": [user(""), bot("a")]}, "empty question"),
        ({"instruction": "q", "output": ""}, "empty answer"),
        ({"instruction": 3, "output": "a"}, "instruction is a number, not text"),
        ({"instruction": "q", "output": "a", "history": ["q"]}, "history[0] must be"),
        ({"instruction": "q", "output": "a", "history": "q"}, "history is text"),
        ({"prompt": HELLO, "completion": "a"}, "prompt ends with the assistant"),
        ({"prompt": [{"role": "system", "content": "s"}, user("q")], "system": "s", "completion": "a"}, "system"),
    ],
)
def test_refused_conversations(data: dict[str, Any], reason: str) -> None:
    with pytest.raises(RowError) as error:
        shapes.conversation(row(**data))
    assert error.value.where == "rows.jsonl:7"
    assert reason in error.value.what


@pytest.mark.parametrize(
    "data",
    [
        {"prompt": "q", "chosen": "a", "rejected": "b"},
        {"prompt": [user("q")], "chosen": [bot("a")], "rejected": bot("b")},
        {"prompt": "q", "chosen": [user("q"), bot("a")], "rejected": [user("q"), bot("b")]},
        {"chosen": [user("q"), bot("a")], "rejected": [user("q"), bot("b")]},
        {"instruction": "q", "chosen": "a", "rejected": "b", "input": ""},
        {
            "conversations": [{"from": "human", "value": "q"}],
            "chosen": {"from": "gpt", "value": "a"},
            "rejected": {"from": "gpt", "value": "b"},
        },
        {"messages": [user("q"), bot("a")], "rejected_response": "b"},
        {"messages": [user("q"), bot("a")], "rejected_messages": [user("q"), bot("b")]},
        {"messages": [user("q"), bot("a")], "rejected_messages": [bot("b")]},
    ],
)
def test_pairs(data: dict[str, Any]) -> None:
    assert shapes.pair(row(**data)) == shapes.Pair([user("q")], [bot("a")], [bot("b")])


def test_a_pair_may_share_earlier_answers() -> None:
    found = shapes.pair(row(chosen=[*HELLO, user("r"), bot("a")], rejected=[*HELLO, user("r"), bot("b")]))
    assert found == shapes.Pair([*HELLO, user("r")], [bot("a")], [bot("b")])


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ({"prompt": "q", "chosen": "a", "rejected": "a "}, "are the same"),
        ({"chosen": HELLO, "rejected": HELLO}, "are the same"),
        ({"chosen": "a", "rejected": "b"}, "share no beginning"),
        ({"prompt": "q", "chosen": "a", "rejectd": "b"}, "did you mean 'rejected'?"),
        ({"prompt": "q", "instruction": "q", "chosen": "a", "rejected": "b"}, "unknown 'instruction'"),
        ({"prompt": "q", "chosen": [user("x"), bot("a")], "rejected": "b"}, "chosen must be one answer"),
        ({"prompt": "q", "chosen": [user("q")], "rejected": "b"}, "not nothing"),
        ({"prompt": "q", "chosen": "", "rejected": "b"}, "empty answer"),
        ({"prompt": HELLO, "chosen": "a", "rejected": "b"}, "to nobody"),
        ({"prompt": "q", "chosen": {**bot("a"), "loss": False}, "rejected": "b"}, "has messages with loss"),
        ({"prompt": "q", "chosen": {"from": "gpt", "value": "a"}, "rejected": "b"}, "a key 'from'"),
        ({"chosen": [user("q"), bot("a")], "rejected": [user("r"), bot("b")]}, "share no beginning"),
        ({"chosen": [user("q"), bot("a")], "rejected": [user("q"), user("b")]}, "not user"),
        ({"messages": [user("q")], "rejected_response": "b"}, "chosen must be one answer"),
        ({"messages": [user("q"), bot("a")], "rejected_response": "a"}, "are the same"),
    ],
)
def test_refused_pairs(data: dict[str, Any], reason: str) -> None:
    with pytest.raises(RowError, match=reason):
        shapes.pair(row(**data))


def test_judged_answers() -> None:
    for shape in (
        {"prompt": "q", "completion": "a"},
        {"messages": [user("q"), bot("a")]},
        {"query": "q", "response": "a"},
    ):
        found, label = shapes.judged(row(**shape, label=False))
        assert (found.messages, label) == ([user("q"), bot("a")], False)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ({"prompt": "q", "completion": "a"}, "does not have label"),
        ({"prompt": "q", "completion": "a", "label": "true"}, "label must be true or false, not text"),
        ({"prompt": "q", "completion": "a", "label": 0}, "not a number"),
        ({"prompt": "q", "completion": "a", "label": None}, "not null"),
        ({"messages": [user("q"), {**bot("a"), "loss": False}], "label": True}, "loss: false"),
    ],
)
def test_refused_judged_answers(data: dict[str, Any], reason: str) -> None:
    with pytest.raises(RowError, match=reason):
        shapes.judged(row(**data))


def test_order_is_a_permutation_that_never_changes() -> None:
    order = Order(10, seed=3)
    assert sorted(order.epoch(0)) == sorted(order.epoch(1)) == list(range(10))
    assert order.epoch(0) != order.epoch(1)
    assert Order(10, 4).epoch(0) != order.epoch(0)
    # Golden: a run resumed years later, on another machine, sees the same rows.
    assert order.epoch(0) == [1, 7, 2, 9, 3, 8, 0, 6, 4, 5]


def test_batches_drop_no_row_and_resume_anywhere() -> None:
    order = Order(7, seed=0)
    stream = order.batches(3)
    batches = [next(stream) for _ in range(9)]
    assert [len(batch) for batch in batches] == [3, 3, 1] * 3
    for epoch in range(3):
        assert [i for batch in batches[3 * epoch : 3 * epoch + 3] for i in batch] == order.epoch(epoch)
    for start in range(9):
        resumed = order.batches(3, start=start)
        assert [next(resumed) for _ in range(9 - start)] == batches[start:]
    assert list(Order(0, 0).batches(4)) == []


def test_labels_do_not_hide_a_misspelling() -> None:
    with pytest.raises(RowError, match="unknown 'sorce'"):
        shapes.conversation(row(messages=HELLO, sorce="x"))
