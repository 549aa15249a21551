"""Finished and running requests for operators and clients: rows, traces, receipts.

Reads this router's traces and the rows that other routers share. The trace of another router's
request is fetched from that router on demand. Knows no HTTP.
"""

from __future__ import annotations

import heapq
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec

from console.telemetry.other_routers import PeerRouters, RequestQuestion
from http_kit.caller import Caller
from process.store.ignored_entries import DECODE_ERRORS
from router.requests.trace import RequestTrace
from router.requests.trace_json import RUNNING, receipt_json, row_json, trace_json
from router.requests.trace_store import TraceStore

MAX_ROWS = 200
MAX_SHARED = 80
ASK_S = 1.0
"""The time within which other routers must answer."""


class Order(StrEnum):
    """The order of rows. SLOW begins with the longest time to the first token, RECENT with the
    latest arrival."""

    SLOW = "slow"
    RECENT = "recent"


class Outcome(StrEnum):
    """Filter by outcome. RETRIED: more than one attempt, whatever the outcome. TROUBLED: failed or
    retried."""

    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    CLOSED = "closed"
    RETRIED = "retried"
    TROUBLED = "troubled"


@dataclass(frozen=True)
class RowQuery:
    """Which requests to list. `outcome` None means any. `prefix` selects requests whose id starts
    with it, and requests whose key has it as its name."""

    order: Order = Order.RECENT
    outcome: Outcome | None = None
    limit: int = 50
    prefix: str = ""


Ask = Callable[[bytes, float], Awaitable[bytes | None]]


class RequestLog:
    """The requests of all routers of the fleet. `ask` sends a question to the other routers."""

    def __init__(
        self, traces: TraceStore, peers: PeerRouters | None = None, ask: Ask | None = None
    ) -> None:
        self.ask = ask
        self._traces = traces
        self._peers = peers or PeerRouters()
        self._shared: dict[str, dict[str, Any]] = {}  # rows of ended requests, by id

    def rows(self, query: RowQuery) -> list[dict[str, Any]]:
        """Rows in the wanted order. For a running request without a token, its age counts as its
        time to the first token."""
        now_us = self._traces.wall_us()
        rows = self._own_rows(query, now_us)
        known = {each["request_id"] for each in rows}
        rows += [
            row
            for row in self._peers.rows()
            if row["request_id"] not in known and _row_matches(row, query)
        ]
        rows.sort(key=lambda row: _row_key(row, query.order, now_us), reverse=True)
        return rows[: query.limit]

    def shared_rows(self) -> list[dict[str, Any]]:
        """Rows to share with other routers: recent and slow requests that have ended. Empty if
        there are no other routers."""
        if not self._peers.summaries:
            return []
        now_us = self._traces.wall_us()
        ended = [each for each in self._traces.all() if each.outcome is not None]
        half = MAX_SHARED // 2
        slow = heapq.nlargest(half, ended, key=lambda each: _wait_us(each, now_us))
        chosen = {each.request_id: each for each in (*ended[-half:], *slow)}
        self._shared = {
            name: self._shared.get(name) or row_json(each, now_us) for name, each in chosen.items()
        }
        return list(self._shared.values())

    async def trace(self, request_id: str) -> dict[str, Any] | None:
        """A generation's trace; the id of an HTTP request selects its first choice."""
        return await self._find(RequestQuestion(request_id))

    async def receipt(self, request_id: str, caller: Caller) -> dict[str, Any] | None:
        """The receipt, if `caller` sent the request or is an operator; otherwise None."""
        return await self._find(RequestQuestion(request_id, True, caller.digest, caller.is_admin))

    def answer(self, question: bytes) -> bytes | None:
        """The answer to another router's question; None if the request is not known here."""
        try:
            asked = msgspec.msgpack.decode(question, type=RequestQuestion)
        except DECODE_ERRORS:
            return None
        found = self._own(asked)
        return None if found is None else msgspec.json.encode(found)

    async def _find(self, question: RequestQuestion) -> dict[str, Any] | None:
        found = self._own(question)
        if found is not None or self.ask is None:
            return found
        answer = await self.ask(msgspec.msgpack.encode(question), ASK_S)
        if answer is None:
            return None
        try:
            found_there: dict[str, Any] = msgspec.json.decode(answer, type=dict[str, Any])
        except DECODE_ERRORS:
            return None
        return found_there

    def _own(self, question: RequestQuestion) -> dict[str, Any] | None:
        found, now_us = self._traces.get(question.request_id), self._traces.wall_us()
        if found is None:
            return None
        if not question.is_receipt:
            return trace_json(found, now_us)
        return receipt_json(found, now_us) if question.caller.may_read(found.owner) else None

    def _own_rows(self, query: RowQuery, now_us: int) -> list[dict[str, Any]]:
        found = [each for each in self._traces.all() if _matches(each, query)]
        if query.order is Order.SLOW:
            found.sort(key=lambda each: _wait_us(each, now_us), reverse=True)
        else:
            found.sort(key=lambda each: each.received_us, reverse=True)
        return [row_json(each, now_us) for each in found[: query.limit]]


def _row_key(row: dict[str, Any], order: Order, now_us: int) -> float:
    if order is Order.RECENT:
        return float(row["received_us"])
    waited: float | None = row["ttft_ms"]
    return (now_us - row["received_us"]) / 1000 if waited is None else waited


def _row_matches(row: dict[str, Any], query: RowQuery) -> bool:
    if not row["request_id"].startswith(query.prefix) and row["key"] != query.prefix:
        return False
    return _has_outcome(row["outcome"], row["num_attempts"], query.outcome)


def _wait_us(trace: RequestTrace, now_us: int) -> int:
    return (trace.first_token_us or trace.finished_us or now_us) - trace.received_us


def _matches(trace: RequestTrace, query: RowQuery) -> bool:
    if not trace.request_id.startswith(query.prefix) and trace.key != query.prefix:
        return False
    return _has_outcome(trace.outcome or RUNNING, len(trace.attempts), query.outcome)


def _has_outcome(outcome: str, num_attempts: int, wanted: Outcome | None) -> bool:
    is_retried = num_attempts > 1
    if wanted is Outcome.TROUBLED:
        return is_retried or outcome == Outcome.FAILED
    if wanted is Outcome.RETRIED:
        return is_retried
    return wanted is None or outcome == wanted
