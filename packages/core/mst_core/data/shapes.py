"""The shapes of rows that users have, as conversations and pairs.

    messages      {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
    sharegpt      {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}
    alpaca        {"instruction": "...", "input": "...", "output": "...", "system": "...", "history": [["q", "a"]]}
    query         {"query": "...", "response": "...", "system": "...", "history": [["q", "a"]]}
    prompt        {"prompt": "..." or messages, "completion": "..." or messages, "system": "..."}
                  (each of these may have "tools": a list or its JSON; tools.py)
    pairs         {"prompt": "..." or messages, "chosen": "..." or messages, "rejected": "..." or messages}
                  ("instruction" and "input" may stand for the prompt, and without any prompt it is what both share;
                  or messages with "rejected_response": "..." or "rejected_messages"; each may have "margin": a number)
    judged        one of the first five with "label": true or false

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
from mst_core.data.tools import called, calls, tools
from mst_core.errors import RowError

Message = dict[str, Any]
"""role and content (text); an assistant's may have tool_calls."""
ROLES = ("system", "user", "assistant", "tool")
FROM = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "function_call": "call",
    "tool_call": "call",
    "observation": "tool",
    "tool": "tool",
    "tool_response": "tool",
    "function_response": "tool",
}
"""ShareGPT's names of roles; a call is an assistant's message whose value is the JSON of what it calls."""
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
    Shape("messages", ("messages",), ("tools",)),
    Shape("sharegpt", ("conversations",), ("system", "tools")),
    Shape("alpaca", ("instruction", "output"), ("input", "system", "history", "tools")),
    Shape("query/response", ("query", "response"), ("system", "history", "tools")),
    Shape("prompt/completion", ("prompt", "completion"), ("system", "tools")),
)
PAIR_SHAPES = (
    Shape("prompt/chosen/rejected", ("prompt", "chosen", "rejected"), ("system", "margin")),
    Shape("conversations/chosen/rejected", ("conversations", "chosen", "rejected"), ("system", "margin")),
    Shape(
        "instruction/chosen/rejected", ("instruction", "chosen", "rejected"), ("input", "system", "history", "margin")
    ),
    Shape("chosen/rejected", ("chosen", "rejected"), ("margin",)),
    Shape("messages/rejected_response", ("messages", "rejected_response"), ("system", "margin")),
    Shape("messages/rejected_messages", ("messages", "rejected_messages"), ("system", "margin")),
)
SAME = "chosen and rejected are the same"
"""Why a pair teaches nothing."""
LARGEST = 3.4e38
"""Of fp32, in which margins are."""


@dataclass(frozen=True)
class Conversation:
    """Messages of which the last is the assistant's. Assistant turns before ``learn_from``, and the ``silent`` ones
    (``"loss": false``), are context only."""

    messages: list[Message]
    learn_from: int = 0
    silent: frozenset[int] = frozenset()
    tools: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Pair:
    """A prompt with a better and a worse answer, each as messages, and by how much the first is better."""

    prompt: list[Message]
    chosen: list[Message]
    rejected: list[Message]
    margin: float | None = None


def conversation(row: Row) -> Conversation:
    """The messages of an SFT row. Raises RowError with the reason."""
    if "text" in row.data and not set(row.data) & {field for shape in SFT_SHAPES for field in shape.needed}:
        raise RowError("is a text, not a conversation; --stage cpt learns texts", where=row.where)
    shape, row = match(row, SFT_SHAPES)
    learn_from = 0
    if shape.name == "messages":
        found = messages(row, "messages")
    elif shape.name == "sharegpt":
        found = [*_system(row), *messages(row, "conversations")]
    elif shape.name == "prompt/completion":
        prompt = [*_system(row), *side(row, "prompt", "user")]
        if prompt[-1]["role"] not in ("user", "tool"):
            raise RowError(f"prompt ends with the {prompt[-1]['role']}, not the user", where=row.where)
        found, learn_from = [*prompt, *side(row, "completion", "assistant")], len(prompt)
    else:
        asked, answer = ("instruction", "output") if shape.name == "alpaca" else ("query", "response")
        found = [*_asked(row, asked), {"role": "assistant", "content": _text(row, answer)}]
    found, silent = _losses(row, found)
    return Conversation(check(row, found), learn_from, silent, tools(row))


def pair(row: Row) -> Pair:
    """The prompt and both answers of a preference row. Raises RowError with the reason."""
    shape, row = match(row, PAIR_SHAPES)
    if "messages" in shape.needed:
        whole = [*_system(row), *messages(row, "messages")]
        prompt, chosen, rejected = whole[:-1], whole[-1:], side(row, shape.needed[1], "assistant")
    else:
        chosen, rejected = side(row, "chosen", "assistant"), side(row, "rejected", "assistant")
    if "prompt" in shape.needed:
        prompt = [*_system(row), *side(row, "prompt", "user")]
    elif "conversations" in shape.needed:
        prompt = [*_system(row), *messages(row, "conversations")]
    elif "instruction" in shape.needed:
        prompt = _asked(row, "instruction")
    elif "messages" not in shape.needed:
        shared = next((i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), None)
        if shared is None:
            raise RowError(f"{SAME}, or one begins with the other", where=row.where)
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
        raise RowError(SAME, where=row.where)
    return Pair(prompt, chosen, rejected, _margin(row))


def judged(row: Row) -> tuple[Conversation, bool]:
    """A conversation, and whether its last answer is desirable. Raises RowError with the reason."""
    label = row.data.get("label")
    if not isinstance(label, bool):
        what = f"label must be true or false, not {kind(label)}" if "label" in row.data else "does not have label"
        raise RowError(what, where=row.where)
    rest = {name: value for name, value in row.data.items() if name != "label"}
    found = conversation(replace(row, data=rest))
    if len(found.messages) - 1 in found.silent or found.tools:
        raise RowError("has tools or loss: false, which judged answers cannot have", where=row.where)
    return found, label


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
    if any("loss" in message for message in found):
        raise RowError("has messages with loss, which only a conversation to learn may have", where=row.where)
    if found[-1]["role"] != "assistant":
        raise RowError(f"ends with the {found[-1]['role']}: there is no answer to learn", where=row.where)
    before = ""
    for index, message in enumerate(found):
        role = message["role"]
        if role == "system" and index:
            raise RowError(f"message {index + 1} is a system message, which only the first may be", where=row.where)
        if role == "assistant" and before not in ("user", "tool"):
            raise RowError(f"message {index + 1} is an answer of the assistant to nobody", where=row.where)
        if role == "user" and before in ("user", "tool"):
            whose = (
                "both the user's" if before == "user" else "a tool's answer and the user's: the assistant's is missing"
            )
            raise RowError(f"messages {index} and {index + 1} are {whose}", where=row.where)
        if (role == "tool") != (before == "call") and not (role == "tool" and before == "tool"):
            what = "is a tool's answer to no call" if role == "tool" else "stands where a called tool must answer"
            raise RowError(f"message {index + 1} {what}", where=row.where)
        # An empty system message is meant: it keeps a template from writing its own. A tool may answer nothing.
        if role in ("user", "assistant") and not message["content"].strip() and "tool_calls" not in message:
            what = "answer" if role == "assistant" else "question"
            raise RowError(f"has an empty {what} (message {index + 1})", where=row.where)
        before = "call" if "tool_calls" in message else role
    return found


def _message(row: Row, place: str, message: Any) -> Message:
    """A message of ``role`` and ``content``; of ``from`` and ``value`` in a ShareGPT row and its answers."""
    if not isinstance(message, dict):
        raise RowError(f"{place} is {kind(message)}, not a message", where=row.where)
    sharegpt = "conversations" in row.data
    who, what = ("from", "value") if sharegpt and "role" not in message else ("role", "content")
    message = {name: value for name, value in message.items() if value is not None or name in (who, what)}
    role = message.get(who)
    allowed = {"assistant": ("loss", "tool_calls"), "tool": ("loss", "tool_call_id", "name")}.get(str(role), ("loss",))
    missing = [key for key in (who, what) if key not in message and not (key == what and "tool_calls" in message)]
    for key in message:
        if key not in (who, what, *allowed):
            meant = _meant([key], missing)
            raise RowError(f"{place} has a key {key!r} that a text message does not have{meant}", where=row.where)
    if missing:
        raise RowError(f"{place} has no {' and no '.join(missing)}", where=row.where)
    names = tuple(FROM) if who == "from" else ROLES
    if role not in names:
        raise RowError(f"{place} has the role {role!r}; roles are {', '.join(names)}", where=row.where)
    content = message.get(what)
    if isinstance(content, list):
        parts = sorted({str(part.get("type")) if isinstance(part, Mapping) else kind(part) for part in content})
        raise RowError(f"{place} has content parts ({', '.join(parts)}); only text is learnt here", where=row.where)
    if content is None and "tool_calls" in message:
        content = ""
    if not isinstance(content, str):
        raise RowError(f"{place} has content that is {kind(content)}, not text", where=row.where)
    made: Message = {"role": FROM[role] if who == "from" else role, "content": content}
    if "tool_calls" in message:
        made["tool_calls"] = calls(row, f"{place}.tool_calls", message["tool_calls"])
    if made["role"] == "call":
        made = {"role": "assistant", "content": "", "tool_calls": called(row, place, content)}
    return made | {key: message[key] for key in ("loss", "tool_call_id", "name") if key in message}


def _losses(row: Row, found: list[Message]) -> tuple[list[Message], frozenset[int]]:
    """The messages without their ``loss``, and which answers are not learnt."""
    for index, message in enumerate(found):
        loss = message.get("loss", False)
        if not isinstance(loss, bool):
            raise RowError(f"message {index + 1} has a loss that is {kind(loss)}, not true or false", where=row.where)
        if loss and message["role"] != "assistant":
            what = f"message {index + 1} is the {message['role']}'s and has loss: true; only the assistant's are learnt"
            raise RowError(what, where=row.where)
    silent = {i for i, m in enumerate(found) if m["role"] == "assistant" and m.get("loss") is False}
    return [{name: value for name, value in m.items() if name != "loss"} for m in found], frozenset(silent)


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


def _margin(row: Row) -> float | None:
    value = row.data.get("margin")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RowError(f"margin is {kind(value)}, not a number", where=row.where)
    if not abs(value) <= LARGEST:
        raise RowError("margin is no finite number of 32 bits", where=row.where)
    return float(value)


def _asked(row: Row, field: str) -> list[Message]:
    """System, history, and the question, with alpaca's input after a newline (as LLaMA-Factory and ms-swift do)."""
    found = _system(row)
    history = row.data.get("history", [])
    if not isinstance(history, list):
        raise RowError(f"history is {kind(history)}, not a list", where=row.where)
    for index, turn in enumerate(history):
        if not isinstance(turn, list) or len(turn) != 2 or not all(isinstance(text, str) for text in turn):
            raise RowError(f"history[{index}] must be [question, answer]", where=row.where)
        found += [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]
    parts = [text for text in (_text(row, field), _text(row, "input")) if text]
    return [*found, {"role": "user", "content": "\n".join(parts)}]


def _system(row: Row) -> list[Message]:
    text = _text(row, "system")
    return [{"role": "system", "content": text}] if text else []


def _after(prompt: list[Message], answer: list[Message]) -> list[Message]:
    """Answers given as whole conversations repeat the prompt: what follows it is the answer."""
    return answer[len(prompt) :] if answer[: len(prompt)] == prompt else answer
