"""Remembered answers in a real Valkey: all routers find them, and nobody else can use them."""

from __future__ import annotations

import time
from array import array
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import redis

from gateway.history.answers import NEWEST_PLACES, AnswerMemory, AnswerScope, PromptText
from gateway.history.seal import Seal
from gateway.history.shared_answers import SharedAnswers
from gateway.text.tokenizer import Tokenizer
from process.store import response_records
from process.store.embedded_valkey import EmbeddedValkey
from process.store.ignored_entries import ANSWER, IgnoredEntries
from process.store.response_records import ResponseRecords, Shelf
from tests.unit.gateway.history.byte_answers import SECRET, memory, single_bytes

PROMPT, ANSWERED = "<|start|>user\nHello<|end|>\n<|start|>assistant\n", "Hello world"
NEXT = f"{PROMPT}{ANSWERED}<|end|>\n<|start|>user\nmore"
TENANT = AnswerScope("key:a", "key:a", is_conversation=True)
WAIT_S = 60.0


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


class Router:
    """A memory of answers over the store."""

    def __init__(self, tokenizer: Tokenizer, url: str, secret: str, ttl_s: int = 60) -> None:
        shelf = Shelf("answers", ttl_s, 1000)
        self.records = ResponseRecords(url, "c", 1 << 20, time.monotonic, shelf)
        self.ignored = IgnoredEntries()
        self.has_others = True
        self.now = 0.0
        self.shared = SharedAnswers(
            self.records,
            Seal(secret, "model"),
            self.ignored,
            lambda: self.has_others,
            60,
            WAIT_S,
            lambda: self.now,
        )
        self.memory: AnswerMemory = memory(tokenizer, self.shared, secret)
        self.tokenizer = tokenizer

    async def answer(self, scope: AnswerScope = TENANT) -> list[int]:
        """Answer the prompt in tokens of a byte each; the ids of the next prompt until then."""
        ids = self.tokenizer.encode(PROMPT, False)
        output = single_bytes(self.tokenizer, ANSWERED)
        await self.memory.note(PromptText(PROMPT, scope), ids, output)
        await self.shared.settled()
        return ids + output

    async def next_ids(self, scope: AnswerScope = TENANT) -> list[int]:
        """The ids of the conversation's next prompt."""
        plain = self.tokenizer.encode(NEXT, False)
        return await self.memory.restored(PromptText(NEXT, scope), [NEXT], plain)


@asynccontextmanager
async def routers(
    tokenizer: Tokenizer, valkey: EmbeddedValkey, *secrets: str, ttl_s: int = 60
) -> AsyncIterator[list[Router]]:
    made = [Router(tokenizer, valkey.url, secret, ttl_s) for secret in secrets]
    try:
        yield made
    finally:
        for each in made:
            await each.records.close()


def values(store: redis.Redis) -> list[bytes]:
    return [store.hget(key, "answer") for key in store.keys("baton:c:answers:record:*")]


async def test_another_router_finds_an_answer(
    tokenizer: Tokenizer, valkey: EmbeddedValkey, store: redis.Redis
) -> None:
    async with routers(tokenizer, valkey, SECRET, SECRET) as (one, other):
        expected = await one.answer()
        assert (await other.next_ids())[: len(expected)] == expected
        store.flushall()
        assert (await other.next_ids())[: len(expected)] == expected, "it is remembered here, too"


async def test_the_store_is_asked_once_for_each_place_but_the_newest(
    tokenizer: Tokenizer, valkey: EmbeddedValkey, store: redis.Redis
) -> None:
    text = "<|start|>user\nHello<|end|>" * 20
    plain = tokenizer.encode(text, False)

    def num_asked() -> int:
        return store.info("commandstats").get("cmdstat_hget", {"calls": 0})["calls"]

    async with routers(tokenizer, valkey, SECRET) as (router,):
        before = num_asked()
        for expected in (40, NEWEST_PLACES, NEWEST_PLACES):
            assert await router.memory.restored(PromptText(text, TENANT), [text], plain) == plain
            before, asked = num_asked(), num_asked() - before
            assert asked == expected


async def test_an_answer_that_is_kept_a_moment_later_is_found_in_the_next_turn(
    tokenizer: Tokenizer, valkey: EmbeddedValkey, store: redis.Redis
) -> None:
    async with routers(tokenizer, valkey, SECRET, SECRET) as (one, other):
        assert await other.next_ids() == tokenizer.encode(NEXT, False)
        expected = await one.answer()
        assert (await other.next_ids())[: len(expected)] == expected


async def test_a_router_alone_asks_only_for_what_a_former_one_left(
    tokenizer: Tokenizer, valkey: EmbeddedValkey, store: redis.Redis
) -> None:
    async with routers(tokenizer, valkey, SECRET, SECRET) as (one, other):
        one.has_others = other.has_others = False
        await one.shared.begin()
        assert not one.shared.asks
        expected = await one.answer()
        assert await other.next_ids() == tokenizer.encode(NEXT, False)
        await other.shared.begin()
        assert (await other.next_ids())[: len(expected)] == expected


async def test_a_router_goes_on_asking_for_what_another_left(
    tokenizer: Tokenizer, valkey: EmbeddedValkey, store: redis.Redis
) -> None:
    async with routers(tokenizer, valkey, SECRET, SECRET) as (one, other):
        other.shared.note_other_routers()
        expected = await one.answer()
        other.has_others, other.now = False, 59.0
        assert (await other.next_ids())[: len(expected)] == expected
        other.now = 60.0
        assert not other.shared.asks


async def test_what_is_no_record_is_no_answer(
    tokenizer: Tokenizer, valkey: EmbeddedValkey, store: redis.Redis
) -> None:
    async with routers(tokenizer, valkey, SECRET, SECRET) as (one, other):
        await one.answer()
        (key,) = store.keys("baton:c:answers:record:*")
        store.delete(key)
        store.set(key, "text")
        assert await other.next_ids() == tokenizer.encode(NEXT, False)


async def test_what_lies_in_the_store_tells_nothing_and_ends(
    tokenizer: Tokenizer, valkey: EmbeddedValkey, store: redis.Redis
) -> None:
    async with routers(tokenizer, valkey, SECRET, ttl_s=7) as (router,):
        await router.answer()
        await router.answer(AnswerScope("key:b", "key:b"))
    first, second = values(store)
    packed = array("I", single_bytes(tokenizer, ANSWERED)).tobytes()
    assert first != second
    for each in (first, second):
        assert packed[:8] not in each
    for key in store.keys("*"):
        assert b"key:" not in key
        assert 0 < store.ttl(key) <= 7


async def test_an_answer_that_may_not_be_stored_stays_in_its_router(
    tokenizer: Tokenizer, valkey: EmbeddedValkey, store: redis.Redis
) -> None:
    async with routers(tokenizer, valkey, SECRET) as (router,):
        expected = await router.answer(AnswerScope("key:a", "key:a", True, may_leave=False))
        assert store.keys("*") == []
        assert (await router.next_ids())[: len(expected)] == expected


@pytest.mark.parametrize("scope", [AnswerScope("key:b", "key:b"), AnswerScope("key:a/x", "key:a")])
async def test_another_tenant_and_another_salt_find_nothing(
    tokenizer: Tokenizer, valkey: EmbeddedValkey, store: redis.Redis, scope: AnswerScope
) -> None:
    async with routers(tokenizer, valkey, SECRET) as (router,):
        await router.answer()
        assert await router.next_ids(scope) == tokenizer.encode(NEXT, False)


async def test_another_secret_finds_nothing(
    tokenizer: Tokenizer, valkey: EmbeddedValkey, store: redis.Redis
) -> None:
    async with routers(tokenizer, valkey, SECRET, "another secret") as (one, other):
        await one.answer()
        assert await other.next_ids() == tokenizer.encode(NEXT, False)


def flipped(value: bytes) -> bytes:
    return value[:20] + bytes([value[20] ^ 1]) + value[21:]


@pytest.mark.parametrize(
    "spoil", [flipped, lambda value: value[:-1], lambda value: b"", lambda value: value[:5]]
)
async def test_an_answer_that_was_changed_is_ignored(
    tokenizer: Tokenizer, valkey: EmbeddedValkey, store: redis.Redis, spoil
) -> None:
    async with routers(tokenizer, valkey, SECRET, SECRET) as (one, other):
        await one.answer()
        (key,) = store.keys("baton:c:answers:record:*")
        store.hset(key, "answer", spoil(store.hget(key, "answer")))
        assert await other.next_ids() == tokenizer.encode(NEXT, False)
        assert other.ignored.counts[ANSWER] == 1


async def test_an_answer_in_anothers_place_is_ignored(
    tokenizer: Tokenizer, valkey: EmbeddedValkey, store: redis.Redis
) -> None:
    async with routers(tokenizer, valkey, SECRET, SECRET) as (one, other):
        await one.answer()
        (key,) = store.keys("baton:c:answers:record:*")
        (ours,) = values(store)
        await one.answer(AnswerScope("key:b", "key:b", True))
        (theirs,) = {*values(store)} - {ours}
        store.hset(key, "answer", theirs)
        assert await other.next_ids() == tokenizer.encode(NEXT, False)
        assert other.ignored.counts[ANSWER] == 1


async def test_without_its_store_a_router_goes_on(tokenizer: Tokenizer, tmp_path: Path) -> None:
    router = Router(tokenizer, f"unix://{tmp_path}/none", SECRET)
    assert await router.next_ids() == tokenizer.encode(NEXT, False)
    expected = await router.answer()
    assert (await router.next_ids())[: len(expected)] == expected
    await router.records.close()
