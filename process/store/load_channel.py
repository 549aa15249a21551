"""The channel in the store on which routers tell each other what they have sent to workers.

The channel `baton:CLUSTER:sent` carries a router's id and bytes, whose meaning is the caller's. No
request waits for it. Messages are lost for routers that are not connected. A router alone sends
nothing. Each message costs every router CPU time, so busy routers put more into one message.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from typing import Any

import msgspec
import redis.asyncio

from process.sockets.message_budget import MessageBudget
from process.store.client_faults import (
    answer_of,
    check_cancelled,
    drop_connections,
    keep_using,
)
from process.store.ignored_entries import DECODE_ERRORS, SENT, IgnoredEntries
from process.store.registry import BACKOFF_MAX_S, client_from_url

ALONE_S = 1.0
"""How often a router that is alone looks for others, and the longest wait for a message."""
RENEW_S = 60.0
"""How long messages go out over one connection. A store that has become a replica keeps it and
accepts messages, but its name leads to the new primary, where other routers listen."""
MAX_BYTES = 1 << 20
"""Longer messages are not sent, and ignored."""
_ID_BYTES = 12


class LoadChannel:
    """One router's end of the channel.

    `news` returns what has happened since its last call, None if nothing has; `on_news` takes that
    of another router, and raises one of `DECODE_ERRORS` if it is malformed. `has_others` returns
    whether there are other routers. Call `wake()` when there is news.
    """

    def __init__(
        self,
        redis_url: str,
        cluster: str,
        news: Callable[[], bytes | None],
        on_news: Callable[[bytes], None],
        has_others: Callable[[], bool],
        ignored: IgnoredEntries | None = None,
    ) -> None:
        """Connects to nothing yet. Raises ConfigError for a malformed URL."""
        self._woken = asyncio.Event()
        self.wake = self._woken.set
        self._id = secrets.token_bytes(_ID_BYTES)
        self._client: Any = client_from_url(redis.asyncio.Redis, redis_url, 2.0)
        self._channel = f"baton:{cluster}:sent"
        self._news = news
        self._on_news = on_news
        self._has_others = has_others
        self._ignored = ignored or IgnoredEntries()

    async def run(self) -> None:
        """Tell and listen until cancelled. Closes the connections."""
        try:
            await keep_using(self._client, (self._tell, self._listen), BACKOFF_MAX_S)
        finally:
            await self._client.aclose()

    async def _tell(self) -> None:
        budget, now = MessageBudget(), asyncio.get_running_loop().time
        renewed = now()
        while True:
            await self._woken.wait()
            if not self._has_others():
                await asyncio.sleep(ALONE_S)
                continue
            self._woken.clear()
            news = self._news()
            if news is None or len(news) > MAX_BYTES:
                continue
            if now() >= renewed + RENEW_S:
                await drop_connections(self._client)
                renewed = now()
            await answer_of(self._client.publish(self._channel, self._id + news))
            check_cancelled()
            sent = now()
            await asyncio.sleep(budget.spend(sent) - sent)

    async def _listen(self) -> None:
        async with self._client.pubsub(ignore_subscribe_messages=True) as channel:
            await answer_of(channel.subscribe(self._channel))
            while True:
                message = await answer_of(channel.get_message(timeout=ALONE_S))
                check_cancelled()
                if message is not None:
                    self._take(message["data"])

    def _take(self, data: bytes) -> None:
        if data.startswith(self._id):
            return
        sender, news = data[:_ID_BYTES], data[_ID_BYTES:]
        try:
            if len(news) > MAX_BYTES:
                raise msgspec.DecodeError(f"it has more than {MAX_BYTES} bytes")
            self._on_news(news)
        except DECODE_ERRORS as error:  # logged once for each sender, not for each message
            self._ignored.note(SENT, f"{self._channel} of {sender.hex()}", b"", error)
