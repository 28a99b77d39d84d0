"""Load, listen, serve until told to stop."""

from __future__ import annotations

import json
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from types import FrameType

import uvicorn

from mst_core import console
from mst_core.errors import InputError, RunError
from mst_core.spec import Result
from mst_serve.app import create_app
from mst_serve.engine import Engine
from mst_serve.load import load_model
from mst_serve.plan import ServePlan
from mst_serve.prompts import Prompts
from mst_serve.service import Service
from mst_serve.spec import ServeSpec

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def work(spec: ServeSpec, plan: ServePlan) -> Result:
    """Serve until SIGTERM or Ctrl-C, then let running requests finish. Raises InputError and RunError."""
    for warning in plan.warnings:
        console.warn(warning)
    listener = bind(spec.host, spec.port)
    with listener:
        prompts = Prompts.load(plan.directory)
        eos = set(plan.eos) | prompts.end_ids()
        console.say(f"loading {plan.directory} ({plan.parameters / 1e6:.4g}M parameters)")
        model = load_model(plan, spec.precision)
        vocabulary = int(model.config.vocab_size)
        engine = Engine(
            model,
            decode=prompts.decode,
            eos=eos,
            max_concurrency=spec.max_concurrency,
            max_queue=spec.max_queue,
            on_death=lambda: server.stop(),
        )
        service = Service(engine, prompts, name=plan.name, context=plan.context, vocabulary=vocabulary)
        console.say(
            f"{plan.name}: {str(model.dtype).removeprefix('torch.')} on {model.device}, context {plan.context}, "
            f"an answer ends at the ids {sorted(eos)}; temperature and top_p are 1 unless a request sets them"
        )
        server = Server(service, plan.name, listener, spec.stop_timeout, spec.json_output)
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
            f"stopped, but requests that still ran after {spec.stop_timeout} s were cut",
            hint="--stop-timeout gives them longer",
        )
    return Result(text="stopped", data={"model": plan.name, "stopped": True})


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address, not listening yet: clients are refused until the model is ready."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise InputError(f"--host {host}: {error.strerror}") from error
    listener = socket.socket(family, kind, proto)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _taken(host, port, error) from error
    return listener


def _taken(host: str, port: int, error: OSError) -> InputError:
    return InputError(
        f"cannot listen on {host}:{port}: {error.strerror}", hint="--port 0 chooses a free port, --port N another"
    )


class Server(uvicorn.Server):
    """uvicorn that says when it is ready, and ends by returning instead of by the signal that stopped it."""

    def __init__(self, service: Service, name: str, listener: socket.socket, stop_timeout: int, as_json: bool) -> None:
        super().__init__(
            uvicorn.Config(
                create_app(service),
                log_config=None,
                access_log=False,
                lifespan="off",
                ws="none",
                server_header=False,
                timeout_graceful_shutdown=stop_timeout,
            )
        )
        self.cut = False
        self._name, self._listener, self._as_json, self._stop_timeout = name, listener, as_json, stop_timeout

    def stop(self) -> None:
        """Stop as on SIGTERM, from any thread."""
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then print the URL on stdout: the line that scripts wait for."""
        host, port = self._listener.getsockname()[:2]
        try:
            self._listener.listen(128)
        except OSError as error:  # another process bound the same address and listened first
            raise _taken(host, port, error) from error
        await super().startup(sockets)
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
        sys.stdout.write((json.dumps({"url": url, "model": self._name}) if self._as_json else url) + "\n")
        sys.stdout.flush()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the port and wait for running requests, at most ``stop_timeout`` seconds."""
        console.say("stopping: the port is closed, running requests finish")
        start = monotonic()
        await super().shutdown(sockets)
        self.cut = self.force_exit or monotonic() - start > self._stop_timeout

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """First signal: finish what runs. Second: at once."""
        self.force_exit = self.should_exit
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
