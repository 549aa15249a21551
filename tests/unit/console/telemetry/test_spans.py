"""A trace as spans and as a file for Perfetto; where an exporter sends spans, and what it does
without its packages."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from console.telemetry import otlp
from console.telemetry.otlp import OtlpExporter
from console.telemetry.perfetto import perfetto_trace
from console.telemetry.spans import SpanNode, generation_spans
from process.trace_context import CURRENT_TRACE, new_context
from protocol.errors import ConfigError
from protocol.traces import ChunkSpan, DecodeTrace, GapSpan, StepSpan, WriteSpan, pack_steps
from router.requests.trace import AttemptTrace, RequestTrace
from router.requests.trace_json import trace_json
from router.routing.placement import Candidate, Mode, Placement
from tests.unit.router.fake_worker import prefill_trace

T0 = 1_000_000


def candidate(worker_id: str) -> Candidate:
    return Candidate(worker_id, 1.0, 1, 1)


PLACEMENT = Placement(Mode.REMOTE, candidate("d1"), candidate("p1"), "why", (), (), ())


@pytest.fixture
def trace() -> RequestTrace:
    made = RequestTrace(
        "r-0", T0, 5, T0 + 10, num_output_tokens=3, first_token_received_us=T0 + 900,
        first_token_us=T0 + 950, last_token_us=T0 + 3000, finished_us=T0 + 3100,
        outcome="finished",
    )  # fmt: skip
    lost = AttemptTrace(1, PLACEMENT, T0 + 20, failed="p0 was lost", failed_us=T0 + 90)
    prefill = prefill_trace(
        "p1", received_us=T0 + 110, scheduled_us=T0 + 200,
        chunks=(ChunkSpan(T0 + 200, T0 + 500, 16), ChunkSpan(T0 + 510, T0 + 800, 16)),
        writes=(WriteSpan(T0 + 500, T0 + 700, 1, 0), WriteSpan(T0 + 800, T0 + 990, 1, 1)),
        waits=(GapSpan(T0 + 500, T0 + 510, "others"),),
    )  # fmt: skip
    steps = [StepSpan(T0 + 1000, T0 + 2000, 2), StepSpan(T0 + 2500, T0 + 2900, 2)]
    decode = DecodeTrace(
        worker_id="d1", received_us=T0 + 110, admitted_us=T0 + 120, first_step_us=T0 + 1000,
        blocks_arrived_us=T0 + 990, finished_us=T0 + 2900, num_decode_steps=2,
        steps_since_us=T0 + 1000, steps=pack_steps(T0 + 1000, steps),
        stalls=(GapSpan(T0 + 2000, T0 + 2500, "preempted"),),
    )  # fmt: skip
    made.attempts = [lost, AttemptTrace(2, PLACEMENT, T0 + 100, "p1", prefill, decode)]
    return made


def flat(node: SpanNode) -> list[SpanNode]:
    return [node, *(each for child in node.children for each in flat(child))]


def test_every_span_has_its_process_and_its_time(trace: RequestTrace) -> None:
    spans = flat(generation_spans(trace))
    names = [(each.role, each.process, each.name) for each in spans]
    assert names.count(("prefill", "p1", "chunk")) == 2
    assert names.count(("prefill", "p1", "transfer")) == 2
    assert ("decode", "d1", "handoff") in names
    assert ("decode", "d1", "stall") in names
    failed = [each for each in spans if each.error]
    assert [each.error for each in failed] == ["p0 was lost"]
    assert all(T0 <= each.start_us <= each.end_us <= T0 + 3100 for each in spans)
    handoff = next(each for each in spans if each.name == "handoff")
    assert (handoff.start_us, handoff.end_us) == (T0 + 800, T0 + 1000)


def test_a_file_for_perfetto(trace: RequestTrace) -> None:
    whole = perfetto_trace(json.loads(json.dumps(trace_json(trace, 0))))
    events = whole["traceEvents"]
    processes = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
    assert list(processes) == ["router", "p1", "d1"]
    spans = [each for each in events if each["ph"] == "X"]
    assert all(each["dur"] >= 0 and isinstance(each["pid"], int) for each in spans)
    of_prefill = [each["name"] for each in spans if each["pid"] == processes["p1"]]
    assert of_prefill == ["queue", "chunk 1", "chunk 2", "wait", "transfer", "transfer"]
    steps = [each for each in spans if each["name"] == "decode"]
    assert [each["ts"] for each in steps] == [T0 + 1000, T0 + 2500]
    assert [e["args"]["reason"] for e in spans if e["name"] == "stall"] == ["preempted"]


def test_what_recorders_hold_joins_the_file_of_a_request(trace: RequestTrace) -> None:
    step = {
        "at_us": T0 + 1000, "duration_us": 50, "kind": "step", "request_id": "", "attempt": 0,
        "number": 3, "tokens": 0, "text": "",
    }  # fmt: skip
    events = perfetto_trace(trace_json(trace, 0), [{"process": "d1", "events": [step]}])
    processes = {
        e["args"]["name"]: e["pid"] for e in events["traceEvents"] if e["name"] == "process_name"
    }
    lanes = {
        e["tid"]: e["args"]["name"]
        for e in events["traceEvents"]
        if e["name"] == "thread_name" and e["pid"] == processes["d1"]
    }
    (recorded,) = [e for e in events["traceEvents"] if e["name"] == "step"]
    assert recorded["pid"] == processes["d1"]
    assert lanes[recorded["tid"]] == "recorded steps"
    assert "work" in lanes.values()


def test_a_running_request_without_workers_reports_is_a_file_too() -> None:
    made = RequestTrace("r-0", T0, 5, T0 + 10)
    made.attempts = [AttemptTrace(1, PLACEMENT, T0 + 20)]
    names = [e["name"] for e in perfetto_trace(trace_json(made, T0 + 50))["traceEvents"]]
    assert "tokenize" in names
    assert "stream" not in names


def test_without_its_packages_the_setting_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"pip install 'baton-serve\[otlp\]'"):
        OtlpExporter("http://127.0.0.1:1/v1/traces", 1.0, CollectorRegistry(), "r")


def test_exported_times_are_those_of_the_system_clock_even_if_it_was_set(
    trace: RequestTrace, monkeypatch: pytest.MonkeyPatch
) -> None:
    spans: list[Any] = []

    class Kept:
        def on_end(self, span: Any) -> None:
            spans.append(span)

    trace.context = new_context(is_sampled=True)
    for step_us in (0, 7_200_000_000):
        monkeypatch.setattr(otlp, "clock_step_us", lambda step_us=step_us: step_us)
        exporter = OtlpExporter("http://127.0.0.1:1", 1.0, CollectorRegistry(), "r")
        exporter._processor.shutdown()
        exporter._processor = Kept()
        exporter._emit(generation_spans(trace), "1" * 32, "", "2" * 16)
    half = len(spans) // 2
    moved = {(b.start_time - a.start_time, b.end_time - a.end_time)
             for a, b in zip(spans[:half], spans[half:], strict=True)}  # fmt: skip
    assert half > 5
    assert moved == {(7_200 * 10**9, 7_200 * 10**9)}


@pytest.mark.parametrize("is_sampled", [True, False])
def test_a_trace_of_our_own_has_no_parent(is_sampled: bool) -> None:
    context = new_context(is_sampled)
    assert context.is_sampled is is_sampled
    assert (len(context.trace_id), len(context.span_id), context.parent_id) == (32, 16, "")
    assert context.traceparent.endswith("-01" if is_sampled else "-00")
    assert CURRENT_TRACE.get() is None


@pytest.mark.parametrize(
    "endpoint", ["http://me:word@h/v1", "http://h/v1?key=word", "http://h:word"]
)
def test_an_endpoint_holds_no_secret(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_HEADERS") as error:
        OtlpExporter(endpoint, 1.0, CollectorRegistry(), "r")
    assert "word" not in str(error.value)


@pytest.mark.parametrize(
    ("path", "taken_at"),
    [
        ("", "/v1/traces"),
        ("/", "/v1/traces"),
        ("/v1/traces", "/v1/traces"),
        ("/otlp/v1/traces", "/otlp/v1/traces"),
    ],
)
async def test_a_collector_without_a_path_gets_traces_where_it_takes_them(
    path: str, taken_at: str
) -> None:
    posted: list[str] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posted.append(self.path)
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:
            """Says nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        endpoint = f"http://127.0.0.1:{server.server_port}{path}"
        exporter = OtlpExporter(endpoint, 1.0, CollectorRegistry(), "r")
        exporter.end(
            SimpleNamespace(
                path="/v1/completions",
                request_id="r-0",
                arrived_us=T0,
                ended_us=T0 + 9,
                status=200,
                trace=new_context(is_sampled=True),
            )
        )
        running = asyncio.create_task(exporter.run())
        await asyncio.sleep(0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        server.shutdown()
        thread.join()
    assert posted == [taken_at]
