"""Connections of the store's synchronous client that encrypt as its `StoreTls` says."""

from __future__ import annotations

import socket
import ssl
from typing import Any

from redis.connection import SSLConnection

from process.store.store_tls import StoreTls, TlsError


class TlsConnection(SSLConnection):
    """A connection whose failed handshake says what to do."""

    def __init__(self, *, tls: StoreTls, **options: Any) -> None:
        super().__init__(**options)
        self._tls = tls

    def _wrap_socket_with_ssl(self, sock: socket.socket) -> ssl.SSLSocket:
        try:
            name = self._tls.server_name(self.host)
            wrapped = self._tls.context().wrap_socket(sock, server_hostname=name)
        except OSError as error:
            raise self._tls.explained(error) from error
        self._tls.note_certificate(wrapped.getpeercert())
        return wrapped

    def _error_message(self, exception: BaseException) -> str:
        if isinstance(exception, TlsError):
            return str(exception)
        return str(super()._error_message(exception))  # type: ignore[no-untyped-call]
