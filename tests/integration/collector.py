"""A stand-in for an OpenTelemetry collector: takes spans over OTLP and HTTP, and keeps them."""

from __future__ import annotations

import gzip
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


@dataclass(frozen=True)
class Received:
    """One span; ids are hexadecimal, `parent_id` "" for a root."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    request_id: str
    start_ns: int
    end_ns: int


class Collector(ThreadingHTTPServer):
    """Runs while it is entered."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.spans: list[Received] = []
        self._thread = threading.Thread(target=self.serve_forever)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1/traces"

    def __enter__(self) -> Collector:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()

    def trace(self, trace_id: str) -> list[Received]:
        """The spans of a trace."""
        return [each for each in self.spans if each.trace_id == trace_id]

    def find(self, name: str, request_id: str) -> Received | None:
        """The span of this name about this request."""
        for each in self.spans:
            if (each.name, each.request_id) == (name, request_id):
                return each
        return None

    def take(self, request: ExportTraceServiceRequest) -> None:
        """Keep the spans of a request."""
        for resource in request.resource_spans:
            attributes = {
                each.key: each.value.string_value for each in resource.resource.attributes
            }
            for scope in resource.scope_spans:
                for span in scope.spans:
                    named = {each.key: each.value.string_value for each in span.attributes}
                    self.spans.append(
                        Received(
                            attributes["service.name"],
                            span.name,
                            span.trace_id.hex(),
                            span.span_id.hex(),
                            span.parent_span_id.hex(),
                            named.get("baton.request_id", ""),
                            span.start_time_unix_nano,
                            span.end_time_unix_nano,
                        )
                    )


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        request = ExportTraceServiceRequest()
        request.ParseFromString(body)
        self.server.take(request)
        answer = ExportTraceServiceResponse().SerializeToString()
        self.send_response(200)
        self.send_header("content-type", "application/x-protobuf")
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *arguments: object) -> None:
        """Writes no log."""
