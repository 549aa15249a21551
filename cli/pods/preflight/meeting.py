"""Where the processes of one run find each other: entries in the store, by number.

An entry that another cluster secret signed is refused before anyone uses it, as foreign memory
descriptors can crash a native transport.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
import redis
from msgspec import Struct

from kv_transfer.authentication import authenticate_descriptor
from process.store.registry import client_from_url
from protocol.errors import ServiceError

_POLL_S = 0.1
_KEPT_S = 3600
_TIMEOUT_S = 5.0


class Entry(Struct, frozen=True):
    """The data that one process gives the others."""

    host: str
    agent: str
    descriptor: bytes
    num_blocks: int
    digest: bytes


class Meeting:
    """One process's place in a run; a context manager."""

    def __init__(self, redis_url: str, cluster: str, run: str, secret: str) -> None:
        self._client = client_from_url(redis.Redis, redis_url, _TIMEOUT_S)
        self._prefix = f"baton:{cluster}:preflight:{run}"
        self._secret = secret.encode()

    def __enter__(self) -> Meeting:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def enter(self, index: int, host: str, agent: str, descriptor: bytes, num_blocks: int) -> None:
        """Tell the others where this process's pool is. Raises ServiceError."""
        digest = authenticate_descriptor(self._secret, agent, descriptor, num_blocks)
        entry = Entry(host, agent, descriptor, num_blocks, digest)
        self._put(f"{self._prefix}:{index}", msgspec.msgpack.encode(entry))

    def wait_for(self, index: int, deadline: float, turn: Callable[[], None]) -> Entry:
        """Another process's entry; `turn` runs while waiting. Raises ServiceError if the entry does
        not come, or has another secret."""
        raw = self._wait(f"{self._prefix}:{index}", deadline, turn)
        if raw is None:
            raise ServiceError(
                f"process {index} has not registered: is its pod scheduled, and can it reach "
                "the store?"
            )
        try:
            entry = msgspec.msgpack.decode(raw, type=Entry)
        except msgspec.DecodeError as error:
            raise ServiceError(f"process {index} runs another version: {error}") from error
        wanted = authenticate_descriptor(
            self._secret, entry.agent, entry.descriptor, entry.num_blocks
        )
        if entry.digest != wanted:
            raise ServiceError(
                f"process {index} on {entry.host} has another cluster secret: give all the same"
            )
        return entry

    def leave(self, index: int) -> None:
        """Tell the others that this process writes no more. Raises ServiceError."""
        self._put(f"{self._prefix}:{index}:done", b"1")

    def wait_for_leave(self, index: int, deadline: float, turn: Callable[[], None]) -> bool:
        """Whether another process has left in time; `turn` runs while waiting."""
        return self._wait(f"{self._prefix}:{index}:done", deadline, turn) is not None

    def _put(self, key: str, value: bytes) -> None:
        try:
            self._client.set(key, value, ex=_KEPT_S)
        except (redis.RedisError, OSError) as error:
            raise ServiceError(f"the store: {error}") from error

    def _wait(self, key: str, deadline: float, turn: Callable[[], None]) -> bytes | None:
        asked_at = 0.0
        while time.monotonic() < deadline:
            turn()
            if time.monotonic() < asked_at + _POLL_S:
                time.sleep(0.001)
                continue
            asked_at = time.monotonic()
            try:
                found: bytes | None = self._client.get(key)
            except (redis.RedisError, OSError) as error:
                raise ServiceError(f"the store: {error}") from error
            if found is not None:
                return found
        return None
