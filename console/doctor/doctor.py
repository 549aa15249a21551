"""Examines a fleet by all rules, and remembers the time since which each finding stands.

The rules are pure; `Doctor` owns only the times, and the last judgement. A finding stands from when
it is found until it was not found for `VANISH_S`, so that it does not flicker.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from console.doctor.client_goodput import floods
from console.doctor.finding import Finding, Passed, Rule, Urgency
from console.doctor.observation import FEW_REQUESTS, MIN_REQUESTS, Observation
from console.doctor.rules.blocks import check_few_blocks
from console.doctor.rules.caches import check_cache_thrash, check_cold_cache, check_stale_hints
from console.doctor.rules.callers import check_flood, check_invalid, check_router
from console.doctor.rules.decode import (
    check_decode_slow,
    check_long_output,
    check_memory_full,
    check_stalls,
)
from console.doctor.rules.first_token import check_pool_balance, check_prefill_slow
from console.doctor.rules.missed import MISSED, check_missed
from console.doctor.rules.pools import check_pools, check_workers
from console.doctor.rules.surroundings import (
    check_hosts,
    check_logs,
    check_routers,
    check_store,
    check_tiers,
)
from console.doctor.rules.targets import check_targets
from console.doctor.rules.workers import check_faults, check_slow_link, check_slow_worker

VANISH_S = 30.0
FACT_VANISHES_S = 3.0
UNEXPLAINED_S = 10.0
"""How long clients must miss targets without an explanation by a rule before a finding says so."""

_LACKS = ("pools", "workers", "hosts", "router")
"""Rules whose findings make everything late, whatever the settings are."""
_SLOW = (*_LACKS, "few_blocks", "pool_balance")

RULES = (
    Rule("pools", "Both pools there", check_pools, is_fact=True),
    Rule("workers", "No worker missing", check_workers, is_fact=True, yields_to=("pools",)),
    Rule(
        "hosts", "CPU for the fleet", check_hosts, ("prefill", "decode", "stall"), is_fact=True,
        yields_to=("pools",),
    ),
    Rule(
        "router", "This router", check_router, ("placement", "dispatch", "report", "delivery"),
        is_fact=True, yields_to=("pools", "hosts"),
    ),
    Rule("store", "The store", check_store, is_fact=True),
    Rule("routers", "Other routers", check_routers, is_fact=True),
    Rule("logs", "Logs", check_logs, is_fact=True),
    Rule("tiers", "Tiers below the KV pools", check_tiers, is_fact=True),
    Rule("flood", "Keys within their limits", check_flood, is_fact=True),
    Rule("invalid", "Requests that can be served", check_invalid, is_fact=True),
    Rule("few_blocks", "KV memory alike", check_few_blocks, ("queue", "stall"), is_fact=True),
    Rule(
        "pool_balance", "Pools in balance", check_pool_balance, ("dispatch", "queue"),
        yields_to=(*_LACKS, "few_blocks"), is_fact=True,
    ),
    Rule(
        "prefill_slow", "Prompts slow to compute", check_prefill_slow,
        ("prefill", "between_chunks"), yields_to=_SLOW,
    ),
    Rule(
        "decode_slow", "Decode slow with prefill normal", check_decode_slow, ("decode",),
        yields_to=_SLOW,
    ),
    Rule(
        "long_output", "Slow only with long output", check_long_output, ("decode",),
        yields_to=_SLOW,
    ),
    Rule(
        "stalls", "Periodic stalls", check_stalls, ("shared_decode", "stall"), yields_to=_LACKS,
    ),
    Rule(
        "memory_full", "Memory full, throughput low", check_memory_full, ("queue", "stall"),
        yields_to=_SLOW,
    ),
    Rule("slow_link", "Slow link", check_slow_link, ("transfer",), is_fact=True),
    Rule(
        "slow_worker", "Slow worker", check_slow_worker, ("prefill", "decode"),
        yields_to=(*_LACKS, "few_blocks"),
    ),
    Rule("cold_cache", "Cold cache", check_cold_cache, ("prefill",)),
    Rule("cache_thrash", "Thrashing cache", check_cache_thrash, ("prefill", "stall")),
    Rule(
        "targets", "Targets out of reach", check_targets, yields_to=_LACKS,
        min_requests=FEW_REQUESTS,
    ),
    Rule("stale_hints", "Stale hints", check_stale_hints, ("prefill",)),
    Rule("faults", "Retries and faults", check_faults, ("lost_attempt",), yields_to=("pools",)),
)  # fmt: skip
"""A cause comes before its effects."""


@dataclass(frozen=True)
class Examination:
    """The results of all rules for one observation. `is_conclusive` is False while there are too
    few requests to conclude anything."""

    findings: tuple[Finding, ...]
    passed: tuple[Passed, ...]
    is_conclusive: bool = True

    def by_rule(self) -> dict[str, Finding | Passed]:
        """The result of each rule that has one."""
        findings = {each.rule: each for each in self.findings}
        return findings | {each.rule: each for each in self.passed}

    def as_json(self, window_s: float, checked_us: int) -> dict[str, Any]:
        """The body of `GET /doctor`."""
        return {
            "window_s": window_s,
            "checked_us": checked_us,
            "is_conclusive": self.is_conclusive,
            "findings": [each.as_json() for each in self.findings],
            "passed": [msgspec.to_builtins(each) for each in self.passed],
        }


def examine(seen: Observation, judged: Examination | None = None) -> Examination:
    """Apply the rules. Pure; the findings have no `since_us` yet. Urgent ones come first, and
    causes before their effects. With too few requests there are no judgements, only facts. With
    `judged`, only facts are checked; the judgements are copied from that examination."""
    others = without_floods(seen)
    former = {} if judged is None else judged.by_rule()
    found: dict[str, Finding] = {}
    passed: list[Passed] = []
    for rule in RULES:
        if any(each in found for each in rule.yields_to):
            continue
        is_judged = judged is not None and not rule.is_fact
        result = former.get(rule.name) if is_judged else _applied(rule, others)
        if isinstance(result, Finding):
            found[rule.name] = result
        elif result is not None:
            passed.append(result)
    if not found:
        unexplained = check_missed(others)
        if unexplained is not None:
            found[unexplained.rule] = unexplained
    findings = sorted(found.values(), key=lambda each: each.urgency is not Urgency.URGENT)
    return Examination(tuple(findings), tuple(passed), len(others.requests) >= MIN_REQUESTS)


def _applied(rule: Rule, seen: Observation) -> Finding | Passed | None:
    if not rule.is_fact and len(seen.requests) < rule.min_requests:
        return None
    result = rule.check(seen)
    if isinstance(result, Finding):
        return msgspec.structs.replace(result, stages=rule.stages)
    return None if result is None else Passed(rule=rule.name, title=rule.title, text=result)


def without_floods(seen: Observation) -> Observation:
    """The observation without the requests of keys that flood, which cause their own waiting."""
    flooding = {each.name for each in seen.facts.keys if floods(each)}
    if not flooding:
        return seen
    requests = tuple(each for each in seen.requests if each.key not in flooding)
    return msgspec.structs.replace(seen, requests=requests)


@dataclass
class _Standing:
    """A finding with the times at which it was first and last found."""

    first_us: int
    last_us: int
    finding: Finding


_FACTS = frozenset((*(each.name for each in RULES if each.is_fact), MISSED))
_RANK = {name: rank for rank, name in enumerate([*(each.name for each in RULES), MISSED])}
_YIELDS_TO = {each.name: each.yields_to for each in RULES} | {MISSED: tuple(e.name for e in RULES)}


def _is_explained(rule: str, examination: Examination) -> bool:
    """Whether a finding that still stands contradicts its cause, which was found later."""
    return any(each.rule in _YIELDS_TO[rule] for each in examination.findings)


class Doctor:
    """Examines repeatedly; owns the last judgement, and the time since which each finding stands.
    Call it with observations in order. `unexplained_s`: how long clients must miss targets before a
    finding says that no rule explains it."""

    def __init__(self, unexplained_s: float = UNEXPLAINED_S) -> None:
        self._unexplained_us = unexplained_s * 1e6
        self._standing: dict[str, _Standing] = {}
        self._judged = Examination((), (), is_conclusive=False)

    def examine(self, seen: Observation) -> Examination:
        """The findings that stand at `seen.now_us`."""
        self._judged = examine(seen)
        return self._stand(self._judged, seen.now_us)

    def check_facts(self, seen: Observation) -> Examination:
        """The findings that stand at `seen.now_us`; judgements are those of the last `examine`."""
        return self._stand(examine(seen, self._judged), seen.now_us)

    def _stand(self, examination: Examination, now: int) -> Examination:
        for finding in examination.findings:
            standing = self._standing.setdefault(finding.rule, _Standing(now, now, finding))
            standing.last_us, standing.finding = now, finding
        for rule, standing in list(self._standing.items()):
            stays_s = FACT_VANISHES_S if rule in _FACTS else VANISH_S
            if now - standing.last_us > stays_s * 1e6 or _is_explained(rule, examination):
                del self._standing[rule]
        findings = [
            msgspec.structs.replace(each.finding, since_us=each.first_us)
            for rule, each in self._standing.items()
            if not any(cause in self._standing for cause in _YIELDS_TO[rule])
            and (rule != MISSED or now - each.first_us >= self._unexplained_us)
        ]
        findings.sort(key=lambda each: (each.urgency is not Urgency.URGENT, _RANK[each.rule]))
        passed = [each for each in examination.passed if each.rule not in self._standing]
        return Examination(tuple(findings), tuple(passed), examination.is_conclusive)
