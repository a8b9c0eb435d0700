"""uvicorn, with a limit on slow headers, and an immediate end on the second signal."""

from __future__ import annotations

import asyncio
import os
import socket
from types import FrameType

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.auto import AutoHTTPProtocol

__all__ = ["run"]

#: Seconds after which a connection is closed if it sent no complete request and awaits no answer.
IDLE_SECONDS = 30.0
#: Connections at once; one more gets status 503.
MOST_CONNECTIONS = 1024
#: Seconds that running requests have after the first signal.
DRAIN_SECONDS = 120


class PatientProtocol(AutoHTTPProtocol):  # type: ignore[misc,valid-type]
    """Closes connections that send no request."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Start to watch the connection."""
        super().connection_made(transport)
        self._n_done = -1
        self._look()

    def _look(self) -> None:
        if self.transport.is_closing():
            return
        n_done = self._n_requests()
        if n_done is not None and n_done == self._n_done:
            self.transport.close()
            return
        self._n_done = -1 if n_done is None else n_done
        self.loop.call_later(IDLE_SECONDS, self._look)

    def _n_requests(self) -> int | None:
        """Return a value that changes with each request; None while one is answered."""
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            return None
        return id(cycle)


class Server(uvicorn.Server):
    """Drains at the first signal and ends at the second."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop listening; at the second signal, end the process."""
        if self.should_exit:
            os._exit(128 + sig)  # blocks are written whole or not at all
        super().handle_exit(sig, frame)


def run(app: Starlette, listener: socket.socket) -> None:
    """Serve until a signal comes."""
    config = uvicorn.Config(
        app,
        http=PatientProtocol,
        log_level="warning",
        access_log=False,
        server_header=False,
        limit_concurrency=MOST_CONNECTIONS,
        timeout_graceful_shutdown=DRAIN_SECONDS,
        proxy_headers=False,
    )
    Server(config).run(sockets=[listener])
