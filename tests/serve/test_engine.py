"""The batching engine alone, in every family: rows that join and leave at any time say what they say alone."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mst_serve.engine import Busy, Dead, Engine, Job, Sampling
from mst_serve.output import Failed, Piece
from mst_serve.prompts import Prompts
from mst_serve.protocol import ApiError, ChatRequest, CompletionRequest, parse
from mst_serve.sampling import generators
from mst_serve.service import Service

CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("qwen2", {}),
    ("qwen3", {}),
    ("mistral", {"sliding_window": 16}),
]


def load(directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype="float32").eval()


class Caller:
    """Collects what a job emits. Tokens are written as words, so that the text is the ids."""

    def __init__(self, prompt: list[int], tokens: int, n: int = 1, **options: Any) -> None:
        self.ids: list[list[int]] = [[] for _ in range(n)]
        self.finish: list[str | None] = [None] * n
        self.failed = False
        self.done = threading.Event()
        self.job = Job(prompt, Sampling(tokens, **{"temperature": 0.0, **options}), generators(0, 0, n), self.emit)

    def emit(self, event: Any) -> None:
        if isinstance(event, Failed):
            self.failed = True
            self.done.set()
        elif isinstance(event, Piece):
            self.ids[event.choice] += [int(word) for word in event.text.split()]
            self.finish[event.choice] = event.finish or self.finish[event.choice]
            if all(self.finish):
                self.done.set()


def words(ids: list[int]) -> str:
    return "".join(f"{token} " for token in ids)


def make(model: Any, concurrency: int = 4, queue: int = 100, eos: tuple[int, ...] = ()) -> Engine:
    return Engine(model, decode=words, eos=eos, max_concurrency=concurrency, max_queue=queue)


@pytest.mark.parametrize(("family", "options"), CASES)
def test_rows_join_and_leave_at_random(tiny_hf: Callable[..., Path], family: str, options: dict[str, Any]) -> None:
    model = load(tiny_hf(family, **options))
    chance = random.Random(1)
    callers = [
        Caller([chance.randrange(3, 300) for _ in range(chance.choice((1, 2, 5, 30, 90)))], chance.choice((1, 3, 40)))
        for _ in range(20)
    ]
    engine = make(model)
    for caller in callers:
        engine.submit([caller.job])
    engine.start()
    for caller in callers:
        assert caller.done.wait(60)
    assert engine.counts() == (0, 0)
    engine.close()
    for caller in callers:
        prompt = list(caller.job.prompt)
        expected = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=caller.job.sampling.max_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
        assert caller.ids == [expected]


def test_limits_cancel_and_close(tiny_hf: Callable[..., Path]) -> None:
    engine = make(load(tiny_hf("llama", max_position_embeddings=1024)), concurrency=4, queue=2)
    long, waiting = Caller([5, 6], 100_000, n=4), Caller([7], 100_000, n=2)
    engine.submit([long.job, waiting.job])
    with pytest.raises(Busy):
        engine.submit([Caller([5], 1).job])
    engine.start()
    long.job.cancel()
    while engine.counts() != (2, 0):
        pass
    short = Caller([9], 3, n=2)
    engine.submit([short.job])
    assert short.done.wait(30)
    assert short.ids[0] == short.ids[1]
    assert len(short.ids[0]) == 3
    engine.close()
    assert waiting.failed
    with pytest.raises(Dead):
        engine.submit([Caller([5], 1).job])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_death_leaves_nobody_waiting(tiny_hf: Callable[..., Path]) -> None:
    told = threading.Event()
    model = load(tiny_hf("llama"))
    engine = Engine(model, decode=words, eos=(), max_concurrency=2, max_queue=9, on_death=told.set)
    good, bad = Caller([5], 50), Caller([10**6], 3)
    engine.submit([good.job, bad.job, Caller([4], 2).job])
    engine.start()
    assert good.done.wait(30)
    assert bad.done.wait(30)
    assert good.failed
    assert bad.failed
    assert told.wait(5)
    assert isinstance(engine.failure, IndexError)


def test_a_tokenizer_larger_than_the_model_kills_nothing(tiny_hf: Callable[..., Path]) -> None:
    directory = tiny_hf("llama")
    prompts = Prompts.load(directory)
    service = Service(make(load(directory)), prompts, name="m", context=256, vocabulary=40)
    chat = parse(ChatRequest, b'{"model": "m", "messages": [{"role": "user", "content": "zz"}]}')
    text = parse(CompletionRequest, b'{"model": "m", "prompt": ["!", "zz"]}')
    ids = parse(CompletionRequest, b'{"model": "m", "prompt": [99999999999999999999], "echo": true}')
    for asked in (service.chat(chat), service.complete(text), service.complete(ids)):
        with pytest.raises(ApiError, match="not in the vocabulary of 40"):
            asyncio.run(asked)
