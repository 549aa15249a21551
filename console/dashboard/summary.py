"""The object of `GET /fleet`, reduced to what the page shows; pure.

A summary goes to every reader each second, so it carries neither fields, nor digits, nor pairs that
the page does not draw. A large fleet has tables in place of cards and of the matrix of pairs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from console.telemetry.paths import is_off_way

MAX_CARDS = 12
"""Workers of a pool; above, pools are tables, and of the pairs only those that stand out show."""
MAX_PAIRS = 40
OLD_AFTER_US = 3_500_000
"""Three idle reports and a half."""
_DIGITS = 4  # the page shows three
_UNUSED = frozenset(
    (
        "counters", "control", "transport", "transport_paths", "host", "pid", "incarnation",
        "blocks_waiting", "blocks_stuck", "num_handoffs", "prefill_unreachable",
    )
)  # fmt: skip
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
        **report,
        "workers": [_shown_worker(each, unused, now_us) for each in workers],
        "pairs": pairs,
        "other_pairs": rest,
        "cluster": cluster,
        "offers": sorted(offers),
    }


def _shown_worker(
    worker: Mapping[str, Any], unused: Collection[str], now_us: int
) -> dict[str, Any]:
    shown = {name: _rounded(value) for name, value in worker.items() if name not in unused}
    if now_us - (shown.get("reported_us") or now_us) <= OLD_AFTER_US:
        shown["reported_us"] = None
    return shown


def _shown_pairs(
    pairs: Iterable[Mapping[str, Any]], is_large: bool
) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """The pairs that are shown, and in a large fleet the sum of the others."""
    if not is_large:
        return [_shown_pair(each) for each in pairs], None
    off, usual = [], []
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
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value
