"""The id, the metrics and the error response of every HTTP request.

ASGI middleware around the whole application. The answer's `x-request-id` repeats the client's, if
that is well formed. `x-baton-request-id` (for Anthropic's clients also `request-id`) is always
Baton's own id, which logs and traces use. Client ids are never used internally, since they need
not be unique. A valid `traceparent` is answered with one that names our span in the client's
trace.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from prometheus_client import Counter, Gauge, Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from process.trace_context import CURRENT_TRACE, TraceContext, read_traceparent
from router.http.anthropic_errors import error_response, is_anthropics
from router.http.disconnect import ClientGone
from router.http.errors import describe
from router.http.metrics import CLIENT_GONE_STATUS, ApiMetrics
from router.http.paths import COUNTED

MAX_CLIENT_ID_CHARS = 128
_KEY = "baton.request"
_OTHER = "other"


@dataclass(slots=True)
class RequestRecord:
    """One HTTP request: its own id, when it arrived (seconds), and the status of its answer.

    `headers` holds the first header of each name; `trace` is the client's trace, if it sent one;
    `body_digest` is the digest of the body once the body was read.
    """

    arrived: float
    path: str
    headers: dict[bytes, bytes]
    trace: TraceContext | None = None
    request_id: str = field(default_factory=lambda: new_id("req-"))
    status: int | None = None
    body_digest: bytes = b""

    def header(self, name: bytes) -> str | None:
        """The value of the client's header with this lower-case name, if there is one."""
        value = self.headers.get(name)
        return None if value is None else value.decode("latin-1")

    def names(self) -> list[tuple[bytes, bytes]]:
        """The headers that identify the request in the answer."""
        own = self.request_id.encode("latin-1")
        client_id = self.header(b"x-request-id")
        is_shown = client_id is not None and is_sane_id(client_id)
        names = [
            (b"x-request-id", self.headers[b"x-request-id"] if is_shown else own),
            (b"x-baton-request-id", own),
        ]
        if is_anthropics(self.path):
            names.append((b"request-id", own))
        if self.trace is not None:
            names.append((b"traceparent", self.trace.traceparent.encode("latin-1")))
        return names


def new_id(prefix: str) -> str:
    """An unguessable id: 32 hexadecimal digits after the prefix."""
    return prefix + secrets.token_hex(16)


def record_of(scope: Scope) -> RequestRecord:
    """The record of the request that this scope belongs to."""
    record: RequestRecord = scope[_KEY]
    return record


class _EndpointMetrics:
    """The metrics of one endpoint, cached: a lookup by label costs more than counting."""

    def __init__(self, metrics: ApiMetrics, endpoint: str) -> None:
        self.in_flight: Gauge = metrics.in_flight.labels(endpoint)
        self.duration: Histogram = metrics.duration.labels(endpoint)
        self._endpoint = endpoint
        self._requests = metrics.requests
        self._by_status: dict[int, Counter] = {}

    def ended(self, status: int) -> None:
        """Count one more request that ended with this status."""
        counter = self._by_status.get(status)
        if counter is None:
            counter = self._by_status[status] = self._requests.labels(self._endpoint, str(status))
        counter.inc()


class RequestScope:
    """The middleware; `app` is the application inside."""

    def __init__(self, app: ASGIApp, metrics: ApiMetrics) -> None:
        self._app = app
        self._metrics = metrics
        self._shown: dict[str, _EndpointMetrics] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run one HTTP request; other scopes pass through."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(reversed(scope["headers"]))
        record = scope[_KEY] = RequestRecord(self._metrics.clock(), scope["path"], headers)
        endpoint = scope["path"] if scope["path"] in COUNTED else _OTHER
        shown = self._shown.get(endpoint)
        if shown is None:
            shown = self._shown[endpoint] = _EndpointMetrics(self._metrics, endpoint)
        shown.in_flight.inc()
        try:
            await self._answer(record, scope, receive, send)
        finally:
            shown.in_flight.dec()
            shown.ended(record.status or CLIENT_GONE_STATUS)
            shown.duration.observe(self._metrics.clock() - record.arrived)

    async def _answer(
        self, record: RequestRecord, scope: Scope, receive: Receive, send: Send
    ) -> None:
        traceparent = record.header(b"traceparent")
        record.trace = None if traceparent is None else read_traceparent(traceparent)
        CURRENT_TRACE.set(record.trace)
        named_send = _naming(record, send)
        try:
            await self._app(scope, receive, named_send)
        except ClientGone:
            record.status = CLIENT_GONE_STATUS
        except Exception as error:
            if record.status is not None:  # too late for an error response: the server closes
                raise
            response = error_response(
                describe(error, record.request_id), scope["path"], record.request_id
            )
            await response(scope, receive, named_send)


def _naming(record: RequestRecord, send: Send) -> Send:
    """A `send` that adds the id headers and notes the status."""

    async def named_send(message: Message) -> None:
        if message["type"] == "http.response.start":
            record.status = message["status"]
            message["headers"] = [*message.get("headers", ()), *record.names()]
        await send(message)

    return named_send


def is_sane_id(client_id: str) -> bool:
    """Whether a client's request id may be repeated in a header: short, printable ASCII."""
    return (
        0 < len(client_id) <= MAX_CLIENT_ID_CHARS
        and client_id.isascii()
        and client_id.isprintable()
    )
