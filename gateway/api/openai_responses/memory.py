"""The router's memory of responses, in the store that all routers of a cluster share.

A task of its own writes a response after its end, so clients never wait for the store. Until that
task is done, questions about the response wait here. Records are compressed. Responses that cannot
be kept are counted by reason.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import zlib
from collections.abc import Callable, Container, Coroutine
from dataclasses import replace
from typing import Any, TypeVar

import msgspec
from prometheus_client import CollectorRegistry, Counter

from gateway.api.context import MAX_INLINE_BYTES
from gateway.api.openai_responses import answer as api
from gateway.api.openai_responses.kept_items import continued_json, items_by_id
from gateway.http.byte_budget import ByteBudget
from gateway.text.fair_threads import FairThreads
from http_kit.turnstile import Standing
from process.store.ignored_entries import DECODE_ERRORS, RESPONSE, IgnoredEntries
from process.store.response_records import (
    CANCELLED,
    FAILED,
    IN_PROGRESS,
    QUEUED,
    ResponseName,
    ResponseRecord,
    ResponseRecords,
)
from protocol.errors import (
    InvalidRequest,
    Overloaded,
    PreviousNotFound,
    StoreTrouble,
    TooManyRequests,
)

log = logging.getLogger(__name__)
_T = TypeVar("_T")

MAX_RECORD_BYTES = 8 * 1024 * 1024
"""The most bytes of one record before compression: an answer with all the items before it."""
MAX_PENDING_BYTES = 64 * 1024 * 1024
"""The most bytes of requests and answers that wait to be written; a single owner cannot use all of
them."""
_RECORD_BYTES = 4096
"""Bytes counted for a record in addition to its input and its answer."""
LEASE_S = 30.0
_LOOKS_S = (0.05, 0.1, 0.25)
"""Pauses between attempts to find a previous response, which another router may be writing."""
_MOST_READS = 8
"""The most records that are read and unpacked at once. Callers account for what they build from
them."""
_THREADS = 2
_READ_S, _PACK_S_PER_BYTE = 0.01, 2e-8
"""Estimates of how long it takes to read a record, and to pack a byte of one."""
_LOST = "the router that ran this response went away before it was finished; send it again"
_LEVEL = 1
_ID = re.compile(r"resp_[0-9a-f]{32}")
_ITEM_ID = re.compile(r"[a-z]{2,4}_([0-9a-f]{32})_i?[0-9]{1,6}")
_REASONS = ("store_away", "store_full", "store_refused", "too_large", "backlog", "error")

Made = tuple[str, bytes, bytes]
"""Status, answer and input of a response."""
Adopt = Callable[["asyncio.Task[None]"], None]


def response_of_item(item_id: str) -> str | None:
    """The id of the response that gave an item its id; None for an id that is the client's own."""
    found = _ITEM_ID.fullmatch(item_id)
    return None if found is None else f"resp_{found[1]}"


def is_response_id(text: str) -> bool:
    """Whether a response of ours may have this id."""
    return _ID.fullmatch(text) is not None


class ResponseMemory:
    """Keeps and finds responses. `adopt` is called with every task that must end before the router
    does."""

    def __init__(
        self,
        records: ResponseRecords,
        registry: CollectorRegistry,
        ignored: IgnoredEntries | None = None,
    ) -> None:
        self.adopt: Adopt = lambda task: None
        self.records = records
        self._ignored = ignored or IgnoredEntries()
        self._tasks: dict[ResponseName, asyncio.Task[None]] = {}
        self._pending = ByteBudget(MAX_PENDING_BYTES)
        self._reads = FairThreads(_MOST_READS, 0.0)
        self._threads = FairThreads(_THREADS, _PACK_S_PER_BYTE)
        self._kept = Counter(
            "baton_responses_kept", "Responses that were kept in the store", registry=registry
        )
        self._not_kept = Counter(
            "baton_responses_not_kept",
            "Responses that were to be kept and were not: the store could not be reached "
            "(store_away), had no room (store_full) or answered with an error (store_refused), "
            "they were too large (too_large), too much of all or of their owner waited for the "
            "store (backlog), or an unexpected error, which the log has (error)",
            ["reason"],
            registry=registry,
        )
        for reason in _REASONS:
            self._not_kept.labels(reason)

    def why_not(self, num_bytes: int) -> str | None:
        """The reason, which is also counted, why a response to `num_bytes` of input cannot be kept.
        None if no reason is known in advance."""
        if self.records.is_away:
            return self._skip("store_away")
        return self._skip("too_large") if num_bytes > MAX_RECORD_BYTES else None

    def keep(self, name: ResponseName, num_bytes: int, make: Callable[[], Made]) -> None:
        """Keep a response soon; `make` runs in a thread if the request and its answer have many
        bytes."""
        held = num_bytes + _RECORD_BYTES
        try:
            self._pending.take(name.owner, held)
        except (Overloaded, TooManyRequests):
            self._skip("backlog")
            return
        task = self.start(self._keep(name, num_bytes, make))
        self._tasks[name] = task
        task.add_done_callback(lambda _: self._forget(name, task, held))

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task that must end before the router does."""
        task = asyncio.create_task(work)
        self.adopt(task)
        return task

    async def begin(
        self, name: ResponseName, answer: bytes, given: bytes, is_streamed: bool = False
    ) -> None:
        """Keep a response that will run in the background. Raises StoreTrouble, and InvalidRequest
        if its input is too large."""
        if len(answer) + len(given) > MAX_RECORD_BYTES:
            raise InvalidRequest(
                f"'background': a conversation of more than {MAX_RECORD_BYTES} bytes is not kept",
                "background",
            )
        begun = ResponseRecord(QUEUED, True, answer, given, b"" if is_streamed else None)
        record = await self._packed(begun, Standing.NEW)
        await self.records.put(name, record, LEASE_S)

    async def finish(
        self, name: ResponseName, status: str, answer: bytes, events: bytes = b""
    ) -> None:
        """Write the answer of a response that ran in the background, and its events if they are not
        too many, unless it was cancelled or deleted. Raises StoreTrouble."""
        if len(answer) > MAX_RECORD_BYTES:
            self._skip("too_large")
            answer, status = _with_error(answer, "the answer is too large to be kept"), FAILED
        packed = await self._deflated(answer, Standing.ANSWERING)
        if 0 < len(events) <= MAX_RECORD_BYTES:
            events = await self._deflated(events, Standing.ANSWERING)
        else:
            events = b""
        if await self.records.finish(name, status, packed, events):
            self._kept.inc()

    def give_up(self, name: ResponseName, reason: str) -> None:
        """Note that an answer cannot be kept because of the store."""
        self._skip(reason)
        log.warning("response %s could not be kept: %s", name.id, reason)

    async def find(self, name: ResponseName) -> ResponseRecord | None:
        """A response, if it is kept. Raises StoreTrouble."""
        await self._settled(name)
        async with self._reads.turnstile.turn(_READ_S):
            return await self._unpacked(name, await self.records.read(name))

    async def events_of(self, name: ResponseName, record: ResponseRecord) -> bytes:
        """The events of a response's stream; b"" if they were not kept or cannot be read."""
        try:
            return await self._inflated(record.events) if record.events else b""
        except (zlib.error, ValueError) as error:
            self._ignored.note(RESPONSE, name.id, record.events or b"", error)
            return b""

    async def cancel(self, name: ResponseName) -> ResponseRecord | None:
        """See ResponseRecords. Raises StoreTrouble."""
        await self._settled(name)
        async with self._reads.turnstile.turn(_READ_S):
            return await self._unpacked(name, await self.records.cancel(name))

    async def delete(self, name: ResponseName) -> bool:
        """See ResponseRecords. Raises StoreTrouble."""
        await self._settled(name)
        return await self.records.delete(name)

    async def history(self, name: ResponseName) -> bytes:
        """The JSON list of the items up to and with the output of a response. Raises StoreTrouble,
        PreviousNotFound, and InvalidRequest for a response that has no complete output."""
        found = await self._awaited(name)
        if found is None:
            raise PreviousNotFound(name.id)
        if found.status not in ("completed", "incomplete"):
            raise InvalidRequest(
                f"'previous_response_id': the response is {found.status}, and cannot be continued",
                "previous_response_id",
            )
        whole = await self._whole(name, found)
        if whole is None:
            raise PreviousNotFound(name.id)
        return whole

    async def items(self, name: ResponseName, wanted: Container[str]) -> dict[str, bytes]:
        """The JSON, by id, of the wanted items that a response has. Raises
        StoreAway."""
        found = await self._awaited(name)
        whole = None if found is None else await self._whole(name, found)
        if whole is None:
            return {}
        return await self._off_loop(len(whole), lambda: items_by_id(whole, name.id, wanted))

    async def _awaited(self, name: ResponseName) -> ResponseRecord | None:
        """A response that another router may be writing at the moment. Raises StoreTrouble."""
        for pause_s in (0.0, *_LOOKS_S):
            await asyncio.sleep(pause_s)
            found = await self.find(name)
            if found is not None:
                return found
        return None

    async def _settled(self, name: ResponseName) -> None:
        """Wait until a response that has ended here is kept, or will not be."""
        task = self._tasks.get(name)
        if task is not None:
            await asyncio.wait((task,))

    async def _keep(self, name: ResponseName, num_bytes: int, make: Callable[[], Made]) -> None:
        try:
            status, answer, given = await self._off_loop(num_bytes, make, Standing.ANSWERING)
            if len(answer) + len(given) > MAX_RECORD_BYTES:
                self._skip("too_large")
                return
            kept = ResponseRecord(status, False, answer, given)
            record = await self._packed(kept, Standing.ANSWERING)
            await self.records.put(name, record)
            self._kept.inc()
        except StoreTrouble as error:
            self.give_up(name, error.reason)
        except Exception:
            log.exception("response %s could not be kept", name.id)
            self._skip("error")

    async def _unpacked(
        self, name: ResponseName, record: ResponseRecord | None
    ) -> ResponseRecord | None:
        """The record with its answer and input decompressed; None if they cannot be read."""
        if record is None:
            return None
        try:
            answer, given = await self._inflated(record.answer), await self._inflated(record.input)
            whole = replace(record, answer=answer, input=given)
            await self._off_loop(len(answer) + len(given), lambda: _check_shape(whole))
        except (zlib.error, ValueError, *DECODE_ERRORS) as error:
            self._ignored.note(RESPONSE, name.id, record.answer, error)
            return None
        return whole

    async def _whole(self, name: ResponseName, found: ResponseRecord) -> bytes | None:
        """The JSON list of a response's items, its input and its output; None if it cannot be
        read."""
        given, answer = found.input, found.answer
        try:
            return await self._off_loop(
                len(given) + len(answer), lambda: continued_json(given, answer)
            )
        except msgspec.MsgspecError as error:
            log.warning("response %s in the store cannot be read: %s", name.id, error)
            return None

    async def _packed(self, record: ResponseRecord, standing: Standing) -> ResponseRecord:
        answer = await self._deflated(record.answer, standing)
        return replace(record, answer=answer, input=await self._deflated(record.input, standing))

    async def _deflated(self, data: bytes, standing: Standing) -> bytes:
        return await self._off_loop(len(data), lambda: zlib.compress(data, _LEVEL), standing)

    async def _inflated(self, data: bytes) -> bytes:
        return await self._off_loop(4 * len(data), lambda: _inflate(data))

    async def _off_loop(
        self, num_bytes: int, work: Callable[[], _T], standing: Standing = Standing.NEW
    ) -> _T:
        """The result of work on `num_bytes`: in a thread if they are many."""
        if num_bytes <= MAX_INLINE_BYTES:
            return work()
        return await self._threads.run(work, num_bytes, standing)

    def _forget(self, name: ResponseName, task: asyncio.Task[None], num_bytes: int) -> None:
        self._pending.give_back(name.owner, num_bytes)
        if self._tasks.get(name) is task:
            del self._tasks[name]

    def _skip(self, reason: str) -> str:
        self._not_kept.labels(reason).inc()
        return reason


class _KeptPart(msgspec.Struct):
    type: str


class _KeptItem(msgspec.Struct):
    """The fields of an item that its readers rely on."""

    type: str
    id: str | None = None
    role: str | None = None
    content: str | list[_KeptPart] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.content, str) and self.role is None:
            raise ValueError("an item of text has no role")


class _KeptAnswer(msgspec.Struct):
    status: str
    output: list[_KeptItem]


_ANSWER = msgspec.json.Decoder(_KeptAnswer)
_ITEMS = msgspec.json.Decoder(list[_KeptItem])
_STATUSES = (QUEUED, IN_PROGRESS, "completed", "incomplete", FAILED, CANCELLED)


def document_of(record: ResponseRecord) -> bytes:
    """The JSON of a kept response as it is now: its status may have changed after it was kept."""
    shown: dict[str, Any] = msgspec.json.decode(record.answer)
    if shown["status"] == record.status:
        return record.answer
    shown["status"] = record.status
    if record.status == FAILED:
        shown["error"] = api.ResponseFailure("server_error", _LOST)
    return msgspec.json.encode(shown)


def _with_error(answer: bytes, message: str) -> bytes:
    """The answer without its output, failed."""
    shown: dict[str, Any] = msgspec.json.decode(answer)
    error = api.ResponseFailure("server_error", message)
    return msgspec.json.encode({**shown, "status": FAILED, "output": [], "error": error})


def _check_shape(record: ResponseRecord) -> None:
    """Raises an error of `DECODE_ERRORS` if it is not what `keep` and `begin` write."""
    kept = _ANSWER.decode(record.answer)
    if kept.status not in _STATUSES:
        raise msgspec.ValidationError("its answer has an unknown status")
    _ITEMS.decode(record.input or b"[]")


def _inflate(data: bytes) -> bytes:
    """The decompressed data. Raises ValueError or zlib.error for data that we did not write."""
    inflater = zlib.decompressobj()
    inflated = inflater.decompress(data, MAX_RECORD_BYTES + 1)
    if not inflater.eof:
        raise ValueError("it is too large, or cut off")
    return inflated


def records_of(redis_url: str, cluster: str, max_bytes: int) -> ResponseRecords:
    """The records of a cluster."""
    return ResponseRecords(redis_url, cluster, max_bytes, time.monotonic)
