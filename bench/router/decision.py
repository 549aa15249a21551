"""What one decision costs the router's event loop at the largest prompts and fleets, in process.

Every worker holds the whole prompt, so that every look-up goes to its end. Hashing, which a thread
does, is measured apart.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable

from rich.table import Table

from protocol.events import WorkerStats
from protocol.hashing import block_hashes, chain_root
from protocol.messages import CacheDump, Role
from protocol.registration import WorkerInfo, WorkerState
from router.routing.caches.cache_index import CacheIndex
from router.routing.decision import Query, apply, decide
from router.routing.fleet_view import FleetView
from router.routing.worker_view import Liveness, WorkerView

BLOCK_SIZE = 16
NUM_WORKERS = 100
PREFILL_SHARE = 0.25
SIZES = (1000, 32_000, 128_000)
ROUNDS = 50
_EXPECTED_S = 10.0


def decision_costs() -> Table:
    """A table: milliseconds of a decision, and of hashing, by the length of the prompt."""
    table = Table(title=f"one decision among {NUM_WORKERS} workers that hold the whole prompt")
    table.add_column("prompt, tokens", justify="right")
    table.add_column("decision, ms", justify="right")
    table.add_column("hashing in a thread, ms", justify="right")
    for num_tokens in SIZES:
        decision_ms, hashing_ms = measure(num_tokens)
        table.add_row(f"{num_tokens:,}", f"{decision_ms:.2f}", f"{hashing_ms:.2f}")
    return table


def measure(num_tokens: int, num_workers: int = NUM_WORKERS) -> tuple[float, float]:
    """Medians of the milliseconds of a decision and of hashing."""
    tokens = list(range(num_tokens))
    root = chain_root("model")
    hashes = block_hashes(root, tokens, BLOCK_SIZE)
    view = FleetView(CacheIndex(_EXPECTED_S))
    for number in range(num_workers):
        worker = _worker(number, num_workers)
        view.join(worker)
        dump = CacheDump(incarnation=worker.info.incarnation, seq=0, hashes=hashes)
        view.index.apply_dump(worker.worker_id, dump)
    while view.index.tidy(time.monotonic()):
        pass  # long dumps are taken in slices
    rng = random.Random(1)
    query = Query(
        num_tokens=num_tokens, max_tokens=num_tokens + 100, block_size=BLOCK_SIZE, hashes=hashes
    )

    def place() -> None:
        now = time.monotonic()
        for owner, reservation in apply(view, decide(view, query, now, rng), now):
            owner.release(reservation)

    return _median_ms(place), _median_ms(lambda: block_hashes(root, tokens, BLOCK_SIZE))


def _median_ms(work: Callable[[], object]) -> float:
    work()
    times = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return 1e3 * statistics.median(times)


def _worker(number: int, num_workers: int) -> WorkerView:
    is_prefill = number < PREFILL_SHARE * num_workers
    name = f"w{number}"
    info = WorkerInfo(
        worker_id=name, incarnation=name, role=Role.PREFILL if is_prefill else Role.DECODE,
        state=WorkerState.READY, host="", pid=1, control="", events="", protocol_version=0,
        model="", model_fingerprint="", layout_fingerprint="", transport="",
        block_size=BLOCK_SIZE, num_blocks=100_000, max_context=1_000_000,
    )  # fmt: skip
    worker = WorkerView(info, Liveness.ANSWERS)
    worker.take_stats(
        WorkerStats(
            worker_id=name, incarnation=name, num_waiting=0, num_running=number, queued_tokens=0,
            blocks_total=100_000, blocks_used=10 * number, blocks_cached=0,
            step_fixed_us=5000, step_per_token_us=50, step_per_attended_us=0.01,
            counters={"prefill_tokens": 10**6, "steps": 10**6, "step_us": 10**9},
        )
    )  # fmt: skip
    return worker
