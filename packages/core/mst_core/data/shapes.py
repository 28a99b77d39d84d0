"""The shapes of rows that users have, as conversations and pairs.

    messages      {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
    alpaca        {"instruction": "...", "input": "...", "output": "...", "system": "...", "history": [["q", "a"]]}
    prompt        {"prompt": "..." or messages, "completion": "..." or messages}
    pairs         {"prompt": "..." or messages, "chosen": "..." or messages, "rejected": "..." or messages}
                  ("instruction" and "input" may stand for the prompt, and without any prompt it is what both share)

A field that no shape knows is an error: a misspelt ``outptu`` would otherwise be a row without an answer. Fields that
only describe a row (LABELS) are allowed.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from mst_core.data.rows import Row
from mst_core.errors import RowError

Message = dict[str, str]
ROLES = ("system", "user", "assistant", "tool")
LABELS = ("id", "source", "dataset", "category", "tags", "meta", "metadata")
"""Fields that describe a row and do not change what is learnt from it."""
SFT_SHAPES = (
    ("messages", ("messages",), ()),
    ("alpaca", ("instruction", "output"), ("input", "system", "history")),
    ("prompt/completion", ("prompt", "completion"), ("system",)),
)
PAIR_FIELDS = ("prompt", "instruction", "input", "system", "chosen", "rejected")


@dataclass(frozen=True)
class Pair:
    """A prompt with a better and a worse answer, each as messages."""

    prompt: list[Message]
    chosen: list[Message]
    rejected: list[Message]


def conversation(row: Row) -> list[Message]:
    """The messages of an SFT row; the last is the assistant's. Raises RowError with the reason."""
    data = row.data
    for name, needed, optional in SFT_SHAPES:
        if needed[0] in data:
            _only(row, needed, optional, name)
            break
    else:
        known = sorted({field for _, needed, optional in SFT_SHAPES for field in (*needed, *optional)})
        raise RowError(f"has no messages, instruction or prompt{_meant(data, known)}", where=row.where)
    if name == "messages":
        messages = _messages(row, "messages")
    elif name == "alpaca":
        messages = [*_system(row), *_history(row), _user(_instruction(row)), _answer(_text(row, "output"))]
    else:
        messages = [*_system(row), *_side(row, "prompt", "user"), *_side(row, "completion", "assistant")]
    return _checked(row, messages)


def pair(row: Row) -> Pair:
    """The prompt and both answers of a preference row. Raises RowError with the reason."""
    data = row.data
    _only(row, ("chosen", "rejected"), ("prompt", "instruction", "input", "system"), "pair")
    chosen, rejected = _side(row, "chosen", "assistant"), _side(row, "rejected", "assistant")
    if "prompt" in data and "instruction" in data:
        raise RowError("has both prompt and instruction: which one is the prompt?", where=row.where)
    if "prompt" in data:
        prompt = _side(row, "prompt", "user")
    elif "instruction" in data:
        prompt = [_user(_instruction(row))]
    else:
        shared = next((i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), 0)
        prompt = chosen[:shared]
        if not prompt:
            raise RowError("has no prompt, and chosen and rejected share no beginning", where=row.where)
    # Answers given as whole conversations repeat the prompt: what follows it is the answer.
    chosen = chosen[len(prompt) :] if chosen[: len(prompt)] == prompt else chosen
    rejected = rejected[len(prompt) :] if rejected[: len(prompt)] == prompt else rejected
    prompt = [*_system(row), *prompt]
    if chosen == rejected:
        raise RowError("chosen and rejected are the same", where=row.where)
    for answer in (chosen, rejected):
        _checked(row, [*prompt, *answer])
    if len(chosen) != 1 or len(rejected) != 1:
        raise RowError("chosen and rejected must each be one answer after the prompt", where=row.where)
    return Pair(prompt, chosen, rejected)


def _only(row: Row, needed: Iterable[str], optional: Iterable[str], shape: str) -> None:
    allowed = {*needed, *optional}
    unknown = [field for field in row.data if field not in allowed and field not in LABELS]
    missing = [field for field in needed if field not in row.data]
    if unknown:
        raise RowError(
            f"has a field {unknown[0]!r} that {shape} rows do not have{_meant(unknown, allowed)}", where=row.where
        )
    if missing:
        raise RowError(f"is a {shape} row without {' and '.join(missing)}", where=row.where)


def _meant(fields: Iterable[str], known: Iterable[str]) -> str:
    known = sorted(known)
    for field in fields:
        if close := difflib.get_close_matches(field, known, n=1, cutoff=0.6):
            return f"; did you mean {close[0]!r}?" if close[0] != field else ""
    return ""


def _text(row: Row, field: str, *, optional: bool = False) -> str:
    value = row.data.get(field)
    if value is None and optional:
        return ""
    if not isinstance(value, str):
        raise RowError(f"{field} is {_kind(value)}, not text", where=row.where)
    return value


def _kind(value: Any) -> str:
    return "null" if value is None else f"a {type(value).__name__}"


def _instruction(row: Row) -> str:
    extra = _text(row, "input", optional=True)
    return _text(row, "instruction") + (f"\n{extra}" if extra else "")


def _system(row: Row) -> list[Message]:
    text = _text(row, "system", optional=True)
    return [{"role": "system", "content": text}] if text else []


def _history(row: Row) -> list[Message]:
    messages: list[Message] = []
    for turn in row.data.get("history") or []:
        if not isinstance(turn, list) or len(turn) != 2 or not all(isinstance(text, str) for text in turn):
            raise RowError("history must be a list of [question, answer]", where=row.where)
        messages += [_user(turn[0]), _answer(turn[1])]
    return messages


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _answer(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _side(row: Row, field: str, role: str) -> list[Message]:
    """A field that is text (of ``role``) or messages."""
    value = row.data.get(field)
    if isinstance(value, list):
        return _messages(row, field)
    return [{"role": role, "content": _text(row, field)}]


def _messages(row: Row, field: str) -> list[Message]:
    value = row.data[field]
    if not isinstance(value, list) or not value:
        raise RowError(
            f"{field} must be a list of messages, it is {_kind(value) if value else 'empty'}", where=row.where
        )
    messages = []
    for index, message in enumerate(value):
        place = f"{field}[{index}]"
        if not isinstance(message, dict):
            raise RowError(f"{place} is {_kind(message)}, not a message", where=row.where)
        for key in message:
            if key not in ("role", "content"):
                meant = _meant([key], ("role", "content"))
                raise RowError(f"{place} has a key {key!r} that a text message does not have{meant}", where=row.where)
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise RowError(f"{place} has the role {role!r}; roles are {', '.join(ROLES)}", where=row.where)
        if isinstance(content, list):
            raise RowError(f"{place} has content parts (images?); only text is learnt here", where=row.where)
        if not isinstance(content, str):
            raise RowError(f"{place} has content that is {_kind(content)}, not text", where=row.where)
        messages.append({"role": role, "content": content})
    return messages


def _checked(row: Row, messages: list[Message]) -> list[Message]:
    """Refuse an order of roles that no template means, and answers without text."""
    if messages[-1]["role"] != "assistant":
        raise RowError(f"ends with the {messages[-1]['role']}: there is no answer to learn", where=row.where)
    before = ""
    for index, message in enumerate(messages):
        role = message["role"]
        if role == "system" and index:
            raise RowError("has a system message that is not the first", where=row.where)
        if role == "assistant" and before not in ("user", "tool"):
            raise RowError("has an assistant's turn that answers nobody", where=row.where)
        if role == "user" and before == "user":
            raise RowError("has two user turns in a row", where=row.where)
        if role == "assistant" and not message["content"].strip():
            raise RowError("has an empty answer", where=row.where)
        before = role
    return messages
