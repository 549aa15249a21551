"""Metrics: the document lists them all, labels are bounded, vLLM's names show the same numbers."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from console.metrics import FleetCollector, VllmNames
from protocol.errors import (
    DeadlineExceeded,
    DeadlineUnreachable,
    GenerationFailed,
    InvalidRequest,
    Overloaded,
    PromptTooLong,
    RequestError,
    TargetUnreachable,
)
from protocol.messages import FinishReason, Generate, Prefill
from router.fleet.worker import Loss
from router.metrics import FleetMetrics
from router.requests.metric_labels import error_label, failure_kind
from router.routing.placement import Mode, Rule
from scripts.metrics_table import DOCUMENT, current, names, router_metrics, worker_metrics
from tests.unit.router.router_harness import Consumer, Harness, request
from worker.counters import MEANINGS, Count

NAME = re.compile(r"baton_[a-z0-9_]+")
LABELS = {
    "role", "worker", "mode", "reason", "outcome", "kind", "source", "target", "side", "endpoint",
    "status", "door", "le", "cause", "state", "host", "rank", "stage",
}  # fmt: skip


@pytest.fixture
async def harness() -> AsyncIterator[Harness]:
    made = Harness()
    yield made
    await made.close()


def test_the_document_lists_every_metric() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert current(text) == text, "run: python scripts/metrics_table.py --write"


def test_names_follow_the_conventions() -> None:
    families = router_metrics() + worker_metrics()
    assert len(families) > 80
    for family in families:
        assert NAME.fullmatch(family.name), family.name
        assert not family.name.endswith(("_us", "_ms"))
        assert family.documentation
        for sample in family.samples:
            assert set(sample.labels) <= LABELS, sample
    assert len(set(names(families))) == len(families)


def test_every_counter_has_a_meaning() -> None:
    assert set(MEANINGS) == set(Count)


def test_documents_name_only_metrics_that_exist() -> None:
    known = set(names(router_metrics() + worker_metrics()))
    for path in Path(DOCUMENT).parent.glob("*.md"):
        named = re.findall(r"`(baton_[a-z_]+)", path.read_text(encoding="utf-8"))
        missing = {
            each for each in named
            if each not in known and not any(k.startswith(each) for k in known)
        }  # fmt: skip
        assert not missing, path


def test_labels_of_errors_and_failures_are_few_words() -> None:
    class Strange(RequestError):
        pass

    assert error_label(Overloaded("x")) == "overloaded"
    assert error_label(Strange("x")) == "other"
    assert error_label(GenerationFailed("x")) == "failed"
    assert failure_kind(True, False, Loss.BROKEN) == "connection_broke"
    assert failure_kind(True, False, Loss.SILENT) == "worker_lost"
    assert failure_kind(True, True, None) == "no_room"
    assert failure_kind(False, False, None) == "final"
    assert failure_kind(True, False, None) == "retryable"


def test_counters_show_every_word_of_their_label_before_the_first_event() -> None:
    registry = CollectorRegistry()
    FleetMetrics(registry)
    errors = (
        Overloaded, DeadlineUnreachable, InvalidRequest, GenerationFailed, DeadlineExceeded,
        RequestError, TargetUnreachable,
    )  # fmt: skip
    words = {error_label(each) for each in (*(kind("x") for kind in errors), PromptTooLong(1, 2))}
    kinds = {
        failure_kind(retryable, lacks_room, loss)
        for retryable in (True, False)
        for lacks_room in (True, False)
        for loss in (None, *Loss)
    }

    def shown(name: str) -> dict[str, float]:
        families = {family.name: family for family in registry.collect()}
        samples = [each for each in families[name].samples if each.name.endswith("_total")]
        return {next(iter(each.labels.values())): each.value for each in samples}

    assert shown("baton_router_refusals") == dict.fromkeys(words, 0)
    assert shown("baton_router_attempt_failures") == dict.fromkeys(kinds, 0)
    assert shown("baton_router_attempts") == dict.fromkeys(Mode, 0)
    assert shown("baton_router_decisions") == dict.fromkeys(Rule, 0)
    outcomes = ("finished", "failed", "closed")
    assert shown("baton_router_generations") == dict.fromkeys(outcomes, 0)


async def test_decisions_refusals_and_sources_are_counted(harness: Harness) -> None:
    consumer = Consumer(harness.dispatcher, request(10, "early"))
    with pytest.raises(Overloaded):
        await consumer.end()
    assert harness.metric("refusals_total", reason="overloaded") == 1
    (decode,) = await harness.join("d1")
    consumer = Consumer(harness.dispatcher, request(10, "r"))
    leg = await decode.received.next(Generate)
    decode.tokens(leg, 0, [1, 2], finish=FinishReason.STOP)
    await consumer.end()
    assert harness.metric("decisions_total", reason="no_prefill_worker") == 1


async def test_transfers_by_pair_and_the_fleet_s_gauges(harness: Harness) -> None:
    harness.registry.register(FleetCollector(harness.report))
    decode, prefill = await harness.join("d1", "p1")
    consumer = Consumer(harness.dispatcher, request(100, "r"))
    generate = await decode.received.next(Generate)
    leg = await prefill.received.next(Prefill)
    prefill.first_token(leg, 7)
    decode.tokens(generate, 1, [8], finish=FinishReason.STOP)
    await consumer.end()
    value = harness.registry.get_sample_value
    assert value("baton_fleet_goodput_ratio") == 1.0
    assert value("baton_fleet_ttft_target_seconds") == 1.0
    assert value("baton_fleet_slow_pairs") == 0.0
    harness.report.pairs.failed("p1", "d1")
    labels = {"source": "p1", "target": "d1"}
    assert value("baton_pair_failures_total", labels) == 1
    assert value("baton_pair_bytes_total", labels) == 0


async def test_vllm_names_show_the_same_numbers(harness: Harness) -> None:
    harness.registry.register(VllmNames(harness.registry, harness.fleet, None))
    (decode,) = await harness.join("d1", model="tiny")
    consumer = Consumer(harness.dispatcher, request(10, "r"))
    leg = await decode.received.next(Generate)
    decode.tokens(leg, 0, [1, 2], finish=FinishReason.STOP)
    await consumer.end()
    text = generate_latest(harness.registry).decode()
    samples = {
        (each.name, each.labels.get("model_name")): each.value
        for family in text_string_to_metric_families(text)
        for each in family.samples
    }
    assert samples["vllm:e2e_request_latency_seconds_count", "tiny"] == 1
    assert (
        samples["vllm:e2e_request_latency_seconds_sum", "tiny"]
        == (samples["baton_end_to_end_seconds_sum", None])
    )
    assert ("vllm:num_requests_running", "tiny") in samples
