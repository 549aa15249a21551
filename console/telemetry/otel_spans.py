"""Our spans in the form of OpenTelemetry's SDK. Imported only where spans are exported.

Each process of the fleet is a resource of its own: `baton-router`, `baton-prefill`, `baton-decode`,
distinguished by `service.instance.id`.
"""

from __future__ import annotations

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.status import Status, StatusCode

from console.telemetry.spans import ROUTER, SpanNode

MAX_RESOURCES = 1024
_NS_PER_US = 1000


class SpanMaker:
    """Makes spans; `name` is this router's instance id."""

    def __init__(self, name: str, version: str) -> None:
        self._name = name
        self._version = version
        self._scope = InstrumentationScope("baton", version)
        self._resources: dict[tuple[str, str], Resource] = {}

    def made(
        self, node: SpanNode, trace_id: str, parent_id: str, span_id: str, step_us: int = 0
    ) -> ReadableSpan:
        """The span of a node, `step_us` later than it says. Ids are hexadecimal; `parent_id` is ""
        for a root."""
        is_http = node.role == ROUTER and node.name.startswith("POST ")
        return ReadableSpan(
            name=node.name,
            context=_context(trace_id, span_id),
            parent=_context(trace_id, parent_id) if parent_id else None,
            resource=self._resource(node.role, node.process or self._name),
            attributes=node.attributes,
            kind=SpanKind.SERVER if is_http else SpanKind.INTERNAL,
            status=Status(StatusCode.ERROR, node.error) if node.error else Status(),
            start_time=(node.start_us + step_us) * _NS_PER_US,
            end_time=(max(node.start_us, node.end_us) + step_us) * _NS_PER_US,
            instrumentation_scope=self._scope,
        )

    def _resource(self, role: str, process: str) -> Resource:
        key = (role, process)
        if key not in self._resources:
            if len(self._resources) >= MAX_RESOURCES:
                self._resources.clear()
            self._resources[key] = Resource(
                {
                    "service.name": f"baton-{role}",
                    "service.instance.id": process,
                    "service.version": self._version,
                }
            )
        return self._resources[key]


def _context(trace_id: str, span_id: str) -> SpanContext:
    return SpanContext(
        int(trace_id, 16), int(span_id, 16), is_remote=False, trace_flags=TraceFlags(1)
    )
