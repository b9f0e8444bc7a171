"""How is the public port served inside a service that owns its loop and its signals?"""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from services.recipe.limits_http import BoundedProtocol
from services.recipe.stream import FAREWELL_SECONDS

BACKLOG = 512
KEEP_ALIVE_SECONDS = 75


class _Server(uvicorn.Server):
    """Uvicorn without its own signal handling: the chassis decides when to stop."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Listener:
    """Serves an ASGI application on host:port until drained. `address` is where, once bound."""

    def __init__(self, app: ASGIApp, listen: str, drain_seconds: float) -> None:
        host, _, port = listen.rpartition(":")
        self._socket = _bind(host.strip("[]"), int(port))
        self.address = f"{host}:{self._socket.getsockname()[1]}"
        self._server = _Server(
            uvicorn.Config(
                app,
                http=BoundedProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,  # nothing here asks who the caller's address is
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=max(1, int(drain_seconds) - 1),
            )
        )
        self._closed = asyncio.Event()

    async def serve(self) -> None:
        """Accept connections until `drain`; raises when the server fails."""
        try:
            await self._server.serve(sockets=[self._socket])
            # The server cancels what is not out in time, but does not wait while those callers are told.
            if self._server.server_state.tasks:
                await asyncio.wait(self._server.server_state.tasks, timeout=FAREWELL_SECONDS)
        finally:
            self._closed.set()

    async def drain(self) -> None:
        """Accept no more connections and wait until the answers under way are out."""
        self._server.should_exit = True
        await self._closed.wait()


def _bind(host: str, port: int) -> socket.socket:
    """Return a listening socket; raise OSError when the port is taken, before anything else was started."""
    family, kind, protocol, _name, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    bound = socket.socket(family, kind, protocol)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
    except OSError as exc:
        bound.close()
        raise OSError(exc.errno, f"cannot listen on {host}:{port}: {exc.strerror}") from exc
    bound.setblocking(False)
    return bound
