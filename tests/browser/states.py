"""Staged states of a fleet in trouble: what an operator meets, with the names that pods have,
or short ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from protocol.traces import ChunkSpan, DecodeTrace, PrefillTrace, StepSpan, WriteSpan, pack_steps
from router.requests.trace import AttemptTrace, RequestTrace
from router.requests.trace_json import row_json, trace_json
from router.routing.placement import Candidate, Mode, Placement
from tests.browser import incident

Name = Callable[[str, int], str]
"""A worker's name, from its role and number."""
VIEWS = ("fleet", "requests", "doctor", "cache")


def pod(role: str, number: int) -> str:
    """A name as long as those that Kubernetes gives."""
    return f"production-eu1-baton-{role}-h100-6d9f7c5b8-x{number:04}"


def short(role: str, number: int) -> str:
    """A name as `baton up` gives it."""
    return f"{role}-{number}"


def pods(now_us: int, prefill: int = 4, decode: int = 5) -> dict[str, Any]:
    """A busy fleet of pods, of which one of each role gets no requests."""
    fleet = incident.fleet(now_us)
    senders, takers = ([pod(role, i) for i in range(n)] for role, n in _counts(prefill, decode))
    busy = {"num_running": 2, "num_waiting": 19, "queued_tokens": 115_200}
    full = {"num_running": 64, "num_waiting": 76, "step_ms": 122.4, "tokens_per_s": 11_607.0}
    workers = [incident.worker(now_us, name, **busy) for name in senders]
    workers += [incident.worker(now_us, name, **full) for name in takers]
    workers[0]["condition"] = incident.condition(
        "refused", now_us - 200_000_000, cause="other_model",
        reason="it serves 'Qwen3-8B-Instruct', and its configuration or tokenizer is not that of "
        "this router's 'Qwen3-32B'",
    )  # fmt: skip
    workers[-1]["condition"] = incident.condition(
        "not connected",
        now_us - 90_000_000,
        cause="address",
        reason="it is registered at tcp://10.244.113.207:41317 and has not answered there for 5 s",
    )
    workers[-2]["reported_us"] = now_us - 61_000_000
    workers[1] |= {
        "state": "loading",
        "condition": incident.condition("starting", now_us - 51_000_000, "it loads its weights"),
        "last_load_ms": 74_000,
    }
    pairs = [
        incident.pair(p, d, path="TCP" if i == j else "RDMA")
        for i, p in enumerate(senders[2:])
        for j, d in enumerate(takers)
    ]
    return {**fleet, "workers": workers, "pairs": pairs}


def _counts(prefill: int, decode: int) -> tuple[tuple[str, int], tuple[str, int]]:
    return ("prefill", prefill), ("decode", decode)


def flooded(now_us: int) -> dict[str, Any]:
    """A key that floods the door, while the store, a router and a log are away."""
    numbers = ("accepted", "limited", "invalid", "refused", "left", "ended", "good", "waiting")
    keys = [
        ("crawler", 12, 944, 0, 0, 3, 12, 12, 2, 0),
        ("chat", 1204, 0, 7, 2, 1, 1200, 1137, 9, 2),
    ]
    return {
        **incident.fleet(now_us),
        "keys": [dict(zip(("name", *numbers, "late"), each, strict=True)) for each in keys],
        "store": {
            "trouble": "redis at 10.244.0.7:6379 does not answer",
            "since_us": now_us - 9_000_000,
        },
        "routers": [{"name": "router-7c9", "state": "silent", "since_us": now_us - 65_000_000}],
        "logs": [{"process": "decode-1", "lost": 12, "since_us": now_us - 5_000_000}],
    }


def no_decode_left(now_us: int) -> dict[str, Any]:
    """Every decode worker is lost, and every request is refused."""
    fleet = incident.fleet(now_us)
    lost = incident.condition("lost", now_us - 12_000_000, "its connection broke", "lost")
    for worker in fleet["workers"]:
        if worker["role"] == "decode":
            worker |= {"state": "lost", "condition": lost, "requests_moved": 0}
    names = (
        "accepted",
        "limited",
        "invalid",
        "refused",
        "left",
        "ended",
        "good",
        "waiting",
        "late",
    )
    refused = {"name": "", **dict.fromkeys(names, 0), "refused": 450}
    verdict = {
        "verdict": "No decode worker is left", "tone": "bad", "rule": "pools",
        "cause": "All 5 decode workers are lost, so every request is refused.",
        "decode": None, "decode_state": None, "since_us": now_us - 12_000_000,
    }  # fmt: skip
    return {**fleet, "keys": [refused], "pressure": fleet["pressure"] | verdict}


def no_point_yet(now_us: int) -> dict[str, Any]:
    """A fleet whose router has just started: charts without a point."""
    fleet = incident.fleet(now_us)
    series = {name: [] for name in fleet["history"] if name not in ("start_us", "step_ms")}
    totals = dict.fromkeys(fleet["totals"]) | {"num_inflight": 0}
    history = {**series, "start_us": None, "step_ms": 30_000}
    return {**fleet, "history": history, "totals": totals, "events": []}


def slow_request(now_us: int, name: Name = pod) -> RequestTrace:
    """A request of a quarter of a minute: stages of 10 s and more."""
    since, prefill, decode = now_us - 60_000_000, name("prefill", 2), name("decode", 3)

    def at(ms: float) -> int:
        return since + round(ms * 1000)

    trace = RequestTrace("chatcmpl-7f3ca1d2" + "0" * 24 + "-0", since, 31_800, at(41.2))
    chunks = tuple(ChunkSpan(at(12_400 + 400 * i), at(12_790 + 400 * i), 2048) for i in range(16))
    writes = tuple(
        WriteSpan(each.end_us, each.end_us + 300_000, 128, i) for i, each in enumerate(chunks)
    )
    steps = [StepSpan(at(19_200 + 130 * i), at(19_320 + 130 * i), 48) for i in range(90)]
    chosen = [
        Candidate(name(role, i), 16_000.0 + i, 10_000, 9_000, wait_ms=12_000.0, delay_ms=900.0)
        for role in ("prefill", "decode")
        for i in (2, 3)
    ]
    placement = Placement(
        Mode.REMOTE, chosen[3], chosen[0], "remote: no decode worker holds all but 512 tokens of "
        "the prompt", tuple(chosen[2:]), tuple(chosen[:2]), (),
    )  # fmt: skip
    trace.attempts = [
        AttemptTrace(
            1, placement, at(42.0), path="RDMA",
            prefill=PrefillTrace(
                worker_id=prefill, received_us=at(43.1), scheduled_us=at(12_399.8), cached_tokens=0,
                chunks=chunks, writes=writes, transport="nixl", blocks_moved=2048,
                bytes_moved=2048 << 18,
            ),
            decode=DecodeTrace(
                worker_id=decode, received_us=at(44), admitted_us=at(18_000), granted_blocks=2048,
                blocks_arrived_us=at(19_100), first_step_us=steps[0].start_us,
                finished_us=steps[-1].end_us, num_decode_steps=len(steps),
                steps_since_us=steps[0].start_us, steps=pack_steps(steps[0].start_us, steps),
            ),
        )
    ]  # fmt: skip
    trace.first_token_attempt = trace.attempts[0]
    trace.num_output_tokens, trace.key = 91, "batch-jobs-eu"
    trace.first_token_received_us, trace.first_token_us = at(18_792.3), at(18_793.9)
    trace.last_token_us = trace.finished_us = at(31_000)
    trace.outcome = "finished"
    return trace


def sources(now_us: int, name: Name = pod) -> dict[str, Any]:
    """Everything that the page reads about the slow request, for `staged`; the fleet is not
    included."""
    trace = slow_request(now_us, name)
    doctor = incident.doctor(now_us)
    for finding in doctor["findings"]:
        for bar in finding["evidence"]["bars"]:
            bar["name"] = name("prefill", 1)
    return {
        "doctor": doctor, "cache": _cache(now_us, name),
        "requests": {"rows": [row_json(trace, now_us)]}, "trace": trace_json(trace, now_us),
    }  # fmt: skip


def _cache(now_us: int, name: Name) -> dict[str, Any]:
    cache = incident.cache(now_us)
    for i, worker in enumerate(cache["workers"]):
        worker["worker_id"] = name(worker["role"], i)
    return cache
