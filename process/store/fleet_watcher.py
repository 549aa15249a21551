"""Follows the workers that are registered in the store, or reads them once.

Built on `process.store.registry`. The store may go away at any time: the last known members stay,
and no request waits for the store.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import redis
import redis.asyncio
from redis.exceptions import AuthenticationError, NoPermissionError, RedisError

from process.store.client_faults import answer_of, check_cancelled, drop_connections
from process.store.first_contact import advised, is_refusal, refused
from process.store.ignored_entries import IgnoredEntries
from process.store.registry import (
    BACKOFF_MAX_S,
    BACKOFF_S,
    SETTLE_S,
    FleetView,
    Registry,
    client_from_url,
    expiry_of,
)
from protocol.addresses import shown_address
from protocol.errors import ServiceError
from protocol.registration import WorkerInfo

log = logging.getLogger(__name__)

Members = Mapping[str, WorkerInfo]


class FleetWatcher:
    """Follows the fleet by announcements and a periodic full read, on one event loop.

    `members` is the last known fleet. `is_connected` says whether the store answers now, `trouble`
    says why it does not, and `notice` announces trouble. Registrations that cannot be decoded are
    noted in `ignored`. `run` calls `on_change` with all members after every change; an exception of
    `on_change` ends `run`.
    """

    def __init__(
        self,
        redis_url: str,
        cluster: str,
        on_change: Callable[[Members], None],
        *,
        poll_s: float = 0.5,
        settle_s: float = SETTLE_S,
        ignored: IgnoredEntries | None = None,
    ) -> None:
        """Connects to nothing yet. Raises ConfigError for a malformed URL."""
        self.is_connected = False
        self.trouble: str | None = None
        self._where = shown_address(redis_url)
        self._client = client_from_url(redis.asyncio.Redis, redis_url, max(2 * poll_s, 2.0))
        self._expiry = expiry_of(self._client)
        self._registry = Registry(cluster)
        self._on_change = on_change
        self._poll_s = poll_s
        self._view = FleetView(settle_s, ignored)
        self._was_reported_away = self._was_served = False

    @property
    def certificate_end(self) -> float:
        """When the store's certificate expires, as Unix time; NaN while there is none."""
        return math.nan if self._expiry.at is None else self._expiry.at

    @property
    def notice(self) -> str | None:
        """A line that the store's certificate expires soon; None if it does not."""
        text = self._expiry.warning(time.time())
        return text and f"the certificate of {self._where} {text}"

    @property
    def members(self) -> Members:
        """The last known fleet by worker id."""
        return self._view.members

    async def run(self) -> None:
        """Watch until cancelled, waiting while the store is away. Closes the connections. Raises
        ConfigError if the store refuses us before it has ever served us."""
        backoff = BACKOFF_S
        try:
            while True:
                try:
                    await self._follow()
                except (RedisError, OSError) as error:
                    check_cancelled()
                    await drop_connections(self._client)
                    if not self._was_served and is_refusal(error):
                        raise refused(self._where, error) from error
                    backoff = BACKOFF_S if self.is_connected else min(2 * backoff, BACKOFF_MAX_S)
                    self._note_away(error)
                    await asyncio.sleep(backoff)
        finally:
            self.is_connected = False
            await self._client.aclose()

    async def _follow(self) -> None:
        """Read the fleet after every announcement, and at least every `poll_s`."""
        async with self._client.pubsub(ignore_subscribe_messages=True) as announcements:
            await answer_of(announcements.subscribe(self._registry.channel))
            while True:
                self._take(await answer_of(self._client.eval(*self._registry.read())))
                check_cancelled()
                await answer_of(announcements.get_message(timeout=self._poll_s))
                check_cancelled()

    def _take(self, reply: list[bytes]) -> None:
        if self._was_reported_away:
            log.info("%s is back", self._where)
        self._expiry.log_warning(self._where, time.time())
        self.is_connected, self._was_reported_away, self.trouble = True, False, None
        self._was_served = True
        if self._view.take(reply, time.monotonic()):
            self._on_change(self._view.members)

    def _note_away(self, error: Exception) -> None:
        self.is_connected = False
        self.trouble = _trouble(self._where, error)
        self._view.interrupted()
        if not self._was_reported_away:
            self._was_reported_away = True
            log.warning(
                "cannot reach %s, going on with the %d workers last known: %s",
                self._where,
                len(self._view.members),
                error,
            )


def _trouble(where: str, error: Exception) -> str:
    """The trouble with the store, in one line."""
    if isinstance(error, (AuthenticationError, NoPermissionError)):
        return f"{where} refuses our password: {error}"
    return f"{where} cannot be reached: {error}"


def read_fleet(redis_url: str, cluster: str, timeout_s: float = 5.0) -> dict[str, WorkerInfo]:
    """Read the registered workers once. Raises ConfigError, or ServiceError if the store fails."""
    client: Any = client_from_url(redis.Redis, redis_url, timeout_s)
    view = FleetView()
    try:
        view.take(client.eval(*Registry(cluster).read()), time.monotonic())
        expiry_of(client).log_warning(shown_address(redis_url), time.time())
    except (RedisError, OSError) as error:
        where = shown_address(redis_url)
        text = advised(redis_url, error)
        raise ServiceError(f"cannot read the fleet from {where}: {text}") from error
    finally:
        client.close()
    return view.members
