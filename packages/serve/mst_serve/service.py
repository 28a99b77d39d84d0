"""Between HTTP and the engine: requests become jobs, pieces become answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from time import time
from typing import Any

from mst_serve import answers
from mst_serve.answers import Choice, Head
from mst_serve.engine import Busy, Dead, Engine, Job, Sampling
from mst_serve.output import Failed, Piece, PromptScores, TokenScore
from mst_serve.prompts import Prompts, check_ids, check_length
from mst_serve.protocol import ApiError, ChatRequest, CompletionRequest, invalid
from mst_serve.sampling import generators

Event = tuple[int, Piece | PromptScores | Failed | None]
"""(index of the prompt, what came); None: the client has gone."""
COMPLETION_TOKENS = 16
"""OpenAI's default max_tokens of a completion."""


@dataclass
class Prompt:
    """One prompt of a request: its ids, and what an echo shows of it."""

    ids: Sequence[int]
    text: str = ""
    offsets: Sequence[int] = ()
    scores: list[TokenScore] = field(default_factory=list)


class Service:
    """One model behind the two endpoints."""

    def __init__(self, engine: Engine, prompts: Prompts, *, name: str, context: int, vocabulary: int) -> None:
        self._engine, self._prompts = engine, prompts
        self._name, self._context, self._vocabulary = name, context, vocabulary
        self._created = int(time())

    def card(self) -> dict[str, Any]:
        """The model's entry in /v1/models."""
        card = {"id": self._name, "object": "model", "created": self._created, "owned_by": "mst"}
        return {**card, "max_model_len": self._context}

    def health(self) -> tuple[bool, dict[str, Any]]:
        """(whether requests can be answered, counts)."""
        running, waiting = self._engine.counts()
        alive = self._engine.failure is None
        body = {"status": "ok" if alive else "failed", "running": running, "waiting": waiting}
        return alive, {**body, "slots": self._engine.max_concurrency}

    def check_model(self, name: str) -> None:
        """Refuse another model's name."""
        if name != self._name:
            message = f"the model {name[:200]!r} does not exist; this server has {self._name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    async def chat(self, asked: ChatRequest) -> Answer:
        """Queue a chat request."""
        self.check_model(asked.model)
        ids = await asyncio.to_thread(self._prompts.chat, asked.messages)
        limit = check_length(len(ids), asked.limit, self._context, "messages")
        check_ids(ids, self._vocabulary, "messages")
        logprobs = (asked.top_logprobs or 0) if asked.logprobs else None
        return self._submit(asked, [Prompt(ids)], [limit], logprobs, ChatAnswer)

    async def complete(self, asked: CompletionRequest) -> Answer:
        """Queue a completion request: all its prompts at once."""
        self.check_model(asked.model)
        prompts = await asyncio.to_thread(lambda: [self._read(prompt, bool(asked.echo)) for prompt in asked.prompt])
        wanted = COMPLETION_TOKENS if asked.max_tokens is None else asked.max_tokens
        limits = [check_length(len(prompt.ids), wanted, self._context, "prompt") for prompt in prompts]
        for prompt in prompts:
            check_ids(prompt.ids, self._vocabulary, "prompt")
        return self._submit(asked, prompts, limits, asked.logprobs, TextAnswer)

    def _read(self, prompt: str | tuple[int, ...], echo: bool) -> Prompt:
        if isinstance(prompt, str):
            ids, offsets = self._prompts.text(prompt)
            return Prompt(ids, prompt, offsets)
        check_ids(prompt, self._vocabulary, "prompt")  # before the tokenizer sees ids beyond 32 bits
        text, offsets = self._prompts.spell(prompt) if echo else ("", [])
        return Prompt(prompt, text, offsets)

    def _submit(
        self,
        asked: ChatRequest | CompletionRequest,
        prompts: list[Prompt],
        limits: list[int],
        logprobs: int | None,
        kind: type[Answer],
    ) -> Answer:
        engine = self._engine
        if asked.choices > engine.max_concurrency:
            raise invalid(f"n: this server generates at most {engine.max_concurrency} answers at once", "n")
        room = engine.max_concurrency + engine.max_queue
        if len(prompts) * asked.choices > room:
            raise invalid(f"the request asks for {len(prompts) * asked.choices} answers, more than {room} in all", "n")
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[Event]()

        def deliver(index: int) -> Callable[[Piece | PromptScores | Failed], None]:
            def emit(event: Piece | PromptScores | Failed) -> None:
                with suppress(RuntimeError):  # the loop is closed: nobody is there to be told
                    loop.call_soon_threadsafe(queue.put_nowait, (index, event))

            return emit

        echo = isinstance(asked, CompletionRequest) and asked.echo
        jobs = [
            Job(
                prompt.ids,
                Sampling(
                    max_tokens=limit,
                    temperature=1.0 if asked.temperature is None else asked.temperature,
                    top_p=1.0 if asked.top_p is None else asked.top_p,
                    stop=asked.stop,
                    logprobs=logprobs,
                    prompt_logprobs=logprobs if echo else None,
                ),
                generators(asked.seed, index, asked.choices),
                deliver(index),
            )
            for index, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
        ]
        try:
            engine.submit(jobs)
        except Busy:
            message = f"all {engine.max_concurrency} slots and the queue of {engine.max_queue} are taken; try again"
            raise ApiError(429, message, code="queue_full", kind="rate_limit_error") from None
        except Dead:
            raise ApiError(503, "the server is stopping", code="stopping") from None
        return kind(asked, self._name, prompts, jobs, queue, self._prompts.raw)


class Answer:
    """A request on its way: jobs in the engine, and the pieces that come back."""

    prefix = ""

    def __init__(
        self,
        asked: Any,
        model: str,
        prompts: list[Prompt],
        jobs: list[Job],
        queue: asyncio.Queue[Event],
        raw: answers.Raw,
    ) -> None:
        self._asked, self._prompts, self._jobs, self._queue, self._raw = asked, prompts, jobs, queue, raw
        self._head = Head.new(self.prefix, model)
        self._generated = 0

    @asynccontextmanager
    async def watched(self, receive: Callable[[], Awaitable[MutableMapping[str, Any]]]) -> AsyncIterator[None]:
        """Free the slots when the client disconnects, and whenever the block ends."""

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            self._cancel()
            self._queue.put_nowait((0, None))

        watcher = asyncio.create_task(watch())
        try:
            yield
        finally:
            watcher.cancel()
            self._cancel()

    def _cancel(self) -> None:
        for job in self._jobs:
            job.cancel()

    async def _pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """(choice, piece) until every choice is finished; choices of all prompts are numbered through."""
        n = self._asked.choices
        left = n * len(self._prompts)
        while left:
            index, event = await self._queue.get()
            if event is None:
                raise ApiError(499, "the client has gone")
            if isinstance(event, Failed):
                raise ApiError(503, event.reason, code="engine_failed")
            if isinstance(event, PromptScores):
                self._prompts[index].scores = event.tokens
                for token, offset in zip(event.tokens, self._prompts[index].offsets, strict=True):
                    token.offset = offset
                continue
            self._generated += event.generated
            left -= event.finish is not None
            yield index * n + event.choice, event

    def _usage(self) -> dict[str, int]:
        return answers.usage(sum(len(prompt.ids) for prompt in self._prompts), self._generated)

    async def whole(self) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        choices = [Choice() for _ in range(self._asked.choices * len(self._prompts))]
        async for index, piece in self._pieces():
            choices[index].add(piece)
        return self._head.body(self.whole_kind, self._finished(choices), usage=self._usage())

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """The bodies of a stream's chunks."""
        more = {"usage": None} if self._asked.include_usage else {}
        opened: set[int] = set()
        async for index, piece in self._pieces():
            for choice in self._delta(index, piece, index not in opened):
                yield self._head.body(self.chunk_kind, [choice], **more)
            opened.add(index)
        if self._asked.include_usage:
            yield self._head.body(self.chunk_kind, [], usage=self._usage())

    whole_kind = chunk_kind = ""

    def _finished(self, choices: list[Choice]) -> list[dict[str, Any]]:
        raise NotImplementedError

    def _delta(self, index: int, piece: Piece, first: bool) -> list[dict[str, Any]]:
        raise NotImplementedError


class ChatAnswer(Answer):
    """An answer of /v1/chat/completions."""

    prefix, whole_kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def _logprobs(self, tokens: list[TokenScore]) -> dict[str, Any] | None:
        return answers.chat_logprobs(tokens, self._raw) if self._asked.logprobs else None

    def _finished(self, choices: list[Choice]) -> list[dict[str, Any]]:
        return [answers.chat_choice(at, choice, self._logprobs(choice.tokens)) for at, choice in enumerate(choices)]

    def _delta(self, index: int, piece: Piece, first: bool) -> list[dict[str, Any]]:
        found = [answers.chat_delta(index, {"role": "assistant", "content": ""})] if first else []
        if piece.text or piece.tokens:
            found.append(answers.chat_delta(index, {"content": piece.text}, self._logprobs(piece.tokens)))
        if piece.finish:
            found.append(answers.chat_delta(index, {}, finish=piece.finish))
        return found


class TextAnswer(Answer):
    """An answer of /v1/completions."""

    prefix, whole_kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def _logprobs(self, tokens: list[TokenScore], shift: int) -> dict[str, Any] | None:
        return None if self._asked.logprobs is None else answers.completion_logprobs(tokens, self._raw, shift)

    def _echo(self, index: int) -> Prompt:
        """What is put before a choice: its prompt, or nothing."""
        return self._prompts[index // self._asked.choices] if self._asked.echo else Prompt(())

    def _finished(self, choices: list[Choice]) -> list[dict[str, Any]]:
        found = []
        for index, choice in enumerate(choices):
            echo = self._echo(index)
            scores = self._logprobs(choice.tokens, len(echo.text))
            if scores is not None and echo.scores:
                before = answers.completion_logprobs(echo.scores, self._raw)
                scores = {name: before[name] + scores[name] for name in scores}
            found.append(answers.text_choice(index, echo.text + choice.text, scores, choice.finish))
        return found

    def _delta(self, index: int, piece: Piece, first: bool) -> list[dict[str, Any]]:
        echo, found = self._echo(index), []
        if first and echo.text:
            found.append(answers.text_choice(index, echo.text, self._logprobs(echo.scores, 0)))
        if piece.text or piece.tokens or piece.finish:
            scores = self._logprobs(piece.tokens, len(echo.text))
            found.append(answers.text_choice(index, piece.text, scores, piece.finish))
        return found
