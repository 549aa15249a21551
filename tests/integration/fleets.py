"""Real fleets for tests: started, watched, and checked to leave nothing behind."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import psutil

from bench.tools import worker_apart
from cli.fleet import Fleet
from cli.up_settings import UpSettings
from tests.forked import KNOWN_CHECKPOINT, ForkedChildren, fork_context
from tests.http_client import HTTP
from tests.integration.reference import DEMO_MODEL, Reference

SHARED_MEMORY = Path("/dev/shm")
POLL_S, LONGEST_PAUSE_S = 0.04, 0.15
"""Between two looks over HTTP, which would else keep a core busy: at first, and in a long wait."""
PAUSE = threading.Event()
SHOWN_LINES = 40
T = TypeVar("T")
SETTINGS: dict[str, Any] = {
    "model": str(DEMO_MODEL),
    "port": 0,
    "num_blocks": 2048,
    "torch_threads": 1,
    "pin": False,
    "device": "cpu",
    "restart": False,
    "startup_timeout_s": 120.0,
    "stop_grace_s": 60.0,
}
"""Of every fleet of tests, unless a test says otherwise."""
PROMPT_REPORTS = {"BATON_STATS_INTERVAL_MS": "20", "BATON_STATS_IDLE_MS": "100"}
"""For fleets that tests wait for: what is at rest says so soon."""
PATIENCE = {
    "BATON_LEASE_S": "20",
    "BATON_SILENCE_S": "20",
    "BATON_PEER_SILENCE_S": "60",
    "BATON_FIRST_TOKEN_WAIT_S": "60",
    "BATON_GRANT_TTL_MS": "20000",
}
"""For fleets in which nobody dies: a busy machine may keep a process waiting for seconds."""


def wait_for(what: str, check: Callable[[], T | None], timeout_s: float = 60.0) -> T:
    """The first result of `check` that is not None or False. Raises AssertionError after
    `timeout_s`."""
    deadline, pause_s = time.monotonic() + timeout_s, POLL_S
    while True:
        result = check()
        if result:
            return result
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what}"
        PAUSE.wait(pause_s)
        pause_s = min(1.1 * pause_s, LONGEST_PAUSE_S)


@contextmanager
def running_fleet(
    environment: Mapping[str, str] | None = None, *, module: str | None = None, **settings: Any
) -> Iterator[Fleet]:
    """A fleet on the demo model on a free port; checked to be clean at its end.

    `environment` reaches its processes, for settings that `baton up` has not; `module` runs workers
    in the place of `cli.main`.
    """
    before = our_processes()
    chosen = UpSettings(**(SETTINGS | settings))
    environ = {**os.environ, KNOWN_CHECKPOINT: chosen.model, **PROMPT_REPORTS, **PATIENCE}
    environ |= environment or {}
    named = frozenset(SETTINGS | settings)
    children = ForkedChildren(chosen, named, environ, module=module)
    with Fleet(chosen, children) as fleet, logs_on_failure(fleet):
        yield fleet
        assert_idle(fleet)
        segments = segments_of(fleet)
        shares_ranks = has_ranks(chosen) and module != worker_apart.__name__
        is_shared = chosen.transport in ("auto", "shm") or shares_ranks
        assert shares_memory(fleet) == is_shared, "whether pools lie in memory without a name"
        exits = fleet.processes
        fleet.stop()
        assert {name: child.exit_status() for name, child in exits.items()} == dict.fromkeys(
            exits, 0
        ), "a process did not stop in order"
    assert_no_other_processes(before)
    left = [path for path in segments if path.exists()]
    assert not left, "shared memory was left behind"


def has_ranks(settings: UpSettings) -> bool:
    """Whether the model of some worker is split over processes."""
    return any(
        getattr(settings, f"{role}_{kind}_parallel") > 1
        for role in ("prefill", "decode")
        for kind in ("tensor", "pipeline")
    )


def rank_settings(prefill: tuple[int, int], decode: tuple[int, int]) -> dict[str, int]:
    """The settings of a fleet whose workers of each role have this many ranks of each layer, and
    stages."""
    return {
        "prefill_tensor_parallel": prefill[0],
        "prefill_pipeline_parallel": prefill[1],
        "decode_tensor_parallel": decode[0],
        "decode_pipeline_parallel": decode[1],
    }


@contextmanager
def logs_on_failure(fleet: Fleet) -> Iterator[None]:
    """Prints how each process of a fleet fares, with the end of its log, when a test fails."""
    try:
        yield
    except BaseException:
        for name, child in fleet.processes.items():
            fares = "runs" if child.is_running() else child.ending()
            print(f"-- {name} {fares}; its log ends with\n{child.log_tail(SHOWN_LINES)}")
        raise


def workers(fleet: Fleet) -> dict[str, dict[str, Any]]:
    """The members in `GET /fleet`, by worker id; those that were lost are listed there, too."""
    shown = HTTP.get(f"{fleet.url}/fleet").raise_for_status().json()["workers"]
    listed = [each for each in shown if each["state"] != "lost"]
    return {each["worker_id"]: each for each in listed}


def all_counters(fleet: Fleet) -> dict[str, dict[str, int]]:
    """The counters by worker id, once all workers are idle. Missing ones of `COUNTERS` are 0."""
    assert_idle(fleet)
    missing = dict.fromkeys(COUNTERS, 0)
    return {name: missing | worker["counters"] for name, worker in workers(fleet).items()}


def counters(fleet: Fleet, worker_id: str) -> dict[str, int]:
    """One worker's counters, as in `all_counters`."""
    return all_counters(fleet)[worker_id]


COUNTERS = (
    "prefill_tokens",
    "decode_tokens",
    "cached_tokens",
    "blocks_sent",
    "blocks_received",
    "handoffs",
    "frames_refused",
    "stale_messages",
)
GAUGES = ("num_waiting", "num_running", "queued_tokens", "blocks_used", "num_handoffs")


def assert_idle(fleet: Fleet) -> None:
    """Every counter of what is under way comes to zero, on every worker and in the router.

    Only reports that were made after this call count.
    """
    called_us = time.time_ns() // 1000
    deadline = time.monotonic() + 60.0
    while left := _under_way(fleet, called_us):
        assert time.monotonic() < deadline, f"still under way: {left}"
        PAUSE.wait(POLL_S)


def _under_way(fleet: Fleet, since_us: int) -> dict[str, Any]:
    shown: dict[str, Any] = {}
    for name, worker in workers(fleet).items():
        if worker["reported_us"] <= since_us:
            shown[f"{name}.report"] = "is old"
        shown |= {f"{name}.{gauge}": worker[gauge] for gauge in GAUGES if worker[gauge]}
    if shown:
        return shown
    metrics = HTTP.get(f"{fleet.url}/metrics").raise_for_status().text
    for line in metrics.splitlines():
        name, _, value = line.rpartition(" ")
        is_gauge = re.match(r"baton_(inflight|http_requests_in_flight)", name)
        if is_gauge and '"/metrics"' not in name and float(value):
            shown[name] = value
    return shown


def trace_of(fleet: Fleet, request_id: str) -> dict[str, Any]:
    """The trace of a finished request, once its prefill worker has reported the end.

    The prefill worker sends the first token, so an output of one token may end before any block is
    granted. Ask for two tokens if the test looks at blocks.
    """

    def complete() -> dict[str, Any] | None:
        trace = HTTP.get(f"{fleet.url}/requests/{request_id}/trace").raise_for_status().json()
        last = trace["attempts"][-1]
        if last["decode"] is None or trace["outcome"] == "running":
            return None
        prefill = last["prefill"]
        granted = last["decode"]["granted_blocks"]
        done = last["mode"] == "local" or (prefill and prefill["blocks_moved"] == granted)
        return trace if done else None

    return wait_for(f"the trace of {request_id}", complete)


def complete(fleet: Fleet, prompt: list[int] | list[list[int]], **fields: Any) -> dict[str, Any]:
    """A completion of token ids, or of several prompts, greedy unless `fields` say otherwise; the
    JSON answer."""
    body = {
        "model": DEMO_MODEL.name,
        "prompt": prompt,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **fields,
    }
    answer = HTTP.post(f"{fleet.url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()


def complete_all(
    fleet: Fleet, references: list[Reference], max_tokens: int, at_once: int
) -> list[list[int]]:
    """The greedy tokens after each prompt, `at_once` requests at a time."""

    def run(reference: Reference) -> list[int]:
        answer = complete(fleet, list(reference.prompt), max_tokens=max_tokens)
        return list(answer["choices"][0]["token_ids"])

    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(run, references))


def assert_as_expected(references: list[Reference], outputs: list[list[int]]) -> None:
    """Each output is the one of its reference."""
    wrong = [
        len(reference.prompt)
        for reference, output in zip(references, outputs, strict=True)
        if output != list(reference.output)
    ]
    assert wrong == [], "prompt lengths whose tokens differ"


def our_processes() -> set[int]:
    """Processes that this one has started, directly or not, and that run; the fork server, which
    stays, among them."""
    fork_context()
    return {child.pid for child in psutil.Process().children(recursive=True)}


def assert_no_other_processes(known: set[int]) -> None:
    """Assert that no process runs that is not in `known`. Waits for processes that end by
    themselves soon."""
    wait_for("processes that were left behind to end", lambda: our_processes() <= known)


def segments_of(fleet: Fleet) -> set[Path]:
    """Files in shared memory that the fleet's processes have mapped: UCX makes some."""
    return {path for path in _mapped(fleet) if path.is_relative_to(SHARED_MEMORY)}


def shares_memory(fleet: Fleet) -> bool:
    """Whether a process of the fleet has mapped a pool of the transport shm."""
    return any(path.name.startswith("memfd:baton-kv") for path in _mapped(fleet))


def _mapped(fleet: Fleet) -> set[Path]:
    return {path for child in fleet.processes.values() for path in mapped_by(child.pid)}


def mapped_by(pid: int) -> set[Path]:
    """The files that a process has mapped."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    named = [fields[5] for line in lines if len(fields := line.split(None, 5)) > 5]
    return {Path(each.removesuffix(" (deleted)")) for each in named}
