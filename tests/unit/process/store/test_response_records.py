"""What the store keeps of responses, in a real Valkey: for whom, how many, how large, how long."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
import redis

from process.store import response_records
from process.store.embedded_valkey import EmbeddedValkey
from process.store.response_records import (
    IN_PROGRESS,
    QUEUED,
    RESPONSES,
    TTL_S,
    ResponseName,
    ResponseRecord,
    ResponseRecords,
    Shelf,
)
from protocol.errors import StoreAway, StoreFull, StoreRefused
from tests.effort import some
from tests.garbage import GARBAGE, keys_of, spoil

LEASE_S = 300.0


@pytest.fixture(scope="module")
def valkey() -> Iterator[EmbeddedValkey]:
    with EmbeddedValkey() as running:
        yield running


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may take long to answer."""
    monkeypatch.setattr(response_records, "TIMEOUT_S", 60.0)


@pytest.fixture
def store(valkey: EmbeddedValkey) -> Iterator[redis.Redis]:
    """What tests look at directly."""
    with redis.Redis.from_url(valkey.url) as client:
        client.flushall()
        yield client


@asynccontextmanager
async def records(
    valkey: EmbeddedValkey, max_bytes: int = 1 << 20, shelf: Shelf = RESPONSES
) -> AsyncIterator:
    made = ResponseRecords(valkey.url, "c", max_bytes, time.monotonic, shelf)
    try:
        yield made
    finally:
        await made.close()


def named(number: int, owner: str = "a") -> ResponseName:
    return ResponseName(owner, f"resp_{number}")


def done(answer: bytes = b"answer", given: bytes = b"input") -> ResponseRecord:
    return ResponseRecord("completed", False, answer, given)


RUNNING = ResponseRecord(QUEUED, True, b"begun", b"input")


async def kept(made: ResponseRecords, names: list[ResponseName]) -> list[ResponseName]:
    return [name for name in names if await made.read(name) is not None]


def lose_lease(store: redis.Redis, name: ResponseName) -> None:
    """What happens when a router that runs a response dies."""
    assert store.delete(f"baton:c:responses:lease:{name.key}") == 1


async def test_a_record_is_its_owners_alone_for_a_day(valkey, store) -> None:
    async with records(valkey) as made:
        await made.put(named(1), done())
        assert await made.read(named(1)) == done()
        assert await made.read(named(1, "b")) is None
        assert not await made.delete(named(1, "b"))
        assert await made.cancel(named(1, "b")) is None
        left = store.ttl(f"baton:c:responses:record:{named(1).key}")
        assert TTL_S - 600 < left <= TTL_S
        assert await made.delete(named(1))
        assert not await made.delete(named(1))
        assert await made.read(named(1)) is None


async def test_the_oldest_of_an_owner_make_room(valkey, store) -> None:
    async with records(valkey, shelf=Shelf(most_records=3)) as made:
        names = [named(place) for place in range(5)]
        for name in [named(0, "b"), *names]:
            await made.put(name, done())
        await made.put(names[2], done(b"again"))
        assert await kept(made, [*names, named(0, "b")]) == [*names[2:], named(0, "b")]


async def test_the_owner_with_the_most_bytes_makes_room(valkey, store) -> None:
    async with records(valkey, max_bytes=20_000) as made:
        small = [named(place, "b") for place in range(3)]
        for name in small:
            await made.put(name, done())
        large = [named(place) for place in range(8)]
        for name in large:
            await made.put(name, done(b"x" * 4000))
        assert await kept(made, small) == small
        assert await kept(made, large) == large[-4:]
        sizes = store.hgetall("baton:c:responses:sizes")
        total = int(store.get("baton:c:responses:total"))
        assert total == sum(map(int, sizes.values())) <= 20_000
        for name in [*small, *large]:
            await made.delete(name)
        assert int(store.get("baton:c:responses:total")) == 0
        assert store.keys("baton:c:responses:*") == [b"baton:c:responses:total"]


async def test_records_that_expired_no_longer_count(valkey, store) -> None:
    async with records(valkey) as made:
        await made.put(named(1), done())
        store.zadd("baton:c:responses:all", {named(1).key: 1})
        store.delete(f"baton:c:responses:record:{named(1).key}")
        await made.put(named(2), done())
        assert store.hkeys("baton:c:responses:sizes") == [named(2).key.encode()]
        assert store.zrange("baton:c:responses:of:a", 0, -1) == [b"resp_2"]


async def test_a_response_runs_until_it_is_finished_once(valkey, store) -> None:
    async with records(valkey) as made:
        await made.put(named(1), RUNNING, LEASE_S)
        assert (await made.read(named(1))).status == QUEUED
        assert await made.renew(named(1), LEASE_S)
        assert (await made.read(named(1))).status == IN_PROGRESS
        assert await made.finish(named(1), "incomplete", b"whole")
        assert not await made.finish(named(1), "completed", b"other")
        assert not await made.renew(named(1), LEASE_S)
        assert (await made.cancel(named(1))).status == "incomplete"
        found = await made.read(named(1))
        assert found == ResponseRecord("incomplete", True, b"whole", b"input")


async def test_a_cancelled_response_stays_cancelled(valkey, store) -> None:
    async with records(valkey) as made:
        await made.put(named(1), RUNNING, LEASE_S)
        assert (await made.cancel(named(1))).status == "cancelled"
        assert (await made.cancel(named(1))).status == "cancelled"
        assert not await made.renew(named(1), LEASE_S)
        assert not await made.finish(named(1), "completed", b"late")
        assert (await made.read(named(1))).answer == b"begun"


async def test_a_response_whose_router_died_has_failed_for_good(valkey, store) -> None:
    async with records(valkey) as made:
        for number in (1, 2):
            await made.put(named(number), RUNNING, LEASE_S)
            lose_lease(store, named(number))
        assert (await made.read(named(1))).status == "failed"
        assert (await made.cancel(named(2))).status == "failed"
        for number in (1, 2):
            assert not await made.renew(named(number), LEASE_S)
            assert not await made.finish(named(number), "completed", b"late")


async def test_a_deleted_response_is_not_kept_when_it_ends(valkey, store) -> None:
    async with records(valkey) as made:
        await made.put(named(1), RUNNING, LEASE_S)
        assert await made.delete(named(1))
        assert not await made.renew(named(1), LEASE_S)
        assert not await made.finish(named(1), "completed", b"late")
        assert await made.read(named(1)) is None
        assert store.keys("*lease*") == []


async def test_a_store_that_is_away_is_not_asked_again_at_once() -> None:
    now = 0.0
    with EmbeddedValkey() as gone:
        url = gone.url
    made = ResponseRecords(url, uuid.uuid4().hex, 1 << 20, lambda: now)
    assert not made.is_away
    for _ in range(2):
        with pytest.raises(StoreAway, match="cannot be reached"):
            await made.read(named(1))
        assert made.is_away
    now = 10.0
    assert not made.is_away
    await made.close()


async def test_the_oldest_make_room_in_a_full_store(valkey, store) -> None:
    """The store's own limit: reads go on, and the oldest records make room."""
    async with records(valkey, max_bytes=1 << 30) as made:
        names = [named(place) for place in range(8)]
        for name in names:
            await made.put(name, done(b"x" * 100_000))
        try:
            store.config_set("maxmemory", 1)
            with pytest.raises(StoreFull):
                await made.put(named(9), done())
            assert not made.is_away
            assert await kept(made, names) == names[5:], "five attempts made no room"
            used = store.info("memory")["used_memory"]
            store.config_set("maxmemory", used + 500_000)
            for name in names:
                await made.put(name, done(b"y" * 100_000))
            left = await kept(made, names)
            assert left
            assert left == names[-len(left) :]
        finally:
            store.config_set("maxmemory", 0)


async def test_a_refused_call_is_no_store_that_is_away(valkey, store) -> None:
    async with records(valkey) as made:
        await made.put(named(1), done())
        store.acl_setuser("default", commands=["-hset"], keys=["*"], enabled=True)
        try:
            with pytest.raises(StoreRefused):
                await made.put(named(2), done())
        finally:
            store.acl_setuser("default", commands=["+hset"], keys=["*"], enabled=True)
        assert not made.is_away
        assert await made.read(named(1)) == done()


@pytest.mark.parametrize("first", some(range(len(GARBAGE)), 4))
async def test_records_are_kept_and_read_beside_garbage(valkey, store, first: int) -> None:
    async with records(valkey) as made:
        await made.put(named(1), done())
        spoil(store, keys_of("c", [], [named(1).key, named(2).key]), first)
        for call in (made.read, made.cancel):
            await call(named(1))
        await made.put(named(3), done())
        assert await made.read(named(3)) == done()
        await made.put(named(2), RUNNING, LEASE_S)
        assert await made.renew(named(2), LEASE_S)
        assert await made.finish(named(2), "completed", b"end")
        await made.delete(named(1))
        assert await made.read(named(1)) is None
