"""Carries connections of clients to a Valkey that listens on a Unix socket only and has no TLS.

Clients speak TLS. Clients of earlier releases may use a port without TLS, which is closed once no
client has used it for a while. The bytes of a connection pass unread; Valkey asks for the password.
A client that sends nothing costs Valkey no connection.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from process.sockets.host_names import is_wildcard, unbracketed
from protocol.errors import ConfigError

log = logging.getLogger(__name__)

_PIECE_BYTES = 64 * 1024
_HANDSHAKE_S = 10.0
_FIRST_BYTES_S = 10.0
_SHUTDOWN_S = 2.0
_BACKLOG = 512

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


@dataclass(frozen=True, kw_only=True)
class FrontPorts:
    """Where clients connect. `plain_port` None: only with TLS. `plain_idle_s`: how long it stays
    open without a client; None: for good."""

    host: str
    tls_port: int
    plain_port: int | None
    plain_idle_s: float | None


class StoreFront:
    """Owns the listeners; each connection is a task that owns its two sockets."""

    def __init__(self, valkey: Path, tls: ssl.SSLContext, ports: FrontPorts) -> None:
        """`valkey`: the Unix socket."""
        self._valkey = valkey
        self._tls = tls
        self._ports = ports
        self._num_plain = 0
        self._plain_used_at = 0.0

    async def run(self, on_listening: Callable[[], None] = lambda: None) -> None:
        """Serve until cancelled. Raises ConfigError if a port is taken."""
        ports = self._ports
        encrypted = _listener(ports.host, ports.tls_port)
        plain = None if ports.plain_port is None else _listener(ports.host, ports.plain_port)
        async with asyncio.TaskGroup() as tasks:

            def take(serve: Serve, *ends: Any) -> None:
                tasks.create_task(_guarded(serve(*ends)))

            server = await asyncio.start_server(
                partial(take, self._serve),
                sock=encrypted,
                backlog=_BACKLOG,
                ssl=self._tls,
                ssl_handshake_timeout=_HANDSHAKE_S,
                ssl_shutdown_timeout=_SHUTDOWN_S,
            )
            if plain is not None:
                plain_server = await asyncio.start_server(
                    partial(take, self._serve_plain), sock=plain, backlog=_BACKLOG
                )
                tasks.create_task(self._keep_plain(plain_server))
            on_listening()
            async with server:
                await server.serve_forever()

    async def _keep_plain(self, plain: asyncio.Server) -> None:
        """Close the listener without TLS once it has been idle for its time."""
        loop = asyncio.get_running_loop()
        self._plain_used_at = loop.time()
        async with plain:
            if (idle_s := self._ports.plain_idle_s) is None:
                await plain.serve_forever()
                return
            left = idle_s
            while left > 0:
                await asyncio.sleep(left)
                used_at = loop.time() if self._num_plain else self._plain_used_at
                left = used_at + idle_s - loop.time()
        log.info("no client uses port %d, which has no TLS: closed", self._ports.plain_port)

    async def _serve_plain(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        first = await _first_bytes(reader, writer)
        if not first:
            return
        if not self._num_plain:
            peer, *_ = writer.get_extra_info("peername") or ("a client",)
            log.info("%s uses the port without TLS", peer.removeprefix("::ffff:"))
        self._num_plain += 1
        try:
            await self._carry(first, reader, writer)
        finally:
            self._num_plain -= 1
            self._plain_used_at = asyncio.get_running_loop().time()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first = await _first_bytes(reader, writer)
        if first:
            await self._carry(first, reader, writer)

    async def _carry(
        self, first: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Carry bytes both ways until either end has closed."""
        try:
            answers, orders = await asyncio.open_unix_connection(self._valkey)
        except OSError as error:
            log.warning("Valkey accepts no connection: %s", error)
            writer.close()
            return
        orders.write(first)
        ways = [
            asyncio.create_task(_pump(reader, orders)),
            asyncio.create_task(_pump(answers, writer)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            orders.close()
            writer.close()


async def _guarded(connection: Coroutine[Any, Any, None]) -> None:
    """Serve one connection, whose failure ends no other."""
    try:
        await connection
    except Exception:
        log.exception("a connection ended")


async def _first_bytes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """The first bytes that a client sends. Empty if the client has gone or stays silent; its
    connection is closed then."""
    first = b""
    with suppress(OSError):  # also when the time is over
        async with asyncio.timeout(_FIRST_BYTES_S):
            first = await reader.read(_PIECE_BYTES)
    if not first:
        writer.close()
    return first


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    """Pass bytes on until the source ends or the sink is gone."""
    try:
        while piece := await source.read(_PIECE_BYTES):
            sink.write(piece)
            await sink.drain()
    except OSError:
        return


def _listener(host: str, port: int) -> socket.socket:
    """A socket that listens; a wildcard means all addresses. Raises ConfigError."""
    try:
        if not is_wildcard(host):
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            return socket.create_server((unbracketed(host), port), family=family)
        if socket.has_dualstack_ipv6():
            return socket.create_server(
                ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG
            )
        return socket.create_server(("", port), backlog=_BACKLOG)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from error
