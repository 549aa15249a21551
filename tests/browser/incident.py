"""The incident that the dashboard's design is drawn with: prefill is short since a worker was lost.

Times are seconds before `now_us`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

POINTS, STEP_MS = 121, 30_000
LOST_S = 1170
OFFERS = ["cache", "doctor", "fleet", "requests"]


def condition(
    state: str, since_us: int, reason: str | None = None, cause: str | None = None
) -> Any:
    """A worker's condition, as `/fleet` shows it."""
    return {
        "state": state, "cause": cause, "reason": reason, "since_us": since_us,
        "is_replaced": False,
    }  # fmt: skip


def worker(now_us: int, worker_id: str, **fields: Any) -> dict[str, Any]:
    """A ready worker with some load, unless `fields` say otherwise."""
    role = "decode" if "decode" in worker_id else "prefill"
    usual = {
        "worker_id": worker_id, "role": role, "state": "ready", "model": "Qwen3-32B",
        "connected": True, "reported_us": now_us, "num_waiting": 0, "num_running": 2,
        "queued_tokens": 0, "blocks_total": 16_384, "blocks_used": 4000, "blocks_cached": 8000,
        "step_ms": None, "tokens_per_s": 14_900.0, "max_batch_size": 64,
        "condition": condition("usable", now_us),
    }  # fmt: skip
    return usual | fields


def ramp(before: float, after: float) -> list[float]:
    """A series that goes from one level to another since the loss, with some noise."""
    lost_at = POINTS - 1 - LOST_S * 1000 / STEP_MS
    found = []
    for i in range(POINTS):
        part = min(1.0, max(0.0, (i - lost_at) / 30))
        noise = 0.02 * math.sin(i * 1.7) * math.sin(i * i * 0.37)
        found.append((before + (after - before) * part) * (1 + noise))
    return found


def fleet(now_us: int) -> dict[str, Any]:
    """The event `fleet`."""
    at = _clock(now_us)
    return {
        "cluster": "prod",
        "offers": OFFERS,
        "pressure": {
            "prefill": 1.42, "decode": 0.74, "predicted_ttft_ms": 1420, "predicted_step_ms": 22.3,
            "prefill_state": "short", "decode_state": "has room", "verdict": "Prefill is short",
            "cause": "A prompt that arrives now gets its first token after 1.42 s (p95).",
            "since_us": at(LOST_S), "tone": "bad", "rule": "pool_balance",
            "findings": 2,
        },
        "totals": {
            "goodput": 0.714, "requests_per_s": 18.5, "good_requests_per_s": 13.2,
            "ttft_p95_ms": 1480, "tpot_p95_ms": 23.4, "num_inflight": 168,
            "output_tokens_per_s": 6710, "bytes_moved_per_s": 8.17e9,
        },
        "targets": {"ttft_target_ms": 1000, "tpot_target_ms": 30, "goodput_target": 0.95},
        "workers": _workers(now_us),
        "pairs": _pairs(),
        "history": _history(now_us),
        "events": _events(now_us),
    }  # fmt: skip


def _workers(now_us: int) -> list[dict[str, Any]]:
    at = _clock(now_us)
    decode = {"num_running": 36, "tokens_per_s": 1607.0, "step_ms": 22.4}
    return [
        worker(
            now_us, "prefill-1", num_waiting=9, queued_tokens=15_200,
            start_ms={"process": 900, "weights": 8100, "warm_up": 1500},
        ),
        worker(now_us, "prefill-2", num_waiting=8, queued_tokens=13_800, blocks_used=3600),
        worker(
            now_us, "prefill-3", state="lost", connected=False, requests_moved=31,
            condition=condition("lost", at(LOST_S), "its lease ended", "lost"),
        ),
        worker(
            now_us, "prefill-4", state="loading", connected=False, reported_us=0,
            condition=condition("starting", at(51), "it loads its weights"), last_load_ms=74_000,
        ),
        worker(now_us, "decode-1", **decode, blocks_used=8000, blocks_cached=7000),
        worker(now_us, "decode-2", **decode, blocks_used=11_500, blocks_cached=4500),
        worker(now_us, "decode-3", **decode, blocks_used=6900, blocks_cached=8000),
        worker(
            now_us, "decode-4", state="draining", num_running=7, blocks_used=1560,
            drain_deadline_us=at(-18), condition=condition("draining", at(12)),
        ),
        worker(now_us, "decode-5", **decode, reported_us=at(7), blocks_used=8000),
    ]  # fmt: skip


def pair(prefill: str, decode: str, **fields: Any) -> dict[str, Any]:
    """A pair whose blocks go over RDMA, unless `fields` say otherwise."""
    usual = {
        "prefill": prefill, "decode": decode, "path": "RDMA", "expected_path": "RDMA",
        "bytes_per_s": 1.2e9, "busy_bytes_per_s": 38e9, "is_below_way": False, "failures": 0,
        "exposed_p95_ms": 3.1,
    }  # fmt: skip
    return usual | fields


def _pairs() -> list[dict[str, Any]]:
    slow = {
        "path": "TCP", "bytes_per_s": 0.41e9, "busy_bytes_per_s": 2.2e9, "exposed_p95_ms": 418.0,
    }  # fmt: skip
    return [
        pair(f"prefill-{p}", f"decode-{d}", **(slow if d == 3 else {}))
        for p in (1, 2)
        for d in (1, 2, 3, 5)
    ]


def _history(now_us: int) -> dict[str, Any]:
    at = _clock(now_us)
    return {
        "start_us": at((POINTS - 1) * STEP_MS // 1000), "step_ms": STEP_MS,
        "goodput": [min(1.0, each) for each in ramp(0.98, 0.72)],
        "ttft_p50_ms": ramp(300, 690), "ttft_p95_ms": ramp(610, 1460),
        "tpot_p50_ms": ramp(20, 20), "tpot_p95_ms": ramp(24, 23.4),
        "queue_p95_ms": ramp(41, 914),
    }  # fmt: skip


def _events(now_us: int) -> list[dict[str, Any]]:
    at = _clock(now_us)
    return [
        {"at_us": at(2797), "kind": "rollout", "worker_id": None, "text": "Rollout of 9a40"},
        {
            "at_us": at(LOST_S), "kind": "lost", "worker_id": "prefill-3",
            "text": "prefill-3 lost: its lease ended. 31 requests moved, 0 failed",
        },
        {"at_us": at(212), "kind": "drain", "worker_id": "decode-4", "text": "It drains"},
        {"at_us": at(51), "kind": "joined", "worker_id": "prefill-4", "text": "It loads"},
    ]  # fmt: skip


def _clock(now_us: int) -> Callable[[int], int]:
    """A function that returns the time of so many seconds ago."""
    return lambda seconds: now_us - seconds * 1_000_000


def doctor(now_us: int) -> dict[str, Any]:
    """The event `doctor`, with the findings in the router's order."""
    return {
        "window_s": 600,
        "checked_us": now_us,
        "findings": [
            {
                "rule": "pool_balance", "urgency": "urgent",
                "since_us": now_us - LOST_S * 1_000_000, "stages": ["queue"],
                "title": "Prefill is short: two workers do the work of three",
                "text": ["Requests wait in front of prefill.", "<b>28.6 %</b> miss a target."],
                "evidence": {
                    "kind": "queue before prefill, median", "unit": "ms",
                    "bars": [
                        {"name": "prefill-1", "value": 914.2, "is_flagged": False},
                        {"name": "prefill-2", "value": 871.0, "is_flagged": False},
                    ],
                    "numbers": [
                        {"name": "queue p95", "value": "914 ms"},
                        {"name": "prefill", "value": "1.42×"},
                    ],
                },
                "changes": [
                    {
                        "setting": "chunk_max_tokens", "scope": "prefill", "old": 512,
                        "new": 1024, "live": True, "text": "If prefill-4 does not come up.",
                        "predicted": {"prefill": 1.19, "decode": 0.83},
                    }
                ],
            },
            {
                "rule": "slow_link", "urgency": "soon", "since_us": now_us - 2_400_000_000,
                "stages": ["transfer"],
                "title": "Blocks for decode-3 go over TCP instead of RDMA",
                "text": ["Each request on decode-3 waits 418 ms (p95) for blocks."],
                "evidence": {
                    "kind": "rate of a transfer while it runs, median", "unit": "GB/s",
                    "bars": [
                        {"name": "→ decode-1", "value": 38.1, "is_flagged": False},
                        {"name": "→ decode-3", "value": 2.2, "is_flagged": True},
                    ],
                    "numbers": [{"name": "not hidden, p95", "value": "418 ms"}],
                },
                "changes": [
                    {
                        "setting": "UCX_TLS", "scope": "decode-3", "old": "tcp,cuda_copy",
                        "new": "rc,cuda_copy,cuda_ipc,tcp", "live": False, "predicted": None,
                        "text": "In the environment of decode-3. Drain it first.",
                    }
                ],
            },
        ],
        "passed": [
            {"rule": "stalls", "title": "Periodic stalls", "text": "0.3 % of steps"},
            {"rule": "targets", "title": "Wrong targets", "text": "TPOT met with 22 % to spare"},
        ],
    }  # fmt: skip


def cache(now_us: int) -> dict[str, Any]:
    """The event `cache`."""
    sizes = (0.25, 0.35, 0.5, 0.7, 0.85, 1, 1.2, 1.5, 2, 2.8, 4)
    misses = (0.71, 0.64, 0.55, 0.475, 0.435, 0.405, 0.372, 0.335, 0.298, 0.268, 0.252)
    names = [f"prefill-{i}" for i in (1, 2)] + [f"decode-{i}" for i in (1, 2, 3, 5)]
    return {
        "tokens_per_s": {
            "computed": 27_700, "prefix_hit_prefill": 25_000, "prefix_hit_decode": 14_900,
        },
        "workers": [
            {
                "worker_id": name, "role": name.partition("-")[0],
                "hit_rate": 0.44 if name == "decode-2" else 0.71,
                "hit_rate_history": ramp(0.7, 0.44 if name == "decode-2" else 0.71),
                "blocks_cached": 9000, "evictions_per_s": 312 if name == "decode-2" else 12,
            }
            for name in names
        ],
        "prefixes": [
            {
                "hash": "9d41c07e55", "num_tokens": 1536, "num_blocks": 96, "hits_per_min": 412,
                "tokens_saved_per_min": 632_832, "workers": ["prefill-1", "decode-1"],
            }
        ],
        "miss_curve": {
            "blocks_now": 109_568, "sample_rate": 1 / 64,
            "points": [
                {"blocks": size * 109_568, "miss_ratio": miss, "prefill_pressure": miss * 3.5}
                for size, miss in zip(sizes, misses, strict=True)
            ],
        },
        "evictions_history": ramp(23, 312)[::2], "history_end_us": now_us,
    }  # fmt: skip
