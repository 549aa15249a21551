"""A real fleet explains its requests: stages that add up, steps, pairs, spans, recorders."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest

from cli.child_settings import Secrets
from cli.fleet import Fleet
from tests.forked import ForkedChildren
from tests.http_client import HTTP
from tests.integration.collector import Collector, Received
from tests.integration.fleets import running_fleet, trace_of, wait_for

MAX_UNEXPLAINED = 0.02
SECRET = "the secret of this fleet"


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as running:
        yield running


@pytest.fixture(scope="module")
def fleet(collector: Collector) -> Iterator[Fleet]:
    settings = {"prefill": 1, "decode": 1, "local_prefill_threshold_tokens": 0}
    environment = {
        "BATON_OTLP_ENDPOINT": collector.url, "OTEL_BSP_SCHEDULE_DELAY": "100",
    }  # fmt: skip
    with running_fleet(environment, cluster_secret=SECRET, **settings) as fleet:
        yield fleet


def complete(fleet: Fleet, num_tokens: int = 400, max_tokens: int = 20, **headers: str) -> str:
    """The id of a streamed request that has ended."""
    ids = [300 + (7 * place + num_tokens) % 700 for place in range(num_tokens)]
    body = {
        "model": "demo_model", "prompt": ids, "max_tokens": max_tokens, "ignore_eos": True,
        "stream": True,
    }  # fmt: skip
    with HTTP.stream("POST", f"{fleet.url}/v1/completions", json=body, headers=headers) as answer:
        answer.read()
        assert answer.status_code == 200, answer.text
        receipt = answer.headers["x-baton-receipt"]
        request_id = answer.headers["x-baton-request-id"]
    assert receipt == f"/v1/requests/{request_id}/receipt"
    assert HTTP.get(f"{fleet.url}{receipt}").json()["request_id"] == f"{request_id}-0"
    return str(request_id)


def test_the_stages_of_a_request_add_up_to_its_latency(fleet: Fleet) -> None:
    complete(fleet)
    trace = trace_of(fleet, complete(fleet, 401))
    first = {each["stage"]: each["ms"] for each in trace["stages"] if each["part"] != "rest"}
    rest = {each["stage"]: each["ms"] for each in trace["stages"] if each["part"] == "rest"}
    assert sum(first.values()) == pytest.approx(trace["ttft_ms"])
    assert sum(rest.values()) == pytest.approx(trace["decode_ms"])
    assert first["unexplained"] <= MAX_UNEXPLAINED * trace["ttft_ms"], first
    assert {"tokenize", "prefill", "delivery"} <= set(first)  # others may take less than 1 us
    assert {"decode", "last_token"} <= set(rest)
    decode = trace["attempts"][0]["decode"]
    is_hidden = decode["blocks_arrived_us"] <= trace["first_token_us"]
    assert ("transfer" in rest) is not is_hidden, "blocks may arrive before the first token"
    assert len(decode["steps"]) == decode["num_decode_steps"] == 19
    assert set(trace["clock_offsets_us"]) == {"prefill-1", "decode-1"}
    assert all(abs(each) < 50_000 for each in trace["clock_offsets_us"].values()), "one host"


def test_the_recorders_of_all_processes_agree_with_the_trace(fleet: Fleet) -> None:
    request_id = complete(fleet, 402)
    trace = trace_of(fleet, request_id)
    name = trace["request_id"]

    def events(process: str) -> list[dict[str, Any]]:
        answer = HTTP.get(f"{fleet.url}/flight?process={process}&request_id={name}")
        assert answer.status_code == 200, answer.text
        return list(answer.json()["events"])

    attempt = trace["attempts"][0]
    own = [each for each in events("router") if each["request_id"]]
    assert [each["kind"] for each in own] == ["received", "placed", "first_token", "finished"]
    prefill = [each for each in events("prefill-1") if each["request_id"]]
    chunks = [each["tokens"] for each in prefill if each["kind"] == "chunk"]
    assert chunks == [each[2] for each in attempt["prefill"]["chunks"]]
    written = sum(each["number"] for each in prefill if each["kind"] == "write")
    assert written == attempt["prefill"]["blocks_moved"] > 0
    decode = events("decode-1")
    (finished,) = [each for each in decode if each["kind"] == "finished"]
    assert finished["tokens"] == trace["num_output_tokens"] == 20
    from_us, to_us = trace["received_us"] - 50_000, trace["finished_us"] + 50_000  # one host
    steps = [e for e in decode if e["kind"] == "step" and from_us <= e["at_us"] <= to_us]
    assert len(steps) >= attempt["decode"]["num_decode_steps"] == 19
    assert all(each["request_id"] in ("", name) for each in decode)


PHASES = ["process", "fetch", "transport", "kernels", "weights", "memory", "graphs", "warm_up"]


def test_each_worker_shows_how_long_the_phases_of_its_start_took(fleet: Fleet) -> None:
    def listed() -> list[dict[str, Any]] | None:
        found = list(HTTP.get(f"{fleet.url}/fleet").json()["workers"])
        return found if all(each["start_ms"] for each in found) else None

    for worker in wait_for("what the workers note when they have started", listed):
        took_ms = worker["start_ms"]
        assert list(took_ms) == [*PHASES, "registration"]
        assert took_ms["process"] > 0
        assert took_ms["warm_up"] > 0
        log = fleet.processes[worker["worker_id"]].log_path.read_text()
        assert log.count("started in ") == 1, "logged once"


def test_a_pair_shows_its_way_and_its_rates(fleet: Fleet) -> None:
    def pair() -> dict[str, Any] | None:
        complete(fleet, 900)
        pairs = HTTP.get(f"{fleet.url}/fleet").json()["pairs"]
        return pairs[0] if pairs and pairs[0]["path"] != "unknown" else None

    shown = wait_for("a measured path", pair)
    assert (shown["prefill"], shown["decode"]) == ("prefill-1", "decode-1")
    assert shown["path"] == shown["expected_path"] == "shared memory"
    assert shown["bytes_per_s"] > 0
    assert shown["busy_bytes_per_s"] > shown["bytes_per_s"]
    assert shown["exposed_p95_ms"] is not None
    assert shown["failures"] == 0


def test_any_router_shows_the_requests_of_the_others(
    fleet: Fleet, tmp_path_factory: pytest.TempPathFactory
) -> None:
    request_id = complete(fleet, 500)
    folder = tmp_path_factory.mktemp("second")
    port_file = folder / "port"
    children = ForkedChildren(fleet.settings)
    secrets = Secrets(fleet.redis_url, SECRET, fleet.access.key or "")
    second = children.router(secrets, port_file, folder)
    second.start()
    try:
        wait_for("the second router", port_file.exists, 60)
        url = f"http://127.0.0.1:{port_file.read_text().strip()}"

        def told() -> bool:
            answer = HTTP.get(f"{url}/requests?prefix={request_id}")
            return answer.status_code == 200 and bool(answer.json()["rows"])

        wait_for("the first router's rows", told)
        trace = HTTP.get(f"{url}/requests/{request_id}/trace").json()
        own = HTTP.get(f"{fleet.url}/requests/{request_id}/trace").json()
        assert trace["stages"] == own["stages"]
        assert HTTP.get(f"{url}/fleet").json()["totals"]["requests_per_s"] > 0
        assert HTTP.get(f"{url}/requests/cmpl-none/trace").status_code == 404
    finally:
        second.signal(signal.SIGTERM)
        assert second.wait(60)
        assert second.exit_status() == 0


SPANS = {
    ("baton-router", "generation"), ("baton-router", "placement"), ("baton-router", "attempt"),
    ("baton-prefill", "queue"), ("baton-prefill", "chunk"), ("baton-prefill", "transfer"),
    ("baton-decode", "handoff"), ("baton-decode", "decode"), ("baton-decode", "decode steps"),
}  # fmt: skip


@pytest.mark.parametrize("has_parent", [True, False])
def test_a_collector_gets_one_connected_trace_per_request(
    fleet: Fleet, collector: Collector, has_parent: bool
) -> None:
    trace_id, parent = f"{7 + has_parent:032x}", "b" * 16
    headers = {"traceparent": f"00-{trace_id}-{parent}-01"} if has_parent else {}
    request_id = complete(fleet, 600, **headers)

    def spans() -> list[Received] | None:
        root = collector.find("POST /v1/completions", request_id)
        found = collector.trace(root.trace_id) if root else []
        names = {(each.service, each.name) for each in found}
        return found if names >= SPANS else None

    found = wait_for("the request's spans", spans)
    ids = {each.span_id for each in found}
    roots = [each for each in found if each.parent_id not in ids]
    assert [each.name for each in roots] == ["POST /v1/completions"]
    assert roots[0].parent_id == (parent if has_parent else "")
    if has_parent:
        assert roots[0].trace_id == trace_id
    assert len(ids) == len(found)
    assert all(each.end_ns >= each.start_ns for each in found)


def test_a_client_that_does_not_sample_is_not_exported(fleet: Fleet, collector: Collector) -> None:
    trace_id = f"{99:032x}"
    complete(fleet, 610, traceparent=f"00-{trace_id}-{'c' * 16}-00")
    later = complete(fleet, 620)
    wait_for("a later request", lambda: collector.find("generation", f"{later}-0"))
    assert collector.trace(trace_id) == []
