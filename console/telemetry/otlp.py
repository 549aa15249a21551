"""Traces exported over OTLP: one per request, joined to the caller's `traceparent`.

Needs the packages of the extra `otlp`; they are imported only if an endpoint is set. Ended requests
wait `SETTLE_S` for the workers' last reports; then their spans go to the library's batch processor,
whose thread sends them. If the processor cannot keep up, it drops spans, never requests. A caller's
trace is exported if the caller samples it, our own by `sample_ratio`.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections import deque
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, Counter

from console.telemetry.spans import SpanNode, generation_spans
from process.clock import clock_step_us
from process.trace_context import TraceContext, new_context
from process.version import baton_version
from protocol.addresses import parsed_address, shown_address
from protocol.errors import ConfigError
from router.requests.trace import RequestTrace

SETTLE_S = 2.0
MAX_WAITING = 10_000
TRACES_PATH = "/v1/traces"
"""Where collectors take traces over HTTP, by OTLP's specification."""
_FLUSH_S = 0.25


class AnsweredRequest(Protocol):
    """The exported data of an HTTP request: its own id, its times in microseconds since the Unix
    epoch, the status of its answer, and the trace that it is part of."""

    @property
    def path(self) -> str: ...
    @property
    def request_id(self) -> str: ...
    @property
    def arrived_us(self) -> int: ...
    @property
    def ended_us(self) -> int: ...
    @property
    def status(self) -> int | None: ...
    @property
    def trace(self) -> TraceContext | None: ...


class ExportMetrics:
    """Counters of an exporter."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.exported = Counter(
            "baton_router_spans_exported", "Spans given to the OTLP exporter", registry=registry
        )
        self.dropped = Counter(
            "baton_router_traces_dropped",
            "Generations whose spans were dropped because too many waited",
            registry=registry,
        )


class OtlpExporter:
    """Exports the HTTP requests and generations of one router; runs on its event loop."""

    def __init__(
        self, endpoint: str, sample_ratio: float, registry: CollectorRegistry, name: str
    ) -> None:
        """Raises ConfigError if the packages are missing. `endpoint` without a path is a collector,
        which takes traces at `TRACES_PATH`. `name` distinguishes routers."""
        parts = parsed_address(endpoint)
        if parts is None or parts.username is not None or parts.query or parts.fragment:
            raise ConfigError(
                f"otlp_endpoint {shown_address(endpoint)}: give scheme, host, port and path only, "
                "and keys by the variable OTEL_EXPORTER_OTLP_HEADERS, because logs show the address"
            )
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.trace.export import BatchSpanProcessor

            from console.telemetry.otel_spans import SpanMaker
        except ImportError as error:
            raise ConfigError(
                f"otlp_endpoint needs OpenTelemetry's packages: pip install 'baton-serve[otlp]' "
                f"({error})"
            ) from error
        if parts.path in ("", "/"):
            endpoint = endpoint.rstrip("/") + TRACES_PATH
        self._processor: Any = BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint))
        self._spans = SpanMaker(name, baton_version())
        self._sample_ratio = sample_ratio
        self._waiting: deque[tuple[float, RequestTrace]] = deque()
        self._metrics = ExportMetrics(registry)

    # -- of HTTP requests: see `RequestTracer` ------------------------------------------------

    def start(self) -> TraceContext:
        """The context of a request whose client sent none."""
        return new_context(is_sampled=random.random() < self._sample_ratio)

    def end(self, record: AnsweredRequest) -> None:
        """Note an answered HTTP request."""
        context = record.trace
        if context is None or not context.is_sampled:
            return
        node = SpanNode(f"POST {record.path}", record.arrived_us, record.ended_us)
        node.attributes = {
            "http.request.method": "POST",
            "url.path": record.path,
            "http.response.status_code": record.status or 0,
            "baton.request_id": record.request_id,
        }
        self._emit(node, context.trace_id, context.parent_id, context.span_id)

    # -- of generations -----------------------------------------------------------------------

    def take(self, trace: RequestTrace) -> None:
        """Note the trace of an ended generation."""
        if trace.context is None or not trace.context.is_sampled:
            return
        if len(self._waiting) >= MAX_WAITING:
            self._metrics.dropped.inc()
            return
        self._waiting.append((asyncio.get_running_loop().time() + SETTLE_S, trace))

    async def run(self) -> None:
        """Export what has settled, until cancelled; then everything that is left."""
        try:
            while True:
                await asyncio.sleep(_FLUSH_S)
                self._flush(asyncio.get_running_loop().time())
        finally:
            self._flush(float("inf"))
            await asyncio.shield(asyncio.to_thread(self._processor.shutdown))

    def _flush(self, now: float) -> None:
        while self._waiting and self._waiting[0][0] <= now:
            _, trace = self._waiting.popleft()
            context = trace.context
            assert context is not None, "only sampled traces wait"
            span_id = secrets.token_hex(8)
            self._emit(generation_spans(trace), context.trace_id, context.span_id, span_id)

    def _emit(self, node: SpanNode, trace_id: str, parent_id: str, span_id: str) -> None:
        """Export a node and those below it, by the system clock, as other services' spans are."""
        self._export(node, (trace_id, parent_id, span_id), clock_step_us())

    def _export(self, node: SpanNode, ids: tuple[str, str, str], step_us: int) -> None:
        self._processor.on_end(self._spans.made(node, *ids, step_us))
        self._metrics.exported.inc()
        for child in node.children:
            self._export(child, (ids[0], ids[2], secrets.token_hex(8)), step_us)
