"""The shapes of rows that users have, as conversations and pairs.

    messages      {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
    alpaca        {"instruction": "...", "input": "...", "output": "...", "system": "...", "history": [["q", "a"]]}
    prompt        {"prompt": "..." or messages, "completion": "..." or messages, "system": "..."}
    pairs         {"prompt": "..." or messages, "chosen": "..." or messages, "rejected": "..." or messages}
                  ("instruction" and "input" may stand for the prompt, and without any prompt it is what both share)

A field that no shape knows is an error: a misspelt ``outptu`` would otherwise be a row without an answer. Fields that
only describe a row (LABELS) are allowed. A field that is null is a field that is absent: tools that write tables fill
the columns a row does not have.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mst_core.data.records import Row, kind
from mst_core.errors import RowError

Message = dict[str, str]
ROLES = ("system", "user", "assistant")
LABELS = ("id", "source", "dataset", "category", "tags", "meta", "metadata")
"""Fields that describe a row and do not change what is learnt from it."""


@dataclass(frozen=True)
class Shape:
    """The fields of one kind of row."""

    name: str
    needed: tuple[str, ...]
    optional: tuple[str, ...] = ()

    @property
    def fields(self) -> tuple[str, ...]:
        return (*self.needed, *self.optional)


SFT_SHAPES = (
    Shape("messages", ("messages",)),
    Shape("alpaca", ("instruction", "output"), ("input", "system", "history")),
    Shape("prompt/completion", ("prompt", "completion"), ("system",)),
)
PAIR_SHAPES = (
    Shape("prompt/chosen/rejected", ("prompt", "chosen", "rejected"), ("system",)),
    Shape("instruction/chosen/rejected", ("instruction", "chosen", "rejected"), ("input", "system", "history")),
    Shape("chosen/rejected", ("chosen", "rejected")),
)


@dataclass(frozen=True)
class Conversation:
    """Messages of which the last is the assistant's. Assistant turns before ``learn_from`` are context only."""

    messages: list[Message]
    learn_from: int = 0


@dataclass(frozen=True)
class Pair:
    """A prompt with a better and a worse answer, each as messages."""

    prompt: list[Message]
    chosen: list[Message]
    rejected: list[Message]


def conversation(row: Row) -> Conversation:
    """The messages of an SFT row. Raises RowError with the reason."""
    if "text" in row.data and not set(row.data) & {field for shape in SFT_SHAPES for field in shape.needed}:
        raise RowError("is a text, not a conversation; --stage cpt learns texts", where=row.where)
    shape, row = match(row, SFT_SHAPES)
    if shape.name == "messages":
        return Conversation(check(row, messages(row, "messages")))
    if shape.name == "alpaca":
        answer = {"role": "assistant", "content": _text(row, "output")}
        return Conversation(check(row, [*_alpaca_prompt(row), answer]))
    prompt = [*_system(row), *side(row, "prompt", "user")]
    completion = side(row, "completion", "assistant")
    if prompt[-1]["role"] != "user":
        raise RowError(f"prompt ends with the {prompt[-1]['role']}, not the user", where=row.where)
    return Conversation(check(row, [*prompt, *completion]), learn_from=len(prompt))


def pair(row: Row) -> Pair:
    """The prompt and both answers of a preference row. Raises RowError with the reason."""
    shape, row = match(row, PAIR_SHAPES)
    chosen, rejected = side(row, "chosen", "assistant"), side(row, "rejected", "assistant")
    if "prompt" in shape.needed:
        prompt = [*_system(row), *side(row, "prompt", "user")]
    elif "instruction" in shape.needed:
        prompt = _alpaca_prompt(row)
    else:
        shared = next((i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), None)
        if shared is None:
            raise RowError("chosen and rejected are the same, or one begins with the other", where=row.where)
        prompt = chosen[:shared]
        if not prompt:
            raise RowError("has no prompt, and chosen and rejected share no beginning", where=row.where)
    chosen, rejected = _after(prompt, chosen), _after(prompt, rejected)
    for name, answer in (("chosen", chosen), ("rejected", rejected)):
        if len(answer) != 1 or answer[0]["role"] != "assistant":
            roles = ", ".join(message["role"] for message in answer) or "nothing"
            raise RowError(f"{name} must be one answer of the assistant after the prompt, not {roles}", where=row.where)
        check(row, [*prompt, *answer])
    if chosen[0]["content"].strip() == rejected[0]["content"].strip():
        raise RowError("chosen and rejected are the same", where=row.where)
    return Pair(prompt, chosen, rejected)


def match(row: Row, shapes: Iterable[Shape]) -> tuple[Shape, Row]:
    """The shape a row is of, and the row without null and descriptive fields.

    Raises RowError naming unknown and missing fields, with what was probably meant.
    """
    shapes = tuple(shapes)
    known = {field for shape in shapes for field in shape.fields}
    given = {name: value for name, value in row.data.items() if not (value is None and name in known)}
    names = [name for name in given if name not in LABELS or name in known]

    def faults(shape: Shape) -> tuple[list[str], list[str]]:
        unknown = [name for name in names if name not in shape.fields]
        return unknown, [name for name in shape.needed if name not in names]

    best = min(shapes, key=lambda shape: (sum(map(len, faults(shape))), -len(set(names) & set(shape.fields))))
    unknown, missing = faults(best)
    if not unknown and not missing:
        return best, replace(row, data={name: given[name] for name in names})
    if not set(names) & known:
        shown = "; ".join(" ".join(shape.needed) for shape in shapes)
        meant = _meant(names, known)
        raise RowError(f"has none of the fields of a row ({shown}){meant}", where=row.where)
    parts = [f"does not have {', '.join(missing)}"] if missing else []
    if unknown:
        # A field that stands in the place of a missing one is the likelier misspelling.
        parts.append(f"has unknown {', '.join(map(repr, unknown))}{_meant(unknown, missing or best.fields)}")
    raise RowError(f"as a row of {best.name} it {' and '.join(parts)}", where=row.where)


def messages(row: Row, field: str) -> list[Message]:
    """A field that holds messages, each of a known role and with text. Raises RowError naming the message."""
    value = row.data[field]
    if not isinstance(value, list) or not value:
        what = "an empty list" if value == [] else kind(value)
        raise RowError(f"{field} must be a list of messages, not {what}", where=row.where)
    return [_message(row, f"{field}[{index}]", message) for index, message in enumerate(value)]


def side(row: Row, field: str, role: str) -> list[Message]:
    """A field that is text (of ``role``), one message, or messages."""
    value = row.data[field]
    if isinstance(value, list):
        return messages(row, field)
    if isinstance(value, dict):
        return [_message(row, field, value)]
    return [{"role": role, "content": _text(row, field)}]


def check(row: Row, found: list[Message]) -> list[Message]:
    """Refuse orders of roles that no template means, and turns without text. The last must be the assistant's."""
    if found[-1]["role"] != "assistant":
        raise RowError(f"ends with the {found[-1]['role']}: there is no answer to learn", where=row.where)
    before = ""
    for index, message in enumerate(found):
        role = message["role"]
        if role == "system" and index:
            raise RowError(f"message {index + 1} is a system message, which only the first may be", where=row.where)
        if role == "assistant" and before != "user":
            raise RowError(f"message {index + 1} is an answer of the assistant to nobody", where=row.where)
        if role == "user" and before == "user":
            raise RowError(f"messages {index} and {index + 1} are both the user's", where=row.where)
        # An empty system message is meant: it keeps a template from writing its own.
        if role != "system" and not message["content"].strip():
            raise RowError(
                f"has an empty {'answer' if role == 'assistant' else 'question'} (message {index + 1})", where=row.where
            )
        before = role
    return found


def _message(row: Row, place: str, message: Any) -> Message:
    if not isinstance(message, dict):
        raise RowError(f"{place} is {kind(message)}, not a message", where=row.where)
    missing = [key for key in ("role", "content") if key not in message]
    for key in message:
        if key not in ("role", "content"):
            meant = _meant([key], missing)
            raise RowError(f"{place} has a key {key!r} that a text message does not have{meant}", where=row.where)
    if missing:
        raise RowError(f"{place} has no {' and no '.join(missing)}", where=row.where)
    role, content = message["role"], message["content"]
    if role not in ROLES:
        raise RowError(f"{place} has the role {role!r}; roles are {', '.join(ROLES)}", where=row.where)
    if isinstance(content, list):
        parts = sorted({str(part.get("type")) if isinstance(part, Mapping) else kind(part) for part in content})
        raise RowError(f"{place} has content parts ({', '.join(parts)}); only text is learnt here", where=row.where)
    if not isinstance(content, str):
        raise RowError(f"{place} has content that is {kind(content)}, not text", where=row.where)
    return {"role": role, "content": content}


def _meant(fields: Iterable[str], known: Iterable[str]) -> str:
    known = sorted(known)
    for field in fields:
        close = difflib.get_close_matches(field, known, n=1, cutoff=0.6)
        if close and close[0] != field:
            return f"; did you mean {close[0]!r}?"
    return ""


def _text(row: Row, field: str) -> str:
    value = row.data.get(field, "")
    if not isinstance(value, str):
        raise RowError(f"{field} is {kind(value)}, not text", where=row.where)
    return value


def _alpaca_prompt(row: Row) -> list[Message]:
    """System, history, and instruction and input joined by a newline (as LLaMA-Factory and ms-swift do)."""
    found = _system(row)
    history = row.data.get("history", [])
    if not isinstance(history, list):
        raise RowError(f"history is {kind(history)}, not a list", where=row.where)
    for index, turn in enumerate(history):
        if not isinstance(turn, list) or len(turn) != 2 or not all(isinstance(text, str) for text in turn):
            raise RowError(f"history[{index}] must be [question, answer]", where=row.where)
        found += [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]
    parts = [text for text in (_text(row, "instruction"), _text(row, "input")) if text]
    return [*found, {"role": "user", "content": "\n".join(parts)}]


def _system(row: Row) -> list[Message]:
    text = _text(row, "system")
    return [{"role": "system", "content": text}] if text else []


def _after(prompt: list[Message], answer: list[Message]) -> list[Message]:
    """Answers given as whole conversations repeat the prompt: what follows it is the answer."""
    return answer[len(prompt) :] if answer[: len(prompt)] == prompt else answer
