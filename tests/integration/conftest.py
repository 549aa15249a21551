"""What the tests with real processes share."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator

import pytest

from process.store.embedded_valkey import EmbeddedValkey
from process.store.worker_lease import WorkerLease
from protocol.registration import WorkerInfo
from tests.effort import times
from tests.integration.control_bench import Bench
from tests.integration.lease_holder import LONG_S
from tests.integration.reference import Reference, load_references
from tests.integration.transport_workers import TransportWorker, Worker


@pytest.fixture(scope="session")
def references() -> list[Reference]:
    """Prompts of all lengths, and their greedy continuations by transformers; one of each length,
    nightly two."""
    return load_references()[:: times(2, 1)]


@pytest.fixture(scope="module")
def valkey() -> Iterator[EmbeddedValkey]:
    """A store for a module's tests."""
    with EmbeddedValkey() as running:
        yield running


@pytest.fixture
def cluster() -> str:
    """A cluster name that no other test has."""
    return uuid.uuid4().hex


@pytest.fixture
def leases(valkey: EmbeddedValkey, cluster: str) -> Iterator[Callable[..., WorkerLease]]:
    """Makes and starts leases, and closes them after the test. Checks that no thread is left.

    The leases last long, so that none expires on a busy machine; `renewed` renews them at once."""
    threads = threading.active_count()
    made: list[WorkerLease] = []

    def make(info: WorkerInfo, lease_s: float = LONG_S, **options: float) -> WorkerLease:
        lease = WorkerLease(valkey.url, cluster, info, lease_s, **options)
        made.append(lease)
        lease.start()
        return lease

    yield make
    for lease in made:
        lease.close()
    assert threading.active_count() == threads


@pytest.fixture
def bench() -> Iterator[Bench]:
    """Control servers and whatever connects to them."""
    made = Bench()
    yield made
    made.close()


@pytest.fixture(params=["nixl", "shm"])
def spawn(request: pytest.FixtureRequest) -> Iterator[Callable[..., Worker]]:
    """Start workers of a kind; all are gone after the test."""
    workers: list[Worker] = []

    def start(
        kind: type = TransportWorker, num_blocks: int = 16, block_bytes: int = 4096
    ) -> Worker:
        workers.append(Worker(kind, request.param, num_blocks, block_bytes))
        return workers[-1]

    try:
        yield start
        for worker in workers:
            worker.end()
    finally:
        for worker in workers:
            if worker.process._popen is not None and worker.process.is_alive():
                worker.process.kill()
