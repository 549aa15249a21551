"""The console's metrics: sums of the fleet and of its pairs, and metrics under vLLM's names.

Label values are bounded: two sides, and the ids of at most `MAX_PAIRS` pairs. vLLM's names are for
dashboards made for vLLM, with the meanings of vLLM's documentation, "Production Metrics". Their
values come from Baton's own metrics; loads are sums over the workers that this router uses.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from console.doctor.facts import Facts
from console.telemetry.fleet_report import FleetReport
from protocol.messages import Role
from router.fleet.conditions import Cause, State
from router.fleet.fleet import Fleet

_PAIR_COUNTERS = (
    ("baton_pair_bytes", "Bytes of KV moved by a pair of workers"),
    ("baton_pair_blocks", "KV blocks moved by a pair of workers"),
    ("baton_pair_descriptors", "Writes posted for a pair of workers"),
    ("baton_pair_transfer_seconds", "Time in which a pair had a write under way"),
    ("baton_pair_exposed_seconds", "Time that a pair's blocks moved after the last chunk"),
    ("baton_pair_failures", "Attempts over a pair that failed before their blocks had moved"),
)
_RENAMED = {
    "baton_time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "baton_inter_token_seconds": "vllm:inter_token_latency_seconds",
    "baton_time_per_output_token_seconds": "vllm:request_time_per_output_token_seconds",
    "baton_end_to_end_seconds": "vllm:e2e_request_latency_seconds",
    "baton_queue_seconds": "vllm:request_queue_time_seconds",
    "baton_prefill_seconds": "vllm:request_prefill_time_seconds",
    "baton_decode_seconds": "vllm:request_decode_time_seconds",
    "baton_prompt_tokens": "vllm:prompt_tokens",
    "baton_output_tokens": "vllm:generation_tokens",
}
_SPLIT = {
    "baton_prompt_tokens": "vllm:prefix_cache_queries",
    "baton_cached_prompt_tokens": "vllm:prefix_cache_hits",
}
_LABEL = "model_name"


class FleetCollector(Collector):
    """`baton_fleet_*` and `baton_pair_*` of one router."""

    def __init__(self, report: FleetReport) -> None:
        self._report = report

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """See the library's `Collector`."""
        now = self._report.gauges()
        text = "Predicted load as a share of its target, by side; 1: at the target"
        pressure = GaugeMetricFamily("baton_fleet_pressure", text, labels=["side"])
        for side, value in (("prefill", now.prefill_pressure), ("decode", now.decode_pressure)):
            if value is not None:
                pressure.add_metric([side], value)
        yield pressure
        for name, text, value in (
            ("goodput_ratio", "Share of the last minute's requests that met both targets",
             now.goodput),
            ("goodput_target_ratio", "Target of the goodput", now.goodput_target),
            ("ttft_target_seconds", "Target of the time to the first token",
             now.ttft_target_ms / 1000),
            ("tpot_target_seconds", "Target of the time per output token",
             _seconds(now.tpot_target_ms)),
            ("predicted_step_seconds", "Predicted decode step, over all decode workers",
             _seconds(now.predicted_step_ms)),
            ("slow_pairs", "Pairs of workers whose KV took a slower path in the last minute "
             "than both have, or moved more slowly than its path allows", now.slow_pairs),
        ):  # fmt: skip
            gauge = GaugeMetricFamily(f"baton_fleet_{name}", text)
            if value is not None:
                gauge.add_metric([], value)
            yield gauge
        yield from fact_gauges(self._report.facts)
        yield from self._pairs()

    def _pairs(self) -> Iterator[CounterMetricFamily]:
        totals = list(self._report.pairs.totals())
        for place, (name, text) in enumerate(_PAIR_COUNTERS):
            family = CounterMetricFamily(name, text, labels=["source", "target"])
            for key, sums in totals:
                family.add_metric(key, sums[place])
            yield family


def fact_gauges(facts: Facts) -> Iterator[GaugeMetricFamily]:
    """Workers by condition, requests that wait, and other routers that fell silent. A lost worker
    counts until another one of its role has come."""
    roles = (Role.PREFILL, Role.DECODE)
    states = GaugeMetricFamily(
        "baton_fleet_workers", "Workers by role and condition", labels=["role", "state"]
    )
    causes = GaugeMetricFamily(
        "baton_fleet_unusable_workers",
        "Workers that the fleet lacks, by role and cause",
        labels=["role", "cause"],
    )
    for role in roles:
        pool = [each for each in facts.pool(role) if not each.is_replaced]
        for state in State:
            number = sum(each.condition == state.value for each in pool)
            states.add_metric([role.value, state.value.replace(" ", "_")], number)
        missed = facts.missed(role)
        for cause in Cause:
            number = sum(each.cause == cause.value for each in missed)
            causes.add_metric([role.value, cause.value], number)
    yield from (states, causes)
    for name, text, value in (
        ("waiting_requests", "Requests that wait for their first token",
         sum(each.waiting for each in facts.keys)),
        ("late_requests", "Requests that have waited longer than the first token's target",
         sum(each.late for each in facts.keys)),
        ("silent_routers", "Other routers that were killed or hang, and whose place none has taken",
         len(facts.routers)),
        ("lost_logs", "Processes that cannot write their logs", len(facts.logs)),
        ("failing_tiers", "Tiers of workers in which blocks failed in the last minute",
         len(facts.tiers)),
    ):  # fmt: skip
        gauge = GaugeMetricFamily(f"baton_fleet_{name}", text)
        gauge.add_metric([], value)
        yield gauge
    starved = GaugeMetricFamily(
        "baton_fleet_cpu_wait_ratio",
        "Of the time that the fleet's processes of a machine could run, the share in which they "
        "waited for a core",
        labels=["host"],
    )
    for host in facts.hosts:
        starved.add_metric([host.name], host.waiting_share)
    yield starved


class VllmNames(Collector):
    """The families of `registry` under vLLM's names, labelled with the model."""

    def __init__(self, registry: CollectorRegistry, fleet: Fleet, model: str | None) -> None:
        self._registry = registry
        self._fleet = fleet
        self._model = model
        self._is_collecting = False

    def describe(self) -> Iterator[Metric]:
        """No families: which ones there are depends on the registry's other collectors."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """See the library's `Collector`; empty while this collector asks its own registry."""
        if self._is_collecting:
            return
        self._is_collecting = True
        try:
            families = list(self._registry.collect())
        finally:
            self._is_collecting = False
        for names in (_RENAMED, _SPLIT):
            for family in families:
                if family.name in names:
                    yield self._renamed(family, names[family.name])
        yield from self._loads()

    def _renamed(self, family: Metric, name: str) -> Metric:
        made = Metric(name, family.documentation, family.type)
        for sample in family.samples:
            if sample.name.endswith("_created"):
                continue
            suffix = sample.name.removeprefix(family.name)
            labels = {_LABEL: self._model_name, **sample.labels}
            made.add_sample(name + suffix, labels, sample.value)
        return made

    def _loads(self) -> Iterator[GaugeMetricFamily]:
        stats = [each.stats for each in self._fleet.workers() if each.stats is not None]
        total = sum(each.blocks_total for each in stats)
        used = sum(each.blocks_used for each in stats)
        for name, text, value in (
            ("num_requests_running", "Requests that run, over all workers",
             sum(each.num_running for each in stats)),
            ("num_requests_waiting", "Requests that wait, over all workers",
             sum(each.num_waiting for each in stats)),
            ("kv_cache_usage_perc", "KV blocks in use, as a share of all workers' blocks",
             used / total if total else 0.0),
        ):  # fmt: skip
            gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=[_LABEL])
            gauge.add_metric([self._model_name], value)
            yield gauge

    @property
    def _model_name(self) -> str:
        identity = self._fleet.identity
        return self._model or (identity.model if identity is not None else "")


def _seconds(ms: float | None) -> float | None:
    return None if ms is None else ms / 1000
