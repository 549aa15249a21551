"""The messages that routers exchange through the store: summaries that expire, and questions.

Under `baton:CLUSTER:` there are `router:ID` (a router's summary, expires), `routers` (ids by the
time of their expiry) and the channels `ask` and `answer:ID`. The store carries bytes; their meaning
is the caller's. No request waits for the board. While the store is away, summaries of others expire
here as they would in the store, and questions find no answer.
"""

from __future__ import annotations

import asyncio
import logging
import re
import uuid
from collections.abc import Callable
from typing import Any

import msgspec
import redis.asyncio
from redis.exceptions import RedisError, ResponseError

from process.store.client_faults import answer_of, check_cancelled, keep_using
from process.store.ignored_entries import (
    DECODE_ERRORS,
    QUESTION,
    ROUTER,
    SUMMARY,
    IgnoredEntries,
)
from process.store.registry import BACKOFF_MAX_S, client_from_url

log = logging.getLogger(__name__)

PERIOD_S = 2.0
TTL_S = 15.0
MAX_BYTES = 1 << 20
"""Longer summaries and answers are not sent."""


_MOST_PEERS = 256
_ROUTER_ID = re.compile(rb"[0-9a-f]{12}")
_WRONG_TYPE = "WRONGTYPE"


class _Ask(msgspec.Struct, frozen=True, array_like=True):
    router: str
    nonce: str
    question: bytes


class _Answer(msgspec.Struct, frozen=True, array_like=True):
    nonce: str
    body: bytes


class _Question:
    """A question that waits for the answers of `waits_for` routers."""

    def __init__(self, waits_for: int) -> None:
        self.waits_for = waits_for
        self.found: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()

    def take(self, body: bytes) -> None:
        """Take a router's answer; empty if it knows nothing."""
        self.waits_for -= 1
        if not self.found.done() and (body or self.waits_for <= 0):
            self.found.set_result(body or None)


class RouterBoard:
    """One router's part of the board.

    `summary` makes this router's own, `on_peers` takes those of the others by router id,
    `on_question` answers another router's question, with None if it knows nothing.
    """

    def __init__(
        self,
        redis_url: str,
        cluster: str,
        summary: Callable[[], bytes],
        on_peers: Callable[[dict[str, bytes]], None],
        on_question: Callable[[bytes], bytes | None],
        ignored: IgnoredEntries | None = None,
    ) -> None:
        """Connects to nothing yet. Raises ConfigError for a malformed URL."""
        self.router_id = uuid.uuid4().hex[:12]
        self._client: Any = client_from_url(redis.asyncio.Redis, redis_url, 2.0)
        self._prefix = f"baton:{cluster}:"
        self._summary = summary
        self._on_peers = on_peers
        self._on_question = on_question
        self._ignored = ignored or IgnoredEntries()
        self._num_peers = 0
        self._questions: dict[str, _Question] = {}

    async def run(self) -> None:
        """Publish, read and answer until cancelled. Closes the connections."""
        try:
            works = (self._exchange, self._listen)
            await keep_using(self._client, works, BACKOFF_MAX_S, self._forget_peers)
        finally:
            await self._leave()
            await self._client.aclose()

    async def ask(self, question: bytes, timeout_s: float) -> bytes | None:
        """The first answer of another router. None if no router knows one, or if the store is
        away."""
        if not self._num_peers:
            return None
        nonce = uuid.uuid4().hex
        waiting = self._questions[nonce] = _Question(self._num_peers)
        try:
            async with asyncio.timeout(timeout_s):
                message = msgspec.msgpack.encode(_Ask(self.router_id, nonce, question))
                await answer_of(self._client.publish(f"{self._prefix}ask", message))
                return await waiting.found
        except (TimeoutError, RedisError, OSError) as error:
            log.debug("no router answered: %s", error)
            return None
        finally:
            del self._questions[nonce]

    def _forget_peers(self) -> None:
        self._num_peers = 0
        self._on_peers({})

    async def _exchange(self) -> None:
        """Publish our summary and read those of the others, every `PERIOD_S`."""
        while True:
            now = await self._store_time()
            peers = await self._summaries(await self._publish(self._summary(), now))
            self._num_peers = len(peers)
            self._on_peers(peers)
            check_cancelled()
            await asyncio.sleep(PERIOD_S)

    async def _leave(self) -> None:
        """Remove our summary, so that this router does not count as lost."""
        try:
            async with self._client.pipeline(transaction=False) as pipe:
                pipe.delete(f"{self._prefix}router:{self.router_id}")
                pipe.zrem(f"{self._prefix}routers", self.router_id)
                await answer_of(pipe.execute())
        except (RedisError, OSError) as error:
            log.debug("the router's summary expires by itself: %s", error)

    async def _store_time(self) -> float:
        """The store's clock, in seconds: those of the routers' hosts may differ."""
        seconds, microseconds = await answer_of(self._client.time())
        return float(seconds + microseconds / 1e6)

    async def _publish(self, body: bytes, now: float) -> list[str]:
        """Publish our summary; returns the ids of the other routers."""
        index = f"{self._prefix}routers"
        async with self._client.pipeline(transaction=False) as pipe:
            if len(body) <= MAX_BYTES:
                pipe.set(f"{self._prefix}router:{self.router_id}", body, ex=round(TTL_S))
            pipe.zadd(index, {self.router_id: now + TTL_S})
            pipe.zremrangebyscore(index, "-inf", now)
            pipe.zrange(index, 0, _MOST_PEERS)
            try:
                *_, members = await answer_of(pipe.execute())
            except ResponseError as error:
                if _WRONG_TYPE in str(error):
                    self._ignored.note(ROUTER, index, b"", error)
                    await answer_of(self._client.delete(index))
                raise
        for each in members:
            if not _ROUTER_ID.fullmatch(each):
                self._ignored.note(ROUTER, repr(each), each, "it is not a router's id")
        others = [each.decode() for each in members if _ROUTER_ID.fullmatch(each)]
        return [each for each in others if each != self.router_id]

    async def _summaries(self, others: list[str]) -> dict[str, bytes]:
        """The summaries of the other routers, by their ids."""
        async with self._client.pipeline(transaction=False) as pipe:
            for each in others:  # a summary that is too long is cut, so it cannot be decoded
                pipe.getrange(f"{self._prefix}router:{each}", 0, MAX_BYTES)
            bodies = await answer_of(pipe.execute(raise_on_error=False))
        peers: dict[str, bytes] = {}
        for name, body in zip(others, bodies, strict=True):
            if isinstance(body, Exception):
                self._ignored.note(SUMMARY, name, b"", body)
            elif body:
                peers[name] = body
        return peers

    async def _listen(self) -> None:
        """Answer questions, and take the answers to ours."""
        asked, answered = f"{self._prefix}ask", f"{self._prefix}answer:{self.router_id}"
        async with self._client.pubsub(ignore_subscribe_messages=True) as channel:
            await answer_of(channel.subscribe(asked, answered))
            while True:
                message = await answer_of(channel.get_message(timeout=PERIOD_S))
                check_cancelled()
                if message is None:
                    continue
                if message["channel"].decode() == asked:
                    await self._take_question(message["data"])
                else:
                    self._take_answer(message["data"])

    async def _take_question(self, data: bytes) -> None:
        try:
            asked = msgspec.msgpack.decode(data, type=_Ask)
        except DECODE_ERRORS as error:
            self._ignored.note(QUESTION, "ask", data, error)
            return
        if asked.router == self.router_id:
            return
        body = self._on_question(asked.question) or b""
        answer = _Answer(asked.nonce, body if len(body) <= MAX_BYTES else b"")
        channel = f"{self._prefix}answer:{asked.router}"
        await answer_of(self._client.publish(channel, msgspec.msgpack.encode(answer)))

    def _take_answer(self, data: bytes) -> None:
        try:
            answer = msgspec.msgpack.decode(data, type=_Answer)
        except DECODE_ERRORS as error:
            self._ignored.note(QUESTION, "answer", data, error)
            return
        waiting = self._questions.get(answer.nonce)
        if waiting is not None:
            waiting.take(answer.body)
