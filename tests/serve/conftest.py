"""A real mst-serve on a tiny model, as a user starts it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

CONTEXT = 1024


@dataclass
class Running:
    """A server process that has said that it is ready."""

    process: subprocess.Popen[str]
    url: str
    model: str
    log: Path

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url, api_key="none", max_retries=0, timeout=60)

    def health(self) -> dict[str, Any]:
        body: dict[str, Any] = httpx2.get(self.url.removesuffix("/v1") + "/health", timeout=30).json()
        return body

    def wait_for(self, condition: Callable[[dict[str, Any]], bool], seconds: float = 20) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        while not condition(state := self.health()):
            if time.monotonic() > deadline:
                pytest.fail(f"the server did not get there: {state}\n{self.log.read_text()}")
            time.sleep(0.02)
        return state

    def stop(self, sig: int = signal.SIGTERM, seconds: float = 30) -> int:
        self.process.send_signal(sig)
        return self.process.wait(seconds)


def start(model: Path, log: Path, *flags: str) -> Running:
    """Start mst-serve on a free port and wait for the line that it prints when it is ready."""
    command = [str(Path(sys.executable).parent / "mst-serve"), "--model", str(model), "--port", "0", *flags]
    with log.open("w") as stderr:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=stderr, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if not line:
        pytest.fail(f"{' '.join(command)} ended with {process.wait(10)}\n{log.read_text()}")
    return Running(process, line, model.name, log)


@pytest.fixture(scope="session")
def model_dir(tiny_hf: Callable[..., Path]) -> Path:
    return tiny_hf("llama", max_position_embeddings=CONTEXT)


@pytest.fixture(scope="session")
def server(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    running = start(model_dir, tmp_path_factory.mktemp("serve") / "log", "--max-concurrency", "8", "--max-queue", "8")
    yield running
    code = running.stop()
    assert code == 0, running.log.read_text()


@pytest.fixture(scope="session")
def reference(model_dir: Path) -> Any:
    """(model, tokenizer) of transformers itself."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype="float32").eval()
    return model, AutoTokenizer.from_pretrained(model_dir)
