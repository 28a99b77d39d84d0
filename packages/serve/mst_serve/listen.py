"""The listening socket. Standard library only: a port that is taken is reported before anything heavy is loaded."""

from __future__ import annotations

import socket

from mst_core.errors import InputError


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
        raise taken(host, port, error) from error
    return listener


def taken(host: str, port: int, error: OSError) -> InputError:
    """The error for an address that cannot be had."""
    return InputError(
        f"cannot listen on {host}:{port}: {error.strerror}", hint="--port 0 chooses a free port, --port N another"
    )
