"""Loads a server's certificate again when its files change, as when an orchestrator rotates them.

New connections get the new certificate; open ones are not touched. While the files do not match,
because only one has been replaced yet, the former certificate stays in use.
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from dataclasses import dataclass

from process.sockets.certificate_chain import load_chain

log = logging.getLogger(__name__)

LOOK_S = 5.0

_Stamp = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class TlsFiles:
    """PEM files: the certificate with its chain, and its key if it is in another file."""

    cert: str
    key: str | None = None


class CertificateReloader:
    """Updates a server's TLS context from its files."""

    def __init__(self, context: ssl.SSLContext, files: TlsFiles) -> None:
        """`context` already has the current certificate."""
        self._context = context
        self._files = files
        self._loaded = self._failed = _stamp(files)

    async def run(self, interval_s: float = LOOK_S) -> None:
        """Look for changes until cancelled."""
        while True:
            await asyncio.sleep(interval_s)
            self.reload_if_changed()

    def reload_if_changed(self) -> None:
        """Load the files if they have changed since they were last read."""
        stamp = _stamp(self._files)
        if stamp is None or stamp in (self._loaded, self._failed):
            return
        cert, key = self._files.cert, self._files.key
        try:
            # A context that has refused files may have taken one of them.
            load_chain(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), cert, key)
            load_chain(self._context, cert, key)
        except OSError as error:  # includes ssl.SSLError
            self._failed = stamp
            log.warning(
                "the former certificate stays in use, because %s cannot be used: %s", cert, error
            )
            return
        self._loaded = stamp
        log.info("new connections get the certificate that %s has now", cert)


def _stamp(files: TlsFiles) -> _Stamp | None:
    """A value that changes when a file is replaced or written to; None while one is missing."""
    try:
        stats = [os.stat(path) for path in (files.cert, files.key) if path is not None]
    except OSError:
        return None
    return tuple((each.st_ino, each.st_size, each.st_mtime_ns) for each in stats)
