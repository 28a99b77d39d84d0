"""Everything that is not a good request: OpenAI's error shape, the right status, never a 500."""

from __future__ import annotations

import json
import socket
from typing import Any

import httpx2
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .conftest import CONTEXT, Running

USER = [{"role": "user", "content": "hi"}]


def post(server: Running, path: str, body: Any) -> httpx2.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx2.post(server.url + path, content=content, headers={"content-type": "application/json"}, timeout=60)


def check_error(answer: httpx2.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert body.keys() == {"error"}
    error: dict[str, Any] = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    return error


BAD_CHAT: list[tuple[dict[str, Any], str | None, str]] = [
    ({"temperature": -1}, "temperature", "invalid_value"),
    ({"temperature": 2.5}, "temperature", "invalid_value"),
    ({"temperature": "1"}, "temperature", "invalid_value"),
    ({"temperature": True}, "temperature", "invalid_value"),
    ({"temperature": 10**400}, "temperature", "invalid_value"),
    ({"top_p": 1.1}, "top_p", "invalid_value"),
    ({"n": 0}, "n", "invalid_value"),
    ({"n": 9}, "n", "invalid_value"),
    ({"n": 1.5}, "n", "invalid_value"),
    ({"max_tokens": 0}, "max_tokens", "invalid_value"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, None, "invalid_value"),
    ({"seed": 2**63}, "seed", "invalid_value"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "stop", "invalid_value"),
    ({"stop": ""}, "stop", "invalid_value"),
    ({"stop": 3}, "stop", "invalid_value"),
    ({"logprobs": 3}, "logprobs", "invalid_value"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
    ({"top_logprobs": 2}, None, "invalid_value"),
    ({"stream": "yes"}, "stream", "invalid_value"),
    ({"stream_options": {"include_usage": True}}, None, "invalid_value"),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage", "unknown_parameter"),
    ({"messages": []}, "messages", "invalid_value"),
    ({"messages": None}, "messages", "invalid_value"),
    ({"messages": "hi"}, "messages", "invalid_value"),
    ({"messages": [{"role": "user"}]}, "messages.0.content", "missing_required_parameter"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role", "invalid_value"),
    ({"messages": [{"role": ["user"], "content": "x"}]}, "messages.0.role", "invalid_value"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages.0.content", "invalid_value"),
    ({"messages": [{"role": "user", "content": []}]}, "messages.0.content", "invalid_value"),
    ({"messages": [{"role": "user", "content": "x", "mood": 1}]}, "messages.0.mood", "unknown_parameter"),
    ({"messages": [{"role": "user", "content": "x", "name": "Bo"}]}, "messages.0.name", "unsupported_parameter"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role", "unsupported_parameter"),
    ({"tools": [{"type": "function"}]}, "tools", "unsupported_parameter"),
    ({"tool_choice": "auto"}, "tool_choice", "unsupported_parameter"),
    ({"response_format": {"type": "json_object"}}, "response_format", "unsupported_parameter"),
    ({"logit_bias": {"5": 1}}, "logit_bias", "unsupported_parameter"),
    ({"frequency_penalty": 0.5}, "frequency_penalty", "unsupported_parameter"),
    ({"modalities": ["audio"]}, "modalities", "unsupported_parameter"),
    ({"colour": "red"}, "colour", "unknown_parameter"),
    ({"max_tokens": CONTEXT}, "messages", "context_length_exceeded"),
    ({"messages": [{"role": "user", "content": "word " * CONTEXT}]}, "messages", "context_length_exceeded"),
]
IMAGE = [{"type": "image_url", "image_url": {"url": "data:"}}]
BAD_COMPLETION: list[tuple[dict[str, Any], str | None, str]] = [
    ({"prompt": ""}, "prompt", "invalid_value"),
    ({"prompt": []}, "prompt", "invalid_value"),
    ({"prompt": [[]]}, "prompt", "invalid_value"),
    ({"prompt": [1, "a"]}, "prompt", "invalid_value"),
    ({"prompt": [True]}, "prompt", "invalid_value"),
    ({"prompt": [-1]}, "prompt", "invalid_value"),
    ({"prompt": [330]}, "prompt", "invalid_value"),
    ({"prompt": None}, "prompt", "invalid_value"),
    ({"prompt": ["x"] * 17}, "n", "invalid_value"),
    ({"logprobs": 6}, "logprobs", "invalid_value"),
    ({"logprobs": True}, "logprobs", "invalid_value"),
    ({"max_tokens": -1}, "max_tokens", "invalid_value"),
    ({"best_of": 2}, "best_of", "unsupported_parameter"),
    ({"best_of": True}, "best_of", "unsupported_parameter"),
    ({"suffix": "end"}, "suffix", "unsupported_parameter"),
    ({"messages": USER}, "messages", "unknown_parameter"),
    ({"max_tokens": CONTEXT}, "prompt", "context_length_exceeded"),
]


@pytest.mark.parametrize(("extra", "param", "code"), BAD_CHAT)
def test_bad_chat(server: Running, extra: dict[str, Any], param: str | None, code: str) -> None:
    error = check_error(post(server, "/chat/completions", {"model": server.model, "messages": USER, **extra}), 400)
    assert (error["param"], error["code"], error["type"]) == (param, code, "invalid_request_error")


@pytest.mark.parametrize(("extra", "param", "code"), BAD_COMPLETION)
def test_bad_completion(server: Running, extra: dict[str, Any], param: str | None, code: str) -> None:
    error = check_error(post(server, "/completions", {"model": server.model, "prompt": "x", **extra}), 400)
    assert (error["param"], error["code"], error["type"]) == (param, code, "invalid_request_error")


def test_images_are_refused_by_name(server: Running) -> None:
    body = {"model": server.model, "messages": [{"role": "user", "content": IMAGE}]}
    error = check_error(post(server, "/chat/completions", body), 400)
    assert "image_url" in error["message"]
    assert error["code"] == "unsupported_parameter"


def test_all_mistakes_at_once(server: Running) -> None:
    body = {"model": server.model, "messages": USER, "temperature": 9, "top_p": -1, "colour": 1}
    message = check_error(post(server, "/chat/completions", body), 400)["message"]
    assert all(name in message for name in ("temperature", "top_p", "colour"))


NEUTRAL: dict[str, Any] = {
    "frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "tools": None, "tool_choice": "none",
    "response_format": {"type": "text"}, "stop": None, "n": None, "seed": None, "temperature": None, "user": "me",
    "store": False,
}  # fmt: skip


def test_fields_that_ask_for_nothing_are_welcome(server: Running) -> None:
    body = {"model": server.model, "messages": [{**USER[0], "tool_calls": None}], "max_tokens": 1, **NEUTRAL}
    assert post(server, "/chat/completions", body).status_code == 200


BODIES = [
    b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b'{"model": NaN}', b"[" * 100_000, b'{"model": "\\ud800"}',
    b'{"a":' * 5000, b"1" * 6000, b'{"temperature": Infinity}', b"{'model': 'x'}",
]  # fmt: skip


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("path", ["/chat/completions", "/completions"])
def test_not_json(server: Running, path: str, body: bytes) -> None:
    check_error(post(server, path, body), 400)


def test_unknown_model_and_routes(server: Running) -> None:
    error = check_error(post(server, "/chat/completions", {"model": "gpt-4", "messages": USER}), 404)
    assert error["code"] == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        server.client.models.retrieve("gpt-4")
    check_error(httpx2.get(server.url + "/models/a/b"), 404)
    check_error(httpx2.get(server.url + "/nothing"), 404)
    check_error(httpx2.get(server.url + "/chat/completions"), 405)
    check_error(httpx2.post(server.url + "/models"), 405)
    check_error(httpx2.get(server.url.removesuffix("v1") + "docs"), 404)


def test_context_can_be_filled_exactly(server: Running) -> None:
    body = {"model": server.model, "prompt": [5] * (CONTEXT - 3), "max_tokens": 3, "temperature": 0}
    assert post(server, "/completions", body).json()["usage"]["total_tokens"] <= CONTEXT
    check_error(post(server, "/completions", {**body, "max_tokens": 4}), 400)
    check_error(post(server, "/completions", {**body, "prompt": [5] * CONTEXT, "max_tokens": 0, "n": 9}), 400)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from(
    ["messages", "prompt", "stop", "n", "seed", "temperature", "top_p", "logprobs", "top_logprobs", "stream", "tools",
     "stream_options", "echo", "max_tokens", "max_completion_tokens", "response_format", "logit_bias", "user", "zzz"]
)  # fmt: skip


@settings(max_examples=80, deadline=None, database=None, derandomize=True,
          suppress_health_check=[HealthCheck.function_scoped_fixture])  # fmt: skip
@given(changes=st.dictionaries(NAMES, JSON, max_size=3), chat=st.booleans())
def test_any_body_is_answered_or_refused(server: Running, changes: dict[str, Any], chat: bool) -> None:
    good: dict[str, Any] = {"messages": USER} if chat else {"prompt": "x"}
    body = {"model": server.model, "max_tokens": 2, **good, **changes}
    answer = post(server, "/chat/completions" if chat else "/completions", body)
    if answer.status_code != 200:
        check_error(answer, 400)


def test_half_a_request_hurts_nobody(server: Running) -> None:
    host, port = server.url.removeprefix("http://").removesuffix("/v1").split(":")
    for text in (b"POST /v1/completions HTTP/1.1\r\ncontent-length: 1000\r\n\r\n{", b"\x00\x01garbage\r\n\r\n"):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(text)
    assert server.health()["status"] == "ok"
    assert "Traceback" not in server.log.read_text()
