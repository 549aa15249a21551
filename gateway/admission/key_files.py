"""Reads key files again when they change, so that adding or revoking a key needs no restart.

A file that cannot be used, because it is half written or holds no key, leaves the former keys in
use. Requests that run when their key is revoked run on.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter

from gateway.admission.api_keys import KeyRing, StoredKey, read_keys, stored_keys
from protocol.errors import ConfigError

log = logging.getLogger(__name__)

LOOK_S = 2.0
MANY_WITHOUT_ID = 100

_Stamp = tuple[int, int, int]


@dataclass
class _KeyFile:
    """A file, the ring that holds its keys and the `plain` ones, and the state of the file at the
    last reading."""

    path: str
    ring: KeyRing
    plain: Sequence[StoredKey]
    has_terms: bool
    stamp: _Stamp | None


class KeyFiles:
    """Makes key rings, and updates each ring when its file changes."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._files: list[_KeyFile] = []
        self._refused = Counter(
            "baton_http_key_files_refused",
            "Changed key files that could not be used; the former keys stay in use",
            registry=registry,
        )

    def ring(self, keys: Iterable[str], path: str | None, has_terms: bool = False) -> KeyRing:
        """A ring of the plain `keys` and the keys of a file; `has_terms` as in `read_keys`. Raises
        ConfigError."""
        plain = stored_keys(keys)
        ring = KeyRing()
        if path is None:
            ring.replace(plain)
            return ring
        stamp = _stamp(path)
        ring.replace([*plain, *read_keys(path, has_terms)])
        _warn_of_searches(path, ring)
        self._files.append(_KeyFile(path, ring, plain, has_terms, stamp))
        return ring

    async def run(self, asked: asyncio.Event, interval_s: float = LOOK_S) -> None:
        """Look for changes until cancelled; read all files whenever `asked` is set."""
        while True:
            try:
                async with asyncio.timeout(interval_s):
                    await asked.wait()
            except TimeoutError:
                self.read_changes()
            else:
                asked.clear()
                self.read_changes(at_all=True)

    def read_changes(self, at_all: bool = False) -> None:
        """Read the files that have changed since the last reading; with `at_all`, all files."""
        for each in self._files:
            stamp = _stamp(each.path)
            if at_all or (stamp is not None and stamp != each.stamp):
                each.stamp = stamp
                self._read(each)

    def _read(self, file: _KeyFile) -> None:
        former = set(file.ring.names)
        try:
            keys = read_keys(file.path, file.has_terms)
        except ConfigError as error:
            self._refused.inc()
            log.error("the former keys stay in use: %s", error)
            return
        file.ring.replace([*file.plain, *keys])
        _warn_of_searches(file.path, file.ring)
        names = set(file.ring.names)
        log.info(
            "key file %s was read again: %d keys; new: %s; gone: %s",
            file.path, len(keys), _listed(names - former), _listed(former - names),
        )  # fmt: skip


def _warn_of_searches(path: str, ring: KeyRing) -> None:
    if ring.num_without_id > MANY_WITHOUT_ID:
        log.warning(
            "%d keys carry no id, so that each wrong key is compared with all of them: "
            "`baton keys --check %s` lists those to renew",
            ring.num_without_id, path,
        )  # fmt: skip


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def _stamp(path: str) -> _Stamp | None:
    """A value that changes when the file is replaced or written to; None while it is missing."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return (found.st_ino, found.st_size, found.st_mtime_ns)
