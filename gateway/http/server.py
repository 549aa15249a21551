"""Listening for HTTP: one socket, one uvicorn server, an orderly end.

Owns the listening socket until the server takes it over. The process, not uvicorn, handles signals:
the caller of `serve_until` says when to stop.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import math
import os
import socket
import ssl
import struct
import termios
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import uvicorn
from starlette.types import ASGIApp

from gateway.http.certificates import CertificateReloader, TlsFiles
from gateway.http.connection import BoundedProtocol, BoundedProtocols
from gateway.http.exchange import CLOSE_HEADER
from process.sockets.certificate_chain import load_chain
from process.sockets.host_names import unbracketed
from protocol.errors import ConfigError

BACKLOG = 2048
CLOSE_WAIT_S = 0.5
"""How long clients may take to close a TLS connection that a stopping server has closed."""
ABORT_WAIT_S = 2.0
"""How long requests may take to end once the grace period is over, and clients to read that."""
CANCEL_WAIT_S = 1.0
"""How long requests whose connections were aborted may take to end before they are cancelled."""


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 means any free port. Raises ConfigError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((unbracketed(host), port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror}") from error


def url_of(listener: socket.socket, tls: TlsFiles | None = None) -> str:
    """The URL at which clients on this host reach the listener."""
    scheme = "http" if tls is None else "https"
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def write_port_file(path: str, port: int) -> None:
    """Write the port atomically, so that a reader never sees a partial file. Raises ConfigError."""
    target = Path(path)
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        partial.write_text(f"{port}\n")
        partial.replace(target)
    except OSError as error:
        raise ConfigError(f"port file {path} cannot be written: {error.strerror}") from error


@dataclass(frozen=True)
class Doorway:
    """How connections are accepted: their bounds, and TLS if configured."""

    protocols: BoundedProtocols
    tls: TlsFiles | None = None


class HttpServer(uvicorn.Server):
    """Serves until told to stop, then gives streams `grace_s` to finish.

    `on_started` is called when requests are accepted, `on_grace_over` when the remaining requests
    must end now. Connections that remain soon after are aborted: their clients do not read, or have
    not sent a whole request. Requests that do not end then are cancelled.
    """

    def __init__(
        self,
        app: ASGIApp,
        doorway: Doorway,
        grace_s: float,
        on_started: Callable[[], None],
        on_grace_over: Callable[[], None],
    ) -> None:
        """Raises ConfigError if the TLS files cannot be used."""
        self._doorway = doorway
        tls = doorway.tls
        config = uvicorn.Config(
            app,
            http=doorway.protocols.factory(),
            ws="none",
            ssl_certfile=None if tls is None else tls.cert,
            ssl_keyfile=None if tls is None else tls.key,
            log_config=None,
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=math.ceil(grace_s + ABORT_WAIT_S + CANCEL_WAIT_S),
            server_header=False,
            proxy_headers=False,
        )
        try:
            if tls is not None:  # uvicorn would ask for the passphrase of a key
                load_chain(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), tls.cert, tls.key)
            config.load()
        except OSError as error:  # includes ssl.SSLError
            assert tls is not None, "nothing else is read here"
            raise ConfigError(f"TLS with {tls.cert}, {tls.key or tls.cert}: {error}") from error
        if config.ssl is not None:
            config.ssl.options |= ssl.OP_NO_RENEGOTIATION  # whatever the library's default is
        super().__init__(config)
        self._tls = tls
        self._grace_s = grace_s
        self._on_started = on_started
        self._on_grace_over = on_grace_over

    async def serve_until(self, stop: asyncio.Event, listener: socket.socket) -> None:
        """Serve on `listener` until `stop` is set; returns when no connection and no request is
        left."""
        watching = [asyncio.create_task(self._watch(stop))]
        if self._tls is not None:
            watching.append(asyncio.create_task(self._finish_closes(stop)))
        try:
            await self.serve(sockets=[listener])
            if self.server_state.tasks:
                await asyncio.wait(self.server_state.tasks, timeout=ABORT_WAIT_S)
        finally:
            for task in watching:
                task.cancel()
            await asyncio.wait(watching)
            self._doorway.protocols.peers.close()

    def wait_for(self, task: asyncio.Task[None]) -> None:
        """At the end of the server, wait for this task as for a request, although it has no
        connection."""
        self.server_state.tasks.add(task)
        task.add_done_callback(self.server_state.tasks.discard)

    def certificate_reloader(self) -> CertificateReloader | None:
        """Updates the server's certificate from its files; None without TLS."""
        if self._tls is None or self.config.ssl is None:
            return None
        return CertificateReloader(self.config.ssl, self._tls)

    def close_after_answers(self) -> None:
        """Ask clients in every answer from now on to close their connections."""
        self.config.encoded_headers = [*self.config.encoded_headers, CLOSE_HEADER]
        state = self.server_state
        state.default_headers = [*state.default_headers, CLOSE_HEADER]

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Run uvicorn's startup, then call `on_started`."""
        await super().startup(sockets)
        self._on_started()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the process."""
        yield

    async def _watch(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self.should_exit = True
        await asyncio.sleep(self._grace_s)
        self._on_grace_over()
        await asyncio.sleep(ABORT_WAIT_S)
        for connection in self._connections():
            connection.abort("server stopped")

    async def _finish_closes(self, stop: asyncio.Event) -> None:
        """Once the server stops, end TLS connections that are closed on our side, whose clients
        have received everything. The event loop would wait 30 s for them to close theirs, and
        clients that keep idle connections in a pool do not look."""
        await stop.wait()
        ended: set[BoundedProtocol] = set()
        while True:
            await asyncio.sleep(CLOSE_WAIT_S)
            former = ended
            ended = {
                each
                for each in self._connections()
                if each.transport.is_closing() and _has_received_all(each.transport)
            }
            for each in former & ended:  # looked at twice: at one look, more may wait to be written
                each.transport.abort()

    def _connections(self) -> list[BoundedProtocol]:
        return [cast(BoundedProtocol, each) for each in self.server_state.connections]


def _has_received_all(transport: asyncio.Transport) -> bool:
    """Whether the client's host has confirmed all bytes. Linux only: False on other systems."""
    opened = transport.get_extra_info("socket")
    if opened is None:
        return False  # the loop has closed it, and will tell the connection next
    try:
        unconfirmed = fcntl.ioctl(opened.fileno(), termios.TIOCOUTQ, bytes(4))
    except OSError:
        return False  # this system does not say
    return struct.unpack("i", unconfirmed) == (0,)
