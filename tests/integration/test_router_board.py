"""Routers tell each other through a real store."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar

import pytest

from process.store.embedded_valkey import EmbeddedValkey
from process.store.router_board import TTL_S, RouterBoard

WAIT_S = 60.0


class Router:
    """One router's part of a board; it knows the answer to its own name."""

    def __init__(self, valkey: EmbeddedValkey, cluster: str, name: bytes) -> None:
        self.name = name
        self.peers: dict[str, bytes] = {}
        self.board = RouterBoard(
            valkey.url, cluster, lambda: name, self._take, lambda asked: self._answer(asked)
        )
        self.task = asyncio.create_task(self.board.run())

    def _take(self, peers: dict[str, bytes]) -> None:
        self.peers = peers

    def _answer(self, question: bytes) -> bytes | None:
        return b"it is " + question if question == self.name else None


@asynccontextmanager
async def routers(valkey: EmbeddedValkey, cluster: str, *names: bytes) -> AsyncIterator[list]:
    made = [Router(valkey, cluster, name) for name in names]
    try:
        async with asyncio.timeout(WAIT_S):
            while any(len(each.peers) < len(names) - 1 for each in made):
                await asyncio.sleep(0.02)
        yield made
    finally:
        for each in made:
            each.task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await each.task


@pytest.fixture(autouse=True)
def short_periods(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("process.store.router_board.PERIOD_S", 0.1)


async def test_each_sees_the_others_and_gets_an_answer_from_the_one_that_knows(
    valkey: EmbeddedValkey, cluster: str
) -> None:
    async with routers(valkey, cluster, b"a", b"b", b"c") as (a, b, _):
        assert sorted(a.peers.values()) == [b"b", b"c"]
        assert await a.board.ask(b"b", WAIT_S) == b"it is b"
        assert await b.board.ask(b"c", WAIT_S) == b"it is c"
        assert await a.board.ask(b"nobody", WAIT_S) is None, "all have said no"


async def test_routers_see_each_other_whatever_their_hosts_clocks_say(
    valkey: EmbeddedValkey, cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead_s, now = ContextVar("ahead_s", default=0.0), time.time
    monkeypatch.setattr("time.time", lambda: now() + ahead_s.get())
    async with routers(valkey, cluster, b"a") as (a,):
        ahead_s.set(3600.0)
        async with routers(valkey, cluster, b"b") as (b,), asyncio.timeout(WAIT_S):
            while [*a.peers.values(), *b.peers.values()] != [b"b", b"a"]:
                await asyncio.sleep(0.02)


async def test_a_router_that_leaves_takes_its_summary_away(
    valkey: EmbeddedValkey, cluster: str
) -> None:
    async with routers(valkey, cluster, b"a", b"b") as (a, b):
        b.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await b.task
        async with asyncio.timeout(TTL_S / 2):
            while a.peers:
                await asyncio.sleep(0.02)


async def test_a_router_alone_asks_nobody(valkey: EmbeddedValkey, cluster: str) -> None:
    async with routers(valkey, cluster, b"a") as (a,):
        assert await a.board.ask(b"b", WAIT_S) is None
        assert a.peers == {}
