"""The id, the metrics, the share of the budget and the error response of every HTTP request.

ASGI middleware around the whole application. Headers of the answer:

- `x-request-id` repeats the client's, if that is well formed. Client ids are never used internally,
  because they need not be unique.
- `x-baton-request-id` (for Anthropic's clients also `request-id`) is always Baton's own id, which
  logs and traces use.
- `x-baton-receipt` is the path of a generation's receipt, unless the request was refused before it
  became one.
- `x-baton-ignored` names the fields of the body that were ignored.
- `traceparent`, if the client sent a valid one, names our span in the client's trace.

Every request that generates or works on text passes its gate here, and every body is counted as it
is received, whatever the endpoint does: see `gateway.http.paths.passes_gate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from os import urandom
from typing import Protocol
from urllib.parse import quote

import msgspec
from msgspec import field
from msgspec.structs import replace
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.admission.gate import Gate, Ticket
from gateway.admission.request_terms import (
    AGENT_HEADER,
    RETENTION_HEADER,
    SESSION_HEADERS,
    TIMEOUT_HEADER,
    TPOT_HEADER,
    TTFT_HEADER,
    RequestTerms,
    read_ms,
    read_retention,
    read_timeout_s,
    session_of,
)
from gateway.http.anthropic_errors import error_response, is_anthropics
from gateway.http.byte_budget import ByteBudget
from gateway.http.paths import COUNTED, GENERATION, passes_gate
from gateway.metrics import CLIENT_GONE_STATUS, ApiMetrics, EndpointMetrics
from http_kit.caller import CALLER, CURRENT_ORIGIN, NOBODY, Origin, share_of
from http_kit.disconnect import ClientGone, connection_of
from http_kit.errors import describe
from http_kit.tenant import EVERYBODY, Tenant
from process.clock import wall_us
from process.trace_context import CURRENT_TRACE, TraceContext, read_traceparent

MAX_CLIENT_ID_CHARS = 128
MAX_IGNORED_BYTES = 1024
MAX_UNGATED_BODY_BYTES = 128 * 1024
"""The most bytes of a body of a request that passes no gate, such as an operator's."""
_KEY = "baton.request"
_OTHER = "other"
_ID_BYTES = 16
_TIMEOUT = TIMEOUT_HEADER.encode()
_TTFT, _TPOT = TTFT_HEADER.encode(), TPOT_HEADER.encode()
_RETENTION = RETENTION_HEADER.encode()
_SESSIONS, _AGENT = tuple(each.encode() for each in SESSION_HEADERS), AGENT_HEADER.encode()
_OF_TERMS = frozenset((_TIMEOUT, _TTFT, _TPOT, _RETENTION, *_SESSIONS))


class RequestRecord(msgspec.Struct):
    """One HTTP request: its own id, its arrival time (seconds), and the status of its answer.

    - `headers`: the first header of each name.
    - `trace`: the client's trace, if it sent one.
    - `request_digest`: `gateway.output.event_ids.request_digest`, once the body was read; only of
      a request for a stream.
    - `body_bytes`: the length of the body so far.
    - `held_bytes`: bytes taken from `budget` until the answer has ended, in the name of `share`.
    - `tenant`: the tenant of the request.
    - `ticket`: its place behind `gate`, if it has to pass one.
    - `has_begun`: its choices have been handed to the generator.
    - `ignored`: fields of the body that the answer does not honour.
    - `root_path`: the prefix of paths in the answer.
    """

    arrived: float
    path: str
    headers: dict[bytes, bytes]
    budget: ByteBudget
    share: str = ""
    trace: TraceContext | None = None
    request_id: str = field(default_factory=lambda: f"req_{urandom(_ID_BYTES).hex()}")
    arrived_us: int = field(default_factory=wall_us)
    ended_us: int = 0
    status: int | None = None
    request_digest: bytes = b""
    body_bytes: int = 0
    held_bytes: int = 0
    tenant: Tenant = EVERYBODY
    gate: Gate | None = None
    ticket: Ticket | None = None
    has_begun: bool = False
    ignored: Sequence[str] = ()
    root_path: bytes = b""

    def header(self, name: bytes) -> str | None:
        """The value of the client's header with this lower-case name, if there is one."""
        value = self.headers.get(name)
        return None if value is None else value.decode("latin-1")

    def use_prefix(self, prefix: str) -> None:
        """Give the id the prefix of the endpoint's ids; the unguessable digits stay."""
        self.request_id = prefix + self.request_id[-2 * _ID_BYTES :]

    def terms(self) -> RequestTerms:
        """The terms of the request. Raises InvalidRequest for a malformed time or hint."""
        allowed = self.tenant.terms
        if _OF_TERMS.isdisjoint(self.headers):  # true for nearly every request
            return RequestTerms(
                self.tenant, self.ticket, ttft_ms=allowed.ttft_ms, tpot_ms=allowed.tpot_ms
            )
        timeout = self.header(_TIMEOUT)
        ends_at = None if timeout is None else self.arrived + read_timeout_s(timeout)
        ttft_ms = self._target(_TTFT, allowed.ttft_ms)
        tpot_ms = self._target(_TPOT, allowed.tpot_ms)
        hint = self.header(_RETENTION)
        retention = None if hint is None else read_retention(hint)
        return RequestTerms(
            self.tenant, self.ticket, ends_at, self._session(), ttft_ms, tpot_ms, retention
        )

    def _target(self, name: bytes, usual: int | None) -> int | None:
        """The target in this header, otherwise the key's."""
        value = self.header(name)
        return usual if value is None else read_ms(name.decode(), value)

    def _session(self) -> str:
        name = next((value for each in _SESSIONS if (value := self.headers.get(each))), b"")
        agent = self.headers.get(_AGENT)
        if name and agent:
            name = b"%b/%b" % (name, agent)
        return session_of(self.tenant, name.decode("latin-1")) if name else ""

    async def receive(self, receive: Receive) -> Message:
        """Receive a part of the body and count it; the end of the body takes the request's place
        behind the gate."""
        message = await receive()
        if message["type"] == "http.request":
            self.take_body(len(message.get("body", b"")))
            if not message.get("more_body", False):
                self.enter_gate()
        return message

    async def send(self, send: Send, message: Message) -> None:
        """Send a part of the answer. The first one gets the id headers, and its status is noted."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message.get("headers", ()), *self.names()]
        await send(message)

    def enter_gate(self) -> None:
        """Count the request, whose whole body has arrived. Raises TooManyRequests or Overloaded."""
        if self.ticket is not None:
            self.ticket.enter()

    def take_body(self, num_bytes: int) -> None:
        """Count more bytes of the body. Raises TooManyRequests or Overloaded if there is no room
        for them."""
        if self.ticket is None and self.body_bytes + num_bytes > MAX_UNGATED_BODY_BYTES:
            raise HTTPException(413, f"the body exceeds {MAX_UNGATED_BODY_BYTES} bytes")
        self.hold(num_bytes)
        self.body_bytes += num_bytes

    def check_room(self, num_bytes: int) -> None:
        """Raises TooManyRequests or Overloaded if the request may not hold this many more bytes
        now."""
        self.budget.check(self.share, num_bytes, self.held_bytes)

    def hold(self, num_bytes: int) -> None:
        """Count more memory that the request holds until it has ended. Raises as `check_room`."""
        self.budget.take(self.share, num_bytes, self.held_bytes)
        self.held_bytes += num_bytes

    def detach(self) -> RequestRecord:
        """A record of the same request for work that continues after its answer. The record takes
        over the memory and the place behind the gate, until its `release`."""
        ticket = None if self.ticket is None else self.ticket.hand_over()
        other = replace(self, ticket=ticket)
        self.held_bytes = 0
        return other

    def release(self) -> None:
        """Give back the memory and the place of a detached record."""
        self.budget.give_back(self.share, self.held_bytes)
        self.held_bytes = 0
        self.leave_gate()

    def leave_gate(self) -> None:
        """Give back the place of a detached record, once."""
        ticket, self.ticket = self.ticket, None
        if ticket is not None:
            ticket.leave()

    def names(self) -> list[tuple[bytes, bytes]]:
        """The headers that identify the request in the answer."""
        own = self.request_id.encode("latin-1")
        client_id = self.headers.get(b"x-request-id")
        is_shown = client_id is not None and is_sane_id(client_id.decode("latin-1"))
        names = [
            (b"x-request-id", client_id if client_id is not None and is_shown else own),
            (b"x-baton-request-id", own),
        ]
        is_refusal = self.status is not None and self.status >= 400 and not self.has_begun
        if self.path in GENERATION and not is_refusal:
            receipt = b"%b/v1/requests/%b/receipt" % (self.root_path, own)
            names.append((b"x-baton-receipt", receipt))
        if is_anthropics(self.path):
            names.append((b"request-id", own))
        if self.trace is not None:
            names.append((b"traceparent", self.trace.traceparent.encode("latin-1")))
        limit = None
        if self.gate is not None and self.tenant is not EVERYBODY:  # everybody has no limit
            limit = self.gate.rate_limit(self.tenant)
        if limit is not None:
            names += [
                (b"x-ratelimit-limit-requests", b"%d" % limit.limit),
                (b"x-ratelimit-remaining-requests", b"%d" % limit.remaining),
                (b"x-ratelimit-reset-requests", b"%ds" % limit.reset_s),
            ]
        if self.ignored:
            names.append((b"x-baton-ignored", ignored_header(self.ignored)))
        return names


def ignored_header(names: Sequence[str]) -> bytes:
    """The names as a header value of at most `MAX_IGNORED_BYTES`, followed by the number of names
    left out. Commas and all but printable ASCII are percent-encoded."""
    shown: list[str] = []
    room = MAX_IGNORED_BYTES - len(f", +{len(names)}")
    for name in names:
        part = quote(name, safe="!\"#$&'()*/:;<=>?@[]^`{|}~ ").strip()
        room -= len(part) + len(", ")
        if room < 0:
            break
        shown.append(part)
    if len(shown) < len(names):
        shown.append(f"+{len(names) - len(shown)}")
    return ", ".join(shown).encode("ascii")


def record_of(scope: Scope) -> RequestRecord:
    """The record of the request that this scope belongs to."""
    record: RequestRecord = scope[_KEY]
    return record


class RequestTracer(Protocol):
    """Records the spans of HTTP requests that generate."""

    def start(self) -> TraceContext:
        """The context of a request whose client sent none."""
        ...

    def end(self, record: RequestRecord) -> None:
        """Record the span of an answered request."""
        ...


class RequestScope:
    """The middleware around the application `app`."""

    def __init__(
        self,
        app: ASGIApp,
        metrics: ApiMetrics,
        budget: ByteBudget,
        gate: Gate,
        tracer: RequestTracer | None = None,
        root_path: str = "",
    ) -> None:
        """`gate` is for requests that generate, `gate.for_text` for all others that pass one."""
        self._app = app
        self._tracer = tracer
        self._gate = gate
        self._root_path = root_path.encode("ascii")
        self._metrics = metrics
        self._budget = budget
        self._shown: dict[str, EndpointMetrics] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run one HTTP request; other scopes pass through."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path, clock = scope["path"], self._metrics.clock
        headers, share = dict(reversed(scope["headers"])), share_of(scope)
        record = RequestRecord(
            clock(), path, headers, self._budget, share, root_path=self._root_path
        )
        scope[_KEY] = record
        generates, endpoint = path in GENERATION, path if path in COUNTED else _OTHER
        shown = self._shown.get(endpoint)
        if shown is None:
            shown = self._shown[endpoint] = self._metrics.endpoint(endpoint)
        shown.in_flight += 1
        try:
            await self._answer(record, scope, receive, send)
        finally:
            self._budget.give_back(share, record.held_bytes)
            status = record.status or CLIENT_GONE_STATUS
            shown.ended(status, clock() - record.arrived)
            if generates:
                self._metrics.door.count(record.tenant.terms.name, status)
            shown.in_flight -= 1
            if self._tracer is not None and generates:
                record.ended_us = wall_us()
                self._tracer.end(record)

    async def _answer(
        self, record: RequestRecord, scope: Scope, receive: Receive, send: Send
    ) -> None:
        if b"traceparent" in record.headers:
            record.trace = read_traceparent(record.headers[b"traceparent"].decode("latin-1"))
        if self._tracer is not None and record.trace is None and record.path in GENERATION:
            record.trace = self._tracer.start()
        CURRENT_TRACE.set(record.trace)
        caller = scope.get(CALLER, NOBODY)
        connection = connection_of(scope)
        origin = CURRENT_ORIGIN.set(Origin(record.arrived_us, caller, record.share, connection))
        record.tenant = caller.tenant
        record.gate = self._gate_of(record.path, scope["method"])
        counting, named_send = partial(record.receive, receive), partial(record.send, send)
        try:
            if record.gate is None:
                await self._app(scope, counting, named_send)
            else:
                has_body = connection.has_body(scope)
                with record.gate.passing(caller.tenant, has_body, record.share) as ticket:
                    record.ticket = ticket
                    await self._app(scope, counting, named_send)
        except ClientGone:
            record.status = CLIENT_GONE_STATUS
        except Exception as error:
            if record.status is not None:  # too late for an error response: the server closes
                raise
            response = error_response(
                describe(error, record.request_id), scope["path"], record.request_id
            )
            await response(scope, receive, named_send)
        finally:
            CURRENT_ORIGIN.reset(origin)

    def _gate_of(self, path: str, method: str) -> Gate | None:
        if path in GENERATION:
            return self._gate if method == "POST" else None
        return self._gate.for_text if passes_gate(path) else None


def is_sane_id(client_id: str) -> bool:
    """Whether a client's request id may be repeated in a header: short, printable ASCII."""
    return (
        0 < len(client_id) <= MAX_CLIENT_ID_CHARS
        and client_id.isascii()
        and client_id.isprintable()
    )
