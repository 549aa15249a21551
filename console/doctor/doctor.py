"""Examines a fleet by all rules, and remembers since when each finding stands.

The rules are pure; `Doctor` owns only the times. A finding stands from when it is found until it
was not found for `VANISH_S`, so that it does not flicker.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from console.doctor.finding import Finding, Passed, Rule, Urgency
from console.doctor.observation import MIN_REQUESTS, Observation
from console.doctor.rules.caches import check_cache_thrash, check_cold_cache, check_stale_hints
from console.doctor.rules.decode import (
    check_decode_slow,
    check_long_output,
    check_memory_full,
    check_stalls,
)
from console.doctor.rules.first_token import check_pool_balance, check_prefill_slow
from console.doctor.rules.targets import check_targets
from console.doctor.rules.workers import check_faults, check_slow_link, check_slow_worker

VANISH_S = 30.0

RULES = (
    Rule("pool_balance", "Pools in balance", check_pool_balance, ("dispatch", "queue")),
    Rule(
        "prefill_slow", "Prompts slow to compute", check_prefill_slow, ("prefill", "between_chunks")
    ),
    Rule("decode_slow", "Decode slow with prefill normal", check_decode_slow, ("decode",)),
    Rule("long_output", "Slow only with long output", check_long_output, ("decode",)),
    Rule("stalls", "Periodic stalls", check_stalls, ("shared_decode", "stall")),
    Rule("memory_full", "Memory full, throughput low", check_memory_full, ("queue", "stall")),
    Rule("slow_link", "Slow link", check_slow_link, ("transfer",)),
    Rule("slow_worker", "Slow worker", check_slow_worker, ("prefill", "decode")),
    Rule("cold_cache", "Cold cache", check_cold_cache, ("prefill",)),
    Rule("cache_thrash", "Thrashing cache", check_cache_thrash, ("prefill", "stall")),
    Rule("targets", "Targets out of reach", check_targets),
    Rule("stale_hints", "Stale hints", check_stale_hints, ("prefill",)),
    Rule("faults", "Retries and faults", check_faults, ("lost_attempt",)),
)


@dataclass(frozen=True)
class Examination:
    """The results of all rules for one observation. `is_conclusive` is False while there are too
    few requests to conclude anything."""

    findings: tuple[Finding, ...]
    passed: tuple[Passed, ...]
    is_conclusive: bool = True

    def as_json(self, window_s: float, checked_us: int) -> dict[str, Any]:
        """The body of `GET /doctor`."""
        return {
            "window_s": window_s,
            "checked_us": checked_us,
            "is_conclusive": self.is_conclusive,
            "findings": [each.as_json() for each in self.findings],
            "passed": [msgspec.to_builtins(each) for each in self.passed],
        }


def examine(seen: Observation) -> Examination:
    """Apply every rule. Pure; the findings have no `since_us` yet, urgent ones come first."""
    if len(seen.requests) < MIN_REQUESTS:
        return Examination((), (), is_conclusive=False)
    findings, passed = [], []
    for rule in RULES:
        result = rule.check(seen)
        if isinstance(result, Finding):
            findings.append(msgspec.structs.replace(result, stages=rule.stages))
        else:
            passed.append(Passed(rule=rule.name, title=rule.title, text=result))
    findings.sort(key=lambda each: each.urgency is not Urgency.URGENT)
    return Examination(tuple(findings), tuple(passed))


@dataclass
class _Standing:
    """A finding with the times at which it was first and last found."""

    first_us: int
    last_us: int
    finding: Finding


class Doctor:
    """Examines repeatedly; owns the time since which each finding stands."""

    def __init__(self) -> None:
        self._standing: dict[str, _Standing] = {}

    def examine(self, seen: Observation) -> Examination:
        """The findings that stand at `seen.now_us`. Call it with observations in order."""
        examination, now = examine(seen), seen.now_us
        for finding in examination.findings:
            standing = self._standing.setdefault(finding.rule, _Standing(now, now, finding))
            standing.last_us, standing.finding = now, finding
        for rule, standing in list(self._standing.items()):
            if now - standing.last_us > VANISH_S * 1e6:
                del self._standing[rule]
        findings = [
            msgspec.structs.replace(each.finding, since_us=each.first_us)
            for each in self._standing.values()
        ]
        findings.sort(key=lambda each: (each.urgency is not Urgency.URGENT, each.since_us))
        passed = [each for each in examination.passed if each.rule not in self._standing]
        return Examination(tuple(findings), tuple(passed), examination.is_conclusive)
