"""Slots, queue, disconnects and the end: the server as a process."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from .conftest import CONTEXT, Running, start

LONG: dict[str, Any] = {"max_tokens": CONTEXT - 40}


def long_prompt(server: Running) -> str:
    """A prompt whose greedy answer does not end by itself soon."""
    for prompt in ("The quick", "x", "Pack my", "Satire", "0123", "yes", "jugs"):
        made = server.client.completions.create(model=server.model, prompt=prompt, temperature=0, max_tokens=500)
        if made.choices[0].finish_reason == "length":
            return prompt
    pytest.fail("every prompt ends by itself")


@pytest.mark.parametrize("stream", [True, False])
def test_disconnect_frees_the_slots(server: Running, stream: bool) -> None:
    body = {"model": server.model, "prompt": long_prompt(server), "temperature": 0, "n": 4, "stream": stream, **LONG}
    with httpx2.Client(timeout=60) as client:
        if stream:
            with client.stream("POST", server.url + "/completions", json=body) as answer:
                lines = answer.iter_lines()
                next(lines)
                assert server.health()["running"] == 4
        else:
            with contextlib.suppress(httpx2.ReadTimeout):
                client.post(server.url + "/completions", json=body, timeout=0.5)
    server.wait_for(lambda state: state["running"] == 0 and state["waiting"] == 0, 2)


def test_waiting_requests_that_disconnect_leave_the_queue(server: Running) -> None:
    body = {"model": server.model, "prompt": long_prompt(server), "temperature": 0, "n": 8, "stream": True, **LONG}
    with httpx2.Client(timeout=60) as client:
        with client.stream("POST", server.url + "/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            with contextlib.suppress(httpx2.ReadTimeout):
                client.post(server.url + "/completions", json={**body, "n": 2, "stream": False}, timeout=0.3)
            server.wait_for(lambda state: state["waiting"] == 0, 2)
            assert server.health()["running"] == 8
    server.wait_for(lambda state: state["running"] == 0, 2)


def test_full_queue_is_429_and_the_rest_is_answered(server: Running) -> None:
    body = {"model": server.model, "prompt": long_prompt(server), "temperature": 0, "max_tokens": 150, "n": 8}
    codes: list[int] = []
    answers: list[Any] = []

    def ask() -> None:
        answer = httpx2.post(server.url + "/completions", json=body, timeout=120)
        codes.append(answer.status_code)
        answers.append(answer)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(codes) == [200, 200, 429, 429]
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert refused.headers["retry-after"]
    assert refused.json()["error"]["code"] == "queue_full"
    texts = [choice["text"] for answer in answers if answer.status_code == 200 for choice in answer.json()["choices"]]
    assert len(set(texts)) == 1


def test_sigterm_finishes_the_stream_and_exits_0(model_dir: Path, tmp_path: Path) -> None:
    """And on the way: --json, another name, --seq-length, a port that is taken, no chat template."""
    running = start(
        model_dir, tmp_path / "log", "--json", "--served-model-name", "org/tiny", "--seq-length", "400",
        "--max-concurrency", "2",
    )  # fmt: skip
    ready = json.loads(running.url)
    running.url, running.model = ready["url"], ready["model"]
    assert running.model == "org/tiny"
    assert running.client.models.retrieve("org/tiny").id == "org/tiny"
    port = running.url.rpartition(":")[2].removesuffix("/v1")
    second = subprocess.run(
        [Path(sys.executable).parent / "mst-serve", "--model", model_dir, "--port", port],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert second.returncode == 3
    assert f"cannot listen on 127.0.0.1:{port}" in second.stderr
    assert "Traceback" not in second.stderr
    with pytest.raises(openai.BadRequestError, match="400 tokens"):
        running.client.completions.create(model="org/tiny", prompt="x", max_tokens=400)
    asked: dict[str, Any] = {"model": "org/tiny", "prompt": "The quick", "seed": 1, "max_tokens": 250}
    texts = [running.client.completions.create(**{**asked, "seed": seed}).choices[0].text for seed in range(2)]
    seed = max(range(2), key=lambda at: len(texts[at]))
    stream = running.client.completions.create(**{**asked, "seed": seed}, stream=True)
    pieces = [next(stream)]
    running.process.send_signal(signal.SIGTERM)
    pieces += list(stream)
    assert "".join(piece.choices[0].text for piece in pieces if piece.choices) == texts[seed]
    assert running.process.wait(20) == 0, running.log.read_text()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(port)), timeout=5)
    assert running.process.stdout is not None
    assert json.loads(running.process.stdout.read()) == {"model": "org/tiny", "stopped": True}


def test_stop_timeout_cuts_and_says_so(tiny_hf: Callable[..., Path], tmp_path: Path) -> None:
    model = tiny_hf("qwen2", max_position_embeddings=100_000, template=None)
    running = start(model, tmp_path / "log", "--stop-timeout", "1")
    assert "no chat template" in running.log.read_text()
    with pytest.raises(openai.BadRequestError, match="no chat template"):
        running.client.chat.completions.create(model=running.model, messages=[{"role": "user", "content": "x"}])
    body = {"model": running.model, "prompt": "x", "n": 16, "seed": 1, "max_tokens": 90_000, "stream": True}
    with httpx2.stream("POST", running.url + "/completions", json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        next(lines)
        running.process.send_signal(signal.SIGINT)
        with contextlib.suppress(httpx2.HTTPError):
            list(lines)
    assert running.process.wait(20) == 5, running.log.read_text()
    assert "were cut" in running.log.read_text()
    assert "Traceback" not in running.log.read_text()
