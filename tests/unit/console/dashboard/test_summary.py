"""What the page is sent of a fleet: what it shows, and no more bytes than the documents say."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest

from console.dashboard.summary import MAX_CARDS, MAX_PAIRS, OLD_AFTER_US, shown_summary
from console.dashboard.summary_changes import Versions

NBSP = "\u00a0"
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
    return shown_summary(report(workers=workers, pairs=pairs), "prod", {"fleet"}, now_us)


def report(**parts: Any) -> dict[str, Any]:
    history = {"start_us": None, "step_ms": 30_000, "goodput": []}
    empty = {"workers": [], "pairs": [], "history": history}
    return empty | parts


def part(name: str, **parts: Any) -> Any:
    return shown_summary(report(**parts), "prod", (), NOW_US)[name]


def test_a_worker_of_several_ranks_is_shown_as_one() -> None:
    ranks = {"tensor_parallel": 2, "pipeline_parallel": 2, "rank_busy_us": [7, 9, 4, 4]}
    counters = {"under_way_us": 100, "bubble_us": 50}
    both = [worker("d1", **ranks, rank_wait_us=[5, 1, 8, 8], counters=counters), worker("d2")]
    found = shown(both, [])["workers"]
    assert found[0]["ranks"] == f"ranks 2 x 2 stages, slowest 1, bubbles 25{NBSP}%"
    assert "ranks" not in found[1]
    assert not {"rank_busy_us", "rank_wait_us"} & found[0].keys()


def test_the_page_gets_no_field_that_it_does_not_show() -> None:
    start_ms = {"process": 900, "weights": 8100, "warm_up": 1500}
    workers = [worker("d1", counters={}, pid=1, step_ms=21.23456789, start_ms=start_ms)]
    found = shown(workers, [])
    started = "Started in 10 s: weights 8.1 s, warm up 1.5 s, process 0.9 s".replace(
        " s", NBSP + "s"
    )
    assert found["workers"] == [worker("d1", step_ms=21.23, reported_us=None, started=started)]
    assert (found["cluster"], found["offers"]) == ("prod", ["fleet"])
    assert {"hosts", "keys", "pools", "routers", "store"}.isdisjoint(found)
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


def key(name: str, accepted: int = 0, **numbers: int) -> dict[str, Any]:
    none = dict.fromkeys(
        ("limited", "invalid", "refused", "left", "ended", "good", "waiting", "late"), 0
    )
    return {"name": name, "accepted": accepted, **none, **numbers}


def test_the_keys_with_the_most_trouble_come_first() -> None:
    keys = [key(f"calm-{i}", 100 - i) for i in range(6)]
    flood = key("flood", 5, limited=944, waiting=2)
    slow = key("slow", 50, invalid=4, ended=40, good=10, late=3, left=1, refused=2)
    assert part("door", keys=[*keys, flood, slow]) == [
        ["flood", "flood", 5, 0, 944, 0, 0, 0, 2],
        ["slow", "slow", 50, 4, 0, 2, 1, 33, 0],
        ["calm-0", "calm-0", 100, 0, 0, 0, 0, 0, 0],
        ["calm-1", "calm-1", 99, 0, 0, 0, 0, 0, 0],
        ["calm-2", "calm-2", 98, 0, 0, 0, 0, 0, 0],
        ["", "3 other keys", 288, 0, 0, 0, 0, 0, 0],
    ]
    assert part("door", keys=[key("", 7)]) == [["", "without a key", 7, 0, 0, 0, 0, 0, 0]]


def test_a_store_a_router_and_a_log_that_are_away_are_told() -> None:
    routers = [
        {"name": "router a", "state": "serving", "since_us": None},
        {"name": "router b", "state": "silent", "since_us": 5},
    ]
    store = {"trouble": "the store does not answer", "since_us": 4}
    logs = [{"process": "decode-1", "lost": 12, "since_us": 6}]
    tiers = [{"worker_id": "decode-1", "tier": "disk", "failures": 3, "since_us": 7}]
    apart = [
        {"prefill": f"prefill-{i}", "decode": "decode-1", "reason": f"{i}", "since_us": 8}
        for i in (1, 2)
    ]
    shown = part("outages", store=store, routers=routers, logs=logs, tiers=tiers, apart=apart)
    assert shown == [
        ("Store", "the store does not answer; requests go on with the workers last known.", 4),
        ("Router", "router b is silent: it was killed, or it hangs.", 5),
        ("Log", "decode-1 cannot write its log: 12 lines lost; it serves on.", 6),
        ("Tier", "decode-1: 3 blocks failed in its disk tier; it serves on.", 7),
        (
            "Pair",
            "prefill-1 cannot hand over to decode-1 (and 1 more pair): 1; requests use other "
            "pairs, or decode workers compute the prompts.",
            8,
        ),
    ]
    assert part("outages", store={"trouble": None, "since_us": None}, routers=routers[:1]) == []


def test_the_history_is_a_whole_hour_also_after_a_start() -> None:
    values = {"goodput": [1.0, 0.123456], "ttft_p50_ms": [None, 7.0]}
    found = part("history", history={"start_us": NOW_US, "step_ms": 30_000, **values})
    assert len(found["goodput"]) == len(found["ttft_p50_ms"]) == 121
    assert found["goodput"][-3:] == [None, 1.0, 0.1235]
    assert found["start_us"] == NOW_US - 119 * 30_000_000
    assert part("history")["goodput"] == [None] * 121


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
