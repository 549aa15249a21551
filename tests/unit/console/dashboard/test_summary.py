"""What the page is sent of a fleet: what it shows, and no more bytes than the documents say."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest

from console.dashboard.summary import MAX_CARDS, MAX_PAIRS, OLD_AFTER_US, shown_summary
from console.dashboard.versions import Versions

NOW_US = 1_795_611_759_970_129
MOST_BYTES = 40_000
"""Of a second of a large fleet, as docs/dashboard.md says."""


def worker(worker_id: str, **fields: Any) -> dict[str, Any]:
    usual = {"worker_id": worker_id, "role": "decode", "state": "ready", "reported_us": NOW_US}
    return usual | fields


def pair(prefill: str, decode: str, **fields: Any) -> dict[str, Any]:
    usual = {
        "prefill": prefill, "decode": decode, "path": "RDMA", "expected_path": "RDMA",
        "bytes_per_s": 1e9, "busy_bytes_per_s": 3.8e10, "is_below_way": False,
        "exposed_p95_ms": 3.1, "failures": 0, "blocks_per_s": 700.0, "writes_per_s": 80.0,
    }  # fmt: skip
    return usual | fields


def shown(workers: list[Any], pairs: list[Any], now_us: int = NOW_US) -> dict[str, Any]:
    return shown_summary({"workers": workers, "pairs": pairs}, "prod", {"fleet"}, now_us)


def test_the_page_gets_no_field_that_it_does_not_show() -> None:
    workers = [worker("d1", counters={}, pid=1, step_ms=21.23456789)]
    assert shown(workers, []) == {
        "workers": [worker("d1", step_ms=21.23, reported_us=None)],
        "pairs": [], "other_pairs": None, "cluster": "prod", "offers": ["fleet"],
    }  # fmt: skip
    (found,) = shown([], [pair("p1", "d1", bytes_per_s=1234567.89)])["pairs"]
    assert found == {
        "pair_id": "p1 d1", "prefill": "p1", "decode": "d1", "path": "RDMA",
        "expected_path": "RDMA", "bytes_per_s": 1_235_000.0, "exposed_p95_ms": 3.1, "failures": 0,
        "is_off_way": False,
    }  # fmt: skip


@pytest.mark.parametrize(("age_us", "is_told"), [(OLD_AFTER_US, False), (OLD_AFTER_US + 1, True)])
def test_only_an_old_report_has_its_time(age_us: int, is_told: bool) -> None:
    (found,) = shown([worker("d1", reported_us=NOW_US - age_us)], [])["workers"]
    assert (found["reported_us"] is not None) is is_told


def test_of_a_large_fleet_only_the_pairs_that_stand_out_are_sent() -> None:
    decode = [f"d{i}" for i in range(60)]
    pairs = [pair("p1", each, path="TCP" if i < 50 else "RDMA") for i, each in enumerate(decode)]
    pairs[49] |= {"bytes_per_s": 5e9}
    found = shown([worker(each) for each in decode[: MAX_CARDS + 1]], pairs)
    assert len(found["pairs"]) == MAX_PAIRS
    assert found["pairs"][0]["decode"] == "d49", "the busiest come first"
    assert found["other_pairs"] == {"count": 20, "off_way": 10, "bytes_per_s": 2e10}
    few = shown([worker(each) for each in decode[:MAX_CARDS]], pairs)
    assert (len(few["pairs"]), few["other_pairs"]) == (60, None)


def test_a_second_of_a_large_busy_fleet_is_small() -> None:
    """240 workers with the names of pods, all of whose numbers change, and 900 pairs."""
    names = {
        role: [f"production-baton-{role}-h100-80g-6d9f7c5b8-x{i:04}" for i in range(number)]
        for role, number in (("prefill", 30), ("decode", 210))
    }

    def fleet(second: int) -> dict[str, Any]:
        workers = [
            worker(
                name, role=role, model="m" * 40, reported_us=NOW_US + second * 1_000_000,
                num_waiting=second, num_running=30 + second, queued_tokens=15_000 + second,
                blocks_used=12_000 + second, blocks_cached=3000 + second,
                step_ms=21.23456789 + second, tokens_per_s=1607.123456789 + second * 7,
            )
            for role, of_role in names.items()
            for name in of_role
        ]  # fmt: skip
        pairs = [
            pair(p, d, bytes_per_s=1e8 * i / 7 + second * 1e7, exposed_p95_ms=i / 7 + second)
            for i, (p, d) in enumerate(itertools.product(names["prefill"], names["decode"][:30]))
        ]
        for each in pairs[:5]:
            each["path"] = "TCP"
        assert len(pairs) == 900
        return shown(workers, pairs, NOW_US + second * 1_000_000)

    versions = Versions()
    for second in (1, 2):
        versions.update(second, fleet(second))
    assert len(msgspec.json.encode(versions.since(1))) <= MOST_BYTES
