"""Conversations with tools, and answers that are context only: what is learnt of them, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mst_core.data import shapes
from mst_core.data.records import Row
from mst_core.data.render import Renderer, load_tokenizer
from mst_core.errors import RowError

# The part of Qwen2.5's template that matters here: tools in the system message, calls and answers in tags.
HERMES = """\
{%- if tools %}{{ '<|im_start|>system\\n' }}
{%- if messages[0]['role'] == 'system' %}{{ messages[0]['content'] }}{% endif %}
{%- for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}{{ '<|im_end|>\\n' }}
{%- elif messages[0]['role'] == 'system' %}{{ '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
{%- elif message.role != 'system' %}{{ '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}{% set call = call.function %}
{{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' + call.arguments | tojson + '}\\n</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
WEATHER = {"name": "weather", "description": "of a town", "parameters": {"type": "object", "properties": {}}}
CALL = {"name": "weather", "arguments": {"town": "Oslo"}}
USER, DONE = {"role": "user", "content": "sun in Oslo?"}, {"role": "assistant", "content": "yes"}
TOOL = {"role": "tool", "content": "sunny"}


def calling(**call: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [{**CALL, **call}]}


SHAPES: list[dict[str, Any]] = [
    {"messages": [USER, calling(), TOOL, DONE], "tools": [WEATHER]},
    {"messages": [USER, calling(arguments='{"town": "Oslo"}'), TOOL, DONE], "tools": json.dumps([WEATHER])},
    {
        "messages": [
            USER,
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "id": "1", "function": CALL}]},
            {**TOOL, "tool_call_id": "1"},
            DONE,
        ],
        "tools": [{"type": "function", "function": WEATHER}],
    },
    {
        "conversations": [
            {"from": "human", "value": "sun in Oslo?"},
            {"from": "function_call", "value": json.dumps(CALL)},
            {"from": "observation", "value": "sunny"},
            {"from": "gpt", "value": "yes"},
        ],
        "tools": json.dumps([WEATHER]),
    },
]


@pytest.fixture(scope="module")
def tokenizer(tiny_hf: Callable[..., Path]) -> Any:
    return load_tokenizer(tiny_hf("llama"))


def render(tokenizer: Any, template: str, **data: Any) -> list[str]:
    """The learnt stretches of the one sample that a row gives."""
    tokenizer.chat_template = template
    (sample,) = Renderer(tokenizer, 2000).samples(shapes.conversation(Row("f.jsonl", 1, data)), "f.jsonl:1")
    learnt, before = [], 0
    for token, mask in zip(sample.tokens, sample.mask, strict=True):
        if mask:
            learnt += [] if before else [[]]
            learnt[-1].append(token)
        before = mask
    return [tokenizer.decode(part) for part in learnt]


@pytest.mark.parametrize("data", SHAPES)
def test_calls_are_learnt_and_the_answers_of_tools_are_not(tokenizer: Any, data: dict[str, Any]) -> None:
    assert render(tokenizer, HERMES, **data) == [
        '<tool_call>\n{"name": "weather", "arguments": {"town": "Oslo"}}\n</tool_call><|im_end|>',
        "yes<|im_end|>",
    ]
    (tool,) = shapes.conversation(Row("f", 1, data)).tools
    assert tool == {"type": "function", "function": WEATHER}


def test_a_call_may_be_the_last_word(tokenizer: Any) -> None:
    (learnt,) = render(tokenizer, HERMES, messages=[USER, calling()], tools=[WEATHER])
    assert learnt.endswith("</tool_call><|im_end|>")
    assert render(tokenizer, HERMES, query="q", response="a", tools=[WEATHER]) == ["a<|im_end|>"]


def test_answers_without_loss_are_context(tokenizer: Any) -> None:
    again = [USER, {"role": "assistant", "content": "more"}]
    silent = {**DONE, "loss": False}
    assert render(tokenizer, HERMES, messages=[USER, silent, *again]) == ["more<|im_end|>"]
    assert render(tokenizer, HERMES, messages=[*again, USER, silent]) == ["more<|im_end|>"]
    with pytest.raises(RowError, match="loss: false on every answer"):
        render(tokenizer, HERMES, messages=[USER, silent])
    sharegpt = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a", "loss": False}] * 2
    sharegpt[3] = {"from": "gpt", "value": "b"}
    assert render(tokenizer, HERMES, conversations=sharegpt) == ["b<|im_end|>"]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"messages": [USER, DONE], "tools": "weather"}, "tools is not JSON"),
        ({"messages": [USER, DONE], "tools": '{"a": 1, "a": 2}'}, "stands twice"),
        ({"messages": [USER, DONE], "tools": {"name": "x"}}, "tools is an object, not a list"),
        ({"messages": [USER, DONE], "tools": [{"description": "x"}]}, "tools[0] has no name"),
        ({"messages": [USER, DONE], "tools": ["x"]}, "tools[0] is text, not an object"),
        ({"messages": [USER, DONE], "tools": [{"type": "retrieval", "function": WEATHER}]}, "tools[0] is not of"),
        ({"messages": [USER, calling(args={})]}, "tool_calls[0] has args; a call has a name and arguments"),
        ({"messages": [USER, calling(arguments="Oslo")]}, "arguments is not JSON"),
        ({"messages": [USER, calling(arguments=[1])]}, "arguments is a list, not an object"),
        ({"messages": [USER, {**DONE, "tool_calls": []}]}, "not an empty one"),
        ({"messages": [USER, TOOL, DONE]}, "message 2 is a tool's answer to no call"),
        ({"messages": [USER, calling(), USER, DONE]}, "message 3 stands where a called tool must answer"),
        ({"messages": [USER, calling(), TOOL, USER, DONE]}, "the assistant's is missing"),
        ({"messages": [USER, calling(), TOOL]}, "ends with the tool"),
        ({"messages": [{**USER, "tool_calls": []}, DONE]}, "a key 'tool_calls'"),
        ({"conversations": [{"from": "human", "value": "q"}, {"from": "function_call", "value": "x"}]}, "not JSON"),
        ({"messages": [USER, calling(arguments={"a": "<|im_end|>"})]}, "message 2 spells the special token"),
        ({"messages": [USER, DONE], "tools": [{"name": "<|im_end|>"}]}, "tools spell the special token"),
    ],
)
def test_refused(tokenizer: Any, data: dict[str, Any], says: str) -> None:
    with pytest.raises(RowError) as error:
        render(tokenizer, HERMES, **data)
    assert says in str(error.value)


def test_a_template_that_knows_no_tools(tokenizer: Any) -> None:
    """It leaves them out without a word."""
    deaf = HERMES.replace("{%- if tools %}", "{%- if false %}")
    with pytest.raises(RowError, match="has tools, which the chat template does not write"):
        render(tokenizer, deaf, messages=[USER, DONE], tools=[WEATHER])
    with pytest.raises(RowError, match="message 2 calls a tool, which the chat template does not write"):
        render(tokenizer, HERMES.replace("message.tool_calls or []", "[]"), messages=[USER, calling()])
    silent = HERMES.replace(" + message.content + '\\n</tool_response>", " + '\\n</tool_response>")
    with pytest.raises(RowError, match="message 3 is a tool's answer, which"):
        render(tokenizer, silent, messages=[USER, calling(), TOOL, DONE])
