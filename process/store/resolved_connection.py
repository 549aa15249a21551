"""Connections of the store's asyncio client that resolve the store's name before they connect.

The client's limit for connecting includes the resolution, so with a slow name server it would never
connect, and blame the store. Here the lookup has a limit of its own, and its error says that the
name did not resolve. A lookup that exceeds the limit continues, and the next attempt uses its
result, so that even a name that takes longer than any attempt is found.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias

from redis.asyncio.connection import Connection, SSLConnection

from process.store.store_tls import StoreTls, TlsError

RESOLVE_S = 5.0
"""How long one attempt to connect waits for addresses."""
_HANDSHAKE_PART = 0.8
"""The share of the connection's time limit that the lookup may take."""

LookUp: TypeAlias = Callable[[str, int], Awaitable[list[str]]]
"""Addresses of a host, for connections to a port. Raises OSError."""


async def look_up(host: str, port: int) -> list[str]:
    """Ask the system's resolver. Raises OSError."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


class NameResolver:
    """Lookups of names, one at a time for each name. Owns the lookups that still run."""

    def __init__(self, look_up: LookUp = look_up, limit_s: float = RESOLVE_S) -> None:
        self._look_up = look_up
        self._limit_s = limit_s
        self._lookups: dict[str, asyncio.Task[list[str] | OSError]] = {}

    async def addresses(self, host: str, port: int) -> list[str]:
        """The host's addresses. Raises OSError if there are none, or none within the limit."""
        lookup = self._lookups.get(host)
        if lookup is None:
            lookup = self._lookups[host] = asyncio.create_task(self._outcome(host, port))
        done, _ = await asyncio.wait([lookup], timeout=self._limit_s)
        if not done:
            text = f"the name {host} did not resolve within {self._limit_s:g} s (DNS)"
            raise socket.gaierror(socket.EAI_AGAIN, text)
        if self._lookups.get(host) is lookup:
            del self._lookups[host]
        outcome = lookup.result()
        if isinstance(outcome, OSError):
            raise outcome
        return outcome

    async def _outcome(self, host: str, port: int) -> list[str] | OSError:
        """Addresses or an error, as a value, because no one may be waiting for them any more."""
        try:
            return await self._look_up(host, port)
        except OSError as error:
            return error


class ResolvedConnection(Connection):
    """A connection to the first address of its host that accepts it."""

    def __init__(self, *, resolver: NameResolver, **options: Any) -> None:
        super().__init__(**options)
        self._resolver = resolver
        self._address = self.host

    async def _connect(self) -> None:
        failure: OSError | None = None
        for address in await self._resolver.addresses(self.host, self.port):
            self._address = address
            try:
                await super()._connect()  # type: ignore[no-untyped-call]
            except OSError as error:
                failure = error
            else:
                return
        raise failure or socket.gaierror(socket.EAI_NONAME, f"{self.host} has no address")

    def _connection_arguments(self) -> Mapping[str, Any]:
        return dict(super()._connection_arguments(), host=self._address)


class ResolvedTlsConnection(ResolvedConnection, SSLConnection):
    """Like ResolvedConnection, with TLS. The certificate must be for the name, not for the address.
    The error of a failed handshake says what to do."""

    def __init__(self, *, tls: StoreTls, **options: Any) -> None:
        super().__init__(**options)
        self._tls = tls

    async def _connect(self) -> None:
        try:
            await super()._connect()
        except OSError as error:
            raise self._tls.explained(error) from error
        assert self._writer is not None
        self._tls.note_certificate(self._writer.get_extra_info("peercert"))

    async def disconnect(self, *arguments: Any, **details: Any) -> None:
        """Close at once: a store that is gone never answers the end of TLS, for which the client
        would wait as long as for a connection."""
        if self._writer is not None:
            self._writer.transport.abort()
        await super().disconnect(*arguments, **details)

    def _connection_arguments(self) -> Mapping[str, Any]:
        name = self._tls.server_name(self.host)
        arguments = {"host": self._address, "port": self.port, "server_hostname": name}
        if self.socket_connect_timeout is not None:
            # Shorter than the connection's limit, whose error would not say what took so long.
            arguments["ssl_handshake_timeout"] = _HANDSHAKE_PART * self.socket_connect_timeout
        return arguments | {"ssl": self._tls.context()}

    def _error_message(self, exception: BaseException) -> str:
        if isinstance(exception, TlsError):
            return str(exception)
        return str(super()._error_message(exception))


def resolve_apart(client: Any, resolver: NameResolver, tls: StoreTls | None = None) -> None:
    """Let an asyncio client without connections resolve names by `resolver`."""
    pool = client.connection_pool
    resolved = {Connection: ResolvedConnection, SSLConnection: ResolvedTlsConnection}
    if pool.connection_class in resolved:  # not those to Unix sockets
        pool.connection_class = resolved[pool.connection_class]
        pool.connection_kwargs["resolver"] = resolver
        if tls is not None:
            pool.connection_kwargs["tls"] = tls
