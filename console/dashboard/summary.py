"""The object of `GET /fleet`, reduced to what the page shows; pure.

A summary goes to every reader each second, so it carries neither fields, nor digits, nor pairs that
the page does not draw. A large fleet has tables in place of cards and of the matrix of pairs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from console.telemetry.facts.facts_json import apart_line, lost_log
from console.telemetry.kv_paths import is_off_way
from console.telemetry.rank_texts import ranks_text
from console.telemetry.request_window import NUM_POINTS
from console.telemetry.tier_texts import failing_tier, tiers_text
from process.number_text import age, count

MAX_CARDS = 12
"""The most workers of a pool shown as cards. With more, pools are tables, and only pairs that stand
out are shown."""
MAX_PAIRS = 40
MAX_KEYS = 5
OLD_AFTER_US = 3_500_000
"""The time of three and a half idle reports."""
_DIGITS = 4  # the page shows three
_UNUSED = frozenset(
    (
        "counters", "control", "transport", "transport_paths", "host", "pid", "incarnation",
        "start_ms", "host_tier_bytes", "host_tier_used_bytes", "disk_tier_bytes",
        "disk_tier_used_bytes", "blocks_waiting", "blocks_stuck", "num_handoffs",
        "prefill_unreachable", "connected", "lost_us", "lost_reason", "loading_since_us",
        "rank_busy_us", "rank_wait_us", "tensor_parallel", "pipeline_parallel",
    )
)  # fmt: skip
_UNUSED_PARTS = frozenset(("apart", "hosts", "keys", "logs", "pools", "routers", "store", "tiers"))
_ONLY_ON_CARDS = frozenset(("blocks_cached", "queued_tokens", "step_ms"))
_OF_PAIRS = ("path", "expected_path", "bytes_per_s", "exposed_p95_ms", "failures")


def shown_summary(
    report: Mapping[str, Any], cluster: str, offers: Collection[str], now_us: int
) -> dict[str, Any]:
    """`report` without what the page does not show, with the cluster's name, and with the names of
    the views that this router has data for. A worker's `reported_us` is None while it is recent."""
    workers = report["workers"]
    is_large = max(Counter(each["role"] for each in workers).values(), default=0) > MAX_CARDS
    unused = _UNUSED | _ONLY_ON_CARDS if is_large else _UNUSED
    pairs, rest = _shown_pairs(report["pairs"], is_large)
    return {
        **{name: value for name, value in report.items() if name not in _UNUSED_PARTS},
        "history": _whole_hour(report["history"], now_us),
        "door": _door(report.get("keys", ())),
        "outages": _outages(report),
        "workers": [_shown_worker(each, unused, now_us) for each in workers],
        "pairs": pairs,
        "other_pairs": rest,
        "cluster": cluster,
        "offers": sorted(offers),
    }


def _whole_hour(history: Mapping[str, Any], now_us: int) -> dict[str, Any]:
    """The history as a whole hour. Points from before the router's start are unknown."""
    step_us = history["step_ms"] * 1000
    series = {name: values for name, values in history.items() if isinstance(values, list)}
    missing = max(0, NUM_POINTS + 1 - len(history["goodput"]))
    first_us = history["start_us"] or now_us - now_us % step_us
    return {
        "step_ms": history["step_ms"],
        "start_us": first_us - missing * step_us,
        **{
            name: [None] * missing + [_rounded(each) for each in values]
            for name, values in series.items()
        },
    }


def _door(keys: Iterable[Mapping[str, Any]]) -> list[list[Any]]:
    """Outcomes of requests by key: the keys with the most trouble, and the sum of the others. A row
    has the key, its name for people, and the numbers of requests that were accepted, invalid (4xx),
    answered 429, answered 5xx, abandoned by their clients, late for a target, and waiting for their
    first token."""
    rows = [
        [
            each["name"], each["name"] or "without a key", each["accepted"], each["invalid"],
            each["limited"], each["refused"], each["left"],
            each["ended"] - each["good"] + each["late"], each["waiting"],
        ]
        for each in keys
    ]  # fmt: skip
    rows.sort(key=lambda row: (-sum(row[3:8]), -row[2]))
    others = rows[MAX_KEYS:]
    if others:
        numbers = [sum(column) for column in zip(*(row[2:] for row in others), strict=True)]
        rows[MAX_KEYS:] = [["", count(len(others), "other key"), *numbers]]
    return rows


def _outages(report: Mapping[str, Any]) -> list[tuple[str, str, int]]:
    """Parts that the fleet is missing. Each has a title, a sentence, and the time since which it is
    missing."""
    store = report.get("store") or {}
    found = []
    if store.get("trouble"):
        text = f"{store['trouble']}; requests go on with the workers last known."
        found.append(("Store", text, store["since_us"]))
    for each in report.get("routers", ()):
        if each["state"] == "silent":
            text = f"{each['name']} is silent: it was killed, or it hangs."
            found.append(("Router", text, each["since_us"]))
    for each in report.get("logs", ()):
        found.append(("Log", lost_log(each), each["since_us"]))
    for each in report.get("tiers", ()):
        found.append(("Tier", failing_tier(each), each["since_us"]))
    if line := apart_line(report.get("apart", ())):
        found.append(("Pair", line, report["apart"][0]["since_us"]))
    return found


def _shown_worker(
    worker: Mapping[str, Any], unused: Collection[str], now_us: int
) -> dict[str, Any]:
    shown = {name: _rounded(value) for name, value in worker.items() if name not in unused}
    if now_us - (shown.get("reported_us") or now_us) <= OLD_AFTER_US:
        shown["reported_us"] = None
    shown["started"] = _started(worker.get("start_ms") or {})
    if tiers := tiers_text(worker):
        shown["tiers"] = tiers
    if ranks := ranks_text(worker):
        shown["ranks"] = ranks
    return shown


def _started(start_ms: Mapping[str, float]) -> str | None:
    """How long the phases of a worker's start took, longest first."""
    if not start_ms:
        return None
    phases = sorted(start_ms.items(), key=lambda each: -each[1])
    words = ", ".join(f"{name.replace('_', ' ')} {age(took)}" for name, took in phases)
    return f"Started in {age(sum(start_ms.values()))}: {words}"


def _shown_pairs(
    pairs: Iterable[Mapping[str, Any]], is_large: bool
) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """The pairs that are shown, and in a large fleet the sum of the others."""
    if not is_large:
        return [_shown_pair(each) for each in pairs], None
    off: list[Mapping[str, Any]] = []
    usual: list[Mapping[str, Any]] = []
    for each in pairs:
        (off if is_off_way(each) else usual).append(each)
    off.sort(key=lambda each: -each["bytes_per_s"])
    rest = usual + off[MAX_PAIRS:]
    others = {
        "count": len(rest),
        "off_way": len(off[MAX_PAIRS:]),
        "bytes_per_s": _rounded(sum(each["bytes_per_s"] for each in rest)),
    }
    return [_shown_pair(each) for each in off[:MAX_PAIRS]], others


def _shown_pair(pair: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "pair_id": f"{pair['prefill']} {pair['decode']}",
        "prefill": pair["prefill"],
        "decode": pair["decode"],
        **{name: _rounded(pair[name]) for name in _OF_PAIRS},
        "is_off_way": is_off_way(pair),
    }


def _rounded(value: Any) -> Any:
    if not isinstance(value, float) or not value or not math.isfinite(value):
        return value
    return round(value, _DIGITS - 1 - math.floor(math.log10(abs(value))))
