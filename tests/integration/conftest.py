"""What the tests with real processes share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from kv_transfer.transports.registry import create_transport
from tests.effort import times
from tests.integration.control_bench import Bench
from tests.integration.reference import Reference, load_references
from tests.integration.transport_workers import TransportWorker, Worker, files_of


@pytest.fixture(scope="session")
def references() -> list[Reference]:
    """Prompts of all lengths, and their greedy continuations by transformers; one of each length,
    nightly two."""
    return load_references()[:: times(2, 1)]


@pytest.fixture
def bench() -> Iterator[Bench]:
    """Control servers and whatever connects to them."""
    made = Bench()
    yield made
    made.close()


@pytest.fixture(params=["nixl", "shm"])
def spawn(request: pytest.FixtureRequest) -> Iterator[Callable[..., Worker]]:
    """Start workers of a kind; all are gone, with all their files, after the test."""
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
        create_transport("shm", "cpu").close()  # sweeps what the killed ones left
        left = [file for worker in workers if worker.agent for file in files_of(worker.agent)]
        assert left == []
    finally:
        for worker in workers:
            if worker.process._popen is not None and worker.process.is_alive():
                worker.process.kill()
