"""Routers tell each other what they have sent, through a real store."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import redis

from process.store.embedded_valkey import EmbeddedValkey
from process.store.ignored_entries import SENT, IgnoredEntries
from process.store.load_channel import MAX_BYTES, LoadChannel

WAIT_S = 60.0


class Router:
    """One router's end of the channel; `says` is what it has to tell, one message after another."""

    def __init__(self, valkey: EmbeddedValkey, cluster: str, has_others: bool = True) -> None:
        self.says: list[bytes] = []
        self.heard: list[bytes] = []
        self.ignored = IgnoredEntries()
        self.has_others = has_others
        self.channel = LoadChannel(
            valkey.url,
            cluster,
            self._news,
            self._take,
            lambda: self.has_others,
            self.ignored,
        )
        self.task = asyncio.create_task(self.channel.run())

    def say(self, *messages: bytes) -> None:
        self.says += messages
        self.channel.wake()

    def _news(self) -> bytes | None:
        if not self.says:
            return None
        self.channel.wake()
        return self.says.pop(0)

    def _take(self, message: bytes) -> None:
        if message.startswith(b"malformed"):
            raise msgspec.DecodeError("it is malformed")
        self.heard.append(message)

    async def stop(self) -> None:
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task


@asynccontextmanager
async def routers(valkey: EmbeddedValkey, cluster: str, number: int) -> AsyncIterator[list[Router]]:
    """Routers that hear each other."""
    made = [Router(valkey, cluster) for _ in range(number)]
    try:
        for each in made:
            await heard_by(each, [other for other in made if other is not each])
        for each in made:
            each.heard.clear()
        yield made
    finally:
        for each in made:
            await each.stop()


async def heard_by(sender: Router, others: list[Router], message: bytes = b"hello") -> None:
    """Wait until the others have heard a message of the sender, which says it until then."""
    async with asyncio.timeout(WAIT_S):
        while any(message not in each.heard for each in others):
            sender.say(message)
            await asyncio.sleep(0.05)
        while sender.says:
            await asyncio.sleep(0.02)


async def test_others_hear_what_a_router_tells_and_it_does_not_hear_itself(
    valkey: EmbeddedValkey, cluster: str
) -> None:
    async with routers(valkey, cluster, 3) as (a, b, c):
        a.say(b"first", b"second")
        await heard_by(a, [b, c], b"third")
        for each in (b, c):
            assert [e for e in each.heard if e != b"third" and e != b"hello"] == [
                b"first",
                b"second",
            ]
        assert a.heard == []


async def test_a_router_alone_keeps_its_news(valkey: EmbeddedValkey, cluster: str) -> None:
    async with routers(valkey, cluster, 2) as (a, b):
        a.has_others = False
        a.say(b"kept")
        await heard_by(b, [a], b"meanwhile")
        assert (a.says, b.heard) == ([b"kept"], [])


async def test_long_messages_are_neither_sent_nor_taken(
    valkey: EmbeddedValkey, cluster: str
) -> None:
    async with routers(valkey, cluster, 2) as (a, b):
        a.say(b"x" * (MAX_BYTES + 1))
        await heard_by(a, [b], b"good")
        assert b.ignored.counts[SENT] == 0
        with redis.Redis.from_url(valkey.url) as store:
            store.publish(f"baton:{cluster}:sent", b"i" * 12 + b"x" * (MAX_BYTES + 1))
        await heard_by(a, [b], b"better")
        assert set(b.heard) - {b"hello"} == {b"good", b"better"}
        assert b.ignored.counts[SENT] == 1


async def test_malformed_messages_are_counted_and_logged_once_for_each_sender(
    valkey: EmbeddedValkey, cluster: str
) -> None:
    async with routers(valkey, cluster, 3) as (a, b, c):
        for sender, good in ((a, b"good"), (c, b"better")):
            sender.say(b"malformed 1", b"malformed 2")
            await heard_by(sender, [b], good)
        assert set(b.heard) - {b"hello"} == {b"good", b"better"}
        assert b.ignored.counts[SENT] == 2


async def test_the_channel_goes_on_after_its_connections_have_broken(
    valkey: EmbeddedValkey, cluster: str
) -> None:
    async with routers(valkey, cluster, 2) as (a, b):
        with redis.Redis.from_url(valkey.url) as store:
            for kind in ("normal", "pubsub"):
                store.client_kill_filter(_type=kind, skipme=True)
        await heard_by(a, [b], b"again")
        assert [each.task.done() for each in (a, b)] == [False, False]
