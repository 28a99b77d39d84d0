"""The engine: one thread owns the model and generates for every running answer at once (continuous batching).

    submit() -> waiting jobs -> prefill, one job a turn -> rows of the slab -> one token for all rows a turn -> pieces

A job is one prompt with n choices; each choice is a row. Jobs join between two tokens and rows leave as soon as they
are done, stopped or cancelled. Everything a caller gets goes through the job's ``emit``, called on this thread.
Shapes: B rows, T tokens of a chunk, V vocabulary.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from transformers import DynamicCache

from mst_serve.cache import Slab
from mst_serve.output import Failed, Piece, PromptScores, Row, TokenScore
from mst_serve.sampling import choose, top

CHUNK = 512
"""Prompt tokens in one forward: bounds the logits in memory when a prompt is scored."""


class Busy(Exception):
    """No room in the queue; try again later."""


class Dead(Exception):
    """The engine is stopping or has died."""


@dataclass(frozen=True)
class Sampling:
    """How a job's tokens are chosen and when they end."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    """Alternatives a token that come with its log-probability; None: no log-probabilities."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens."""


@dataclass(eq=False)
class Job:
    """One prompt and its choices. ``cancel`` may be called from any thread, at any time."""

    prompt: Sequence[int]
    sampling: Sampling
    randoms: Sequence[Random]
    emit: Callable[[Piece | PromptScores | Failed], None]
    cancelled: bool = field(default=False, init=False)

    def cancel(self) -> None:
        """Free the job's slots at the next token."""
        self.cancelled = True


@dataclass(eq=False)
class _Running:
    job: Job
    row: Row
    random: Random
    token: int
    """The last token chosen, not yet in the cache."""
    position: int
    """Where that token stands in the sequence."""


class Engine:
    """Continuous batching over a causal language model."""

    def __init__(
        self,
        model: Any,
        *,
        decode: Callable[[list[int]], str],
        eos: Iterable[int],
        max_concurrency: int,
        max_queue: int,
        on_death: Callable[[], None] = lambda: None,
    ) -> None:
        self.max_concurrency, self.max_queue = max_concurrency, max_queue
        self.failure: BaseException | None = None
        self._model, self._decode, self._eos = model, decode, frozenset(eos)
        self._device: torch.device = model.device
        # transformers 5.24 renamed the argument
        self._cache_name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        self._slab = Slab(model.config.num_hidden_layers)
        self._running: list[_Running] = []
        self._waiting: deque[Job] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._starting: Job | None = None
        self._outbox: list[tuple[Job, Piece | PromptScores]] = []
        self._on_death = on_death
        self._thread = threading.Thread(target=self._main, name="mst-serve engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue all jobs or none. Raises Busy and Dead."""
        with self._wake:
            if self._closing or self.failure is not None:
                raise Dead
            running, waiting = self.counts()
            if running + waiting + sum(len(job.randoms) for job in jobs) > self.max_concurrency + self.max_queue:
                raise Busy
            self._waiting.extend(jobs)
            self._wake.notify()

    def counts(self) -> tuple[int, int]:
        """(answers running, answers waiting)."""
        with self._wake:
            waiting = sum(len(job.randoms) for job in self._waiting if not job.cancelled)
            starting = len(self._starting.randoms) if self._starting else 0
            return len(self._running) + starting, waiting

    def abort(self) -> None:
        """End the thread at the next token; what still runs fails."""
        with self._wake:
            self._closing = True
            self._wake.notify()

    def close(self) -> None:
        """``abort``, and wait for the end."""
        self.abort()
        self._thread.join()

    def _main(self) -> None:
        try:
            with torch.inference_mode():
                while self._turn():
                    pass
        finally:
            # Whatever ends the thread, nobody is left waiting; a bug goes on to threading's excepthook (stderr).
            self.failure = sys.exception()
            self._fail_all()
            if self.failure is not None:
                self._on_death()

    def _turn(self) -> bool:
        with self._wake:
            while not (self._waiting or self._running or self._closing):
                self._wake.wait()
            if self._closing:
                return False
            self._starting = self._next()
        if self._starting is not None:
            self._start(self._starting)
            self._flush()
        self._sweep()
        if self._running:
            self._step()
        self._flush()
        return True

    def _flush(self) -> None:
        """Hand out what was made: last, so that whoever gets the end of an answer finds its slot free."""
        outbox, self._outbox = self._outbox, []
        for job, event in outbox:
            job.emit(event)

    def _next(self) -> Job | None:
        """The first waiting job, if there are slots for all its choices: first come, first served."""
        while self._waiting and self._waiting[0].cancelled:
            self._waiting.popleft()
        if self._waiting and len(self._running) + len(self._waiting[0].randoms) <= self.max_concurrency:
            return self._waiting.popleft()
        return None

    def _start(self, job: Job) -> None:
        """Prefill a prompt, choose the first token of each choice, and give rows to those that go on."""
        sampling, n = job.sampling, len(job.randoms)
        last_V, prefilled = self._prefill(job)
        if last_V is None and not job.cancelled:
            return  # closing: the job is still ``_starting`` and fails with the others
        live: list[_Running] = []
        if sampling.max_tokens == 0:
            for choice in range(n):
                self._outbox.append((job, Piece(choice, finish="length")))
        elif last_V is not None:
            rows = [
                _Running(job, self._row(job, choice), random, 0, len(job.prompt) - 1)
                for choice, random in enumerate(job.randoms)
            ]
            live = self._advance(rows, last_V.expand(n, -1))
        with self._wake:
            self._starting = None
            self._running += live
        if live:
            self._slab.join(prefilled, len(live))

    def _row(self, job: Job, choice: int) -> Row:
        def emit(piece: Piece) -> None:
            self._outbox.append((job, piece))

        return Row(choice, self._decode, job.sampling.stop, job.sampling.max_tokens, self._eos, emit)

    def _prefill(self, job: Job) -> tuple[torch.Tensor | None, DynamicCache]:
        """Logits [1, V] after the prompt and its cache, in chunks; None for the logits when the job was cancelled."""
        cache, scores, before_V = DynamicCache(), [TokenScore(job.prompt[0])], None
        k = job.sampling.prompt_logprobs
        for start in range(0, len(job.prompt), CHUNK):
            if job.cancelled or self._closing:
                return None, cache
            chunk = job.prompt[start : start + CHUNK]
            logits_TV = self._forward(
                torch.tensor([chunk], device=self._device),
                torch.arange(start, start + len(chunk), device=self._device)[None],
                cache,
                logits_to_keep=1 if k is None else 0,
            )[0]
            if k is not None:
                logp_TV = logits_TV.float().log_softmax(-1)
                ahead = job.prompt[start + 1 : start + len(chunk) + 1]
                scores += [_score(token, logp_TV[at], k) for at, token in enumerate(ahead)]
            before_V = logits_TV[-1:].float()
        if k is not None:
            self._outbox.append((job, PromptScores(scores)))
        return before_V, cache

    def _step(self) -> None:
        """One token for every running row."""
        running, slab = self._running, self._slab
        slab.reserve()
        logits_B1V = self._forward(
            torch.tensor([[one.token] for one in running], device=self._device),
            torch.tensor([[one.position] for one in running], device=self._device),
            slab.cache,
            attention_mask=slab.mask(self._device),
        )
        slab.end += 1
        live = set(map(id, self._advance(running, logits_B1V[:, -1].float())))
        self._remove(lambda one: id(one) not in live)

    def _advance(self, rows: list[_Running], logits_BV: torch.Tensor) -> list[_Running]:
        """Choose and hand out one token a row; the rows that are not finished."""
        chosen = choose(
            logits_BV,
            [one.job.sampling.temperature for one in rows],
            [one.job.sampling.top_p for one in rows],
            [one.random.random() if one.job.sampling.temperature > 0 else 0.0 for one in rows],
        )
        live = []
        for at, (one, token) in enumerate(zip(rows, chosen, strict=True)):
            k = one.job.sampling.logprobs
            score = TokenScore(token) if k is None else _score(token, logits_BV[at].log_softmax(-1), k)
            one.token, one.position = token, one.position + 1
            if not one.row.add(score):
                live.append(one)
        return live

    def _sweep(self) -> None:
        self._remove(lambda one: one.job.cancelled)

    def _remove(self, gone: Callable[[_Running], bool]) -> None:
        """Free the slots of some rows, in the slab as in the list: the last row takes a freed place."""
        with self._wake:
            for at in range(len(self._running) - 1, -1, -1):
                if gone(self._running[at]):
                    self._slab.leave(at)
                    self._running[at] = self._running[-1]
                    self._running.pop()

    def _forward(self, ids_BT: torch.Tensor, positions_BT: torch.Tensor, cache: Any, **options: Any) -> torch.Tensor:
        out = self._model(
            input_ids=ids_BT, position_ids=positions_BT, use_cache=True, **{self._cache_name: cache}, **options
        )
        logits: torch.Tensor = out.logits
        return logits

    def _fail_all(self) -> None:
        with self._wake:
            self._closing = True
            jobs = {id(job): job for job in [*(one.job for one in self._running), *self._waiting]}
            if self._starting is not None:
                jobs[id(self._starting)] = self._starting
            self._running.clear()
            self._waiting.clear()
            self._starting = None
        for job in jobs.values():
            job.emit(Failed("the engine stopped before the answer was complete"))


def _score(token: int, logp_V: torch.Tensor, k: int) -> TokenScore:
    return TokenScore(token, float(logp_V[token]), top(logp_V, k))
