"""Load the model and serve until told to stop."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn
from fastapi import FastAPI

from mst_core import console
from mst_core.errors import RunError
from mst_core.spec import Result
from mst_serve.app import create_app
from mst_serve.engine import Engine
from mst_serve.listen import taken
from mst_serve.load import load_model
from mst_serve.plan import ServePlan
from mst_serve.prompts import Prompts
from mst_serve.service import Service
from mst_serve.spec import ServeSpec

SIGNALS = (signal.SIGINT, signal.SIGTERM)
FLUSH_S = 5
"""Seconds in which the last bytes of answers must be read by their clients."""


def serve(spec: ServeSpec, plan: ServePlan, listener: socket.socket) -> Result:
    """Load the model and answer on ``listener``, bound but not yet listening. Raises InputError and RunError."""
    prompts = Prompts.load(plan.directory)
    eos = set(plan.eos) | prompts.end_ids()
    console.say(f"loading {plan.directory} ({plan.parameters / 1e6:.4g}M parameters)")
    model = load_model(plan, spec.precision)
    engine = Engine(
        model,
        decode=prompts.decode,
        eos=eos,
        max_concurrency=spec.max_concurrency,
        max_queue=spec.max_queue,
        on_death=lambda: server.stop(),
    )
    vocabulary = int(model.config.vocab_size)
    if prompts.size > vocabulary:
        console.warn(f"the tokenizer has {prompts.size} ids, the model {vocabulary}: requests with the others get 400")
    service = Service(engine, prompts, name=plan.name, context=plan.context, vocabulary=vocabulary)
    console.say(
        f"{plan.name}: {str(model.dtype).removeprefix('torch.')} on {model.device}, context {plan.context}, "
        f"an answer ends at the ids {sorted(eos)}; temperature and top_p are 1 unless a request sets them"
    )
    server = Server(create_app(service), engine, listener, plan.name, spec)
    engine.start()
    try:
        server.run([listener])
    finally:
        engine.close()
    if engine.failure is not None:
        kind = type(engine.failure).__name__
        raise RunError(f"the engine died: {kind}: {engine.failure}") from engine.failure
    if server.cut:
        raise RunError(
            "stopped, but requests that still ran were cut",
            hint=f"they have --stop-timeout {spec.stop_timeout} seconds to finish, or until a second signal",
        )
    return Result(text="stopped", data={"model": plan.name, "stopped": True})


class Server(uvicorn.Server):
    """uvicorn that says when it is ready, and ends by returning instead of by the signal that stopped it."""

    def __init__(self, app: FastAPI, engine: Engine, listener: socket.socket, name: str, spec: ServeSpec) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="off",
                ws="none",
                server_header=False,
                timeout_graceful_shutdown=spec.stop_timeout + FLUSH_S,
            )
        )
        self.cut = False
        self._engine, self._listener, self._name, self._spec = engine, listener, name, spec

    def stop(self) -> None:
        """Stop as on SIGTERM, from any thread."""
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then print the URL on stdout: the line that scripts wait for."""
        host, port = self._listener.getsockname()[:2]
        try:
            self._listener.listen(128)
        except OSError as error:  # another process bound the same address and listened first
            raise taken(host, port, error) from error
        await super().startup(sockets)
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
        ready = json.dumps({"url": url, "model": self._name}) if self._spec.json_output else url
        sys.stdout.write(ready + "\n")
        sys.stdout.flush()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the port and wait for running requests; after ``stop_timeout`` seconds they fail with status 503."""
        console.say("stopping: the port is closed, running requests finish")
        timer = asyncio.get_running_loop().call_later(self._spec.stop_timeout, self._cut)
        await super().shutdown(sockets)
        timer.cancel()

    def _cut(self) -> None:
        if self._engine.counts() != (0, 0):
            self.cut = True
            self._engine.abort()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """First signal: finish what runs. Second: at once."""
        if self.should_exit:
            self.force_exit = True
            self._cut()
        self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Like uvicorn's, but without raising the signal again at the end: a stop on request is a success."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {sig: signal.signal(sig, self.handle_exit) for sig in SIGNALS}
        try:
            yield
        finally:
            for sig, handler in before.items():
                signal.signal(sig, handler)
