"""A router without a gateway, assembled as `router_process.main` does, over fake workers."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable

import zmq.asyncio
from prometheus_client import CollectorRegistry

from console.telemetry.caches.cache_report import CacheReport
from console.telemetry.fleet_report import FleetReport
from console.telemetry.targets import Targets
from http_kit.door import Door
from process.sockets.encrypted_sockets import Network
from protocol.events import WorkerStats
from protocol.messages import (
    PROTOCOL_VERSION,
    AttemptFailed,
    FinishReason,
    Generate,
    Hello,
    Ping,
    Role,
)
from protocol.registration import WorkerInfo
from protocol.sampling import PromptLogprobs, SamplingParams
from router.fleet.fleet import Fleet
from router.fleet.history import FleetHistory
from router.fleet.link import LinkTimes, WorkerLink
from router.metrics import FleetMetrics
from router.requests.dispatcher import Dispatcher
from router.requests.interface import GenerationRequest, TokenDelta
from router.requests.trace_store import TraceStore
from router.routing.caches.cache_index import CacheIndex
from router_process.settings import RouterSettings
from tests.unit.router.fake_worker import SECRET, WAIT_S, FakeWorker


class Harness:
    """`workers` live in `fleet`; `dispatcher` generates."""

    def __init__(self, unreachable_s: float = 60.0, **settings) -> None:
        self._unreachable_s = unreachable_s
        known = {
            "model": "unused",
            "redis_url": "redis://unused",
            "cluster_secret": SECRET,
            "retry_backoff_ms": 1.0,
            "ping_interval_s": 0.05,
            "silence_s": 60.0,
        }
        self.settings = RouterSettings(**(known | settings))
        self.registry = CollectorRegistry()
        self.metrics = FleetMetrics(self.registry)
        self.network = Network(SECRET)
        self.workers_network = Network(SECRET, zmq.asyncio.Context())
        self.index = CacheIndex(10.0)
        clock = itertools.count(1_000_000, 1000)
        self.history = FleetHistory(lambda: next(clock))
        self.fleet = Fleet(self._connect, self.index, self.metrics, time.monotonic, self.history)
        self.traces = TraceStore(self.settings.trace_history, self.metrics, lambda: next(clock))
        self.door = Door(time.monotonic)
        self.report = FleetReport(
            self.fleet, self.traces, Targets.of(self.settings), door=self.door
        )
        self.cache = CacheReport(self.fleet, self.traces)
        self.dispatcher = Dispatcher(
            self.settings,
            self.fleet,
            self.traces,
            self.metrics,
            random.Random(7),
            self.cache.placed,
        )
        self.fleet.listen(self.dispatcher)
        self.workers: dict[str, FakeWorker] = {}
        self.ever: list[FakeWorker] = []

    def _connect(self, info: WorkerInfo, callbacks) -> WorkerLink:
        hello = Hello(
            sender="router",
            role=Role.ROUTER,
            protocol_version=PROTOCOL_VERSION,
            model_fingerprint=info.model_fingerprint,
            layout_fingerprint="",
        )
        settings = self.settings
        times = LinkTimes(settings.ping_interval_s, settings.silence_s, self._unreachable_s)
        return WorkerLink(self.network, info, hello, callbacks, times, self.metrics)

    def make(self, worker_id: str, **info) -> FakeWorker:
        """A worker that is not a member yet; its id starts with its role's letter."""
        role = Role.PREFILL if worker_id.startswith("p") else Role.DECODE
        worker = FakeWorker(self.workers_network, worker_id, role, **info)
        self.ever.append(worker)
        return worker

    async def join(self, *worker_ids: str, **info) -> list[FakeWorker]:
        """Add workers and wait until they take requests and their cache is known."""
        made = [self.make(each, **info) for each in worker_ids]
        self.workers.update({each.info.worker_id: each for each in made})
        self.refresh()
        await until(lambda: all(self.is_usable(each) for each in worker_ids))
        return made

    def is_usable(self, worker_id: str) -> bool:
        self.fleet.view()
        worker = self.fleet.worker(worker_id)
        return worker is not None and worker.takes_requests

    def refresh(self) -> None:
        """Report the workers as the membership's watcher would."""
        self.fleet.update({each.info.worker_id: each.info for each in self.workers.values()})

    async def kill(self, worker_id: str) -> None:
        """End the worker's process, and its lease."""
        await self.workers.pop(worker_id).close()
        self.refresh()
        await until(lambda: self.fleet.worker(worker_id) is None)

    def metric(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"baton_router_{name}", labels) or 0.0

    async def close(self) -> None:
        await self.fleet.close()
        for worker in self.ever:
            await worker.close()
        self.network.close()
        self.workers_network.close()


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop turn until a condition holds."""
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.001)


def request(
    num_tokens: int = 100, request_id: str = "r", deadline_ms: int = 20_000, **sampling
) -> GenerationRequest:
    """A prompt of the tokens 0, 1, 2, ..."""
    return GenerationRequest(
        request_id=request_id,
        token_ids=list(range(num_tokens)),
        sampling=SamplingParams(**({"max_tokens": 100, "seed": 1} | sampling)),
        priority=0,
        deadline_ms=deadline_ms,
        cache_salt="",
    )


class Consumer:
    """Reads a generation in a task of its own, as an HTTP handler does."""

    def __init__(self, dispatcher: Dispatcher, generation: GenerationRequest) -> None:
        self.deltas: list[TokenDelta] = []
        self.is_full = False
        self.wants_more = True
        self._has_room = asyncio.Event()
        self.task = asyncio.create_task(dispatcher.generate(generation, self))

    async def wait_room(self) -> None:
        await self._has_room.wait()

    def take(self, delta: TokenDelta) -> bool:
        self.deltas.append(delta)
        return self.wants_more

    def fill(self) -> None:
        """Stop taking tokens."""
        self.is_full = True
        self._has_room.clear()

    def make_room(self) -> None:
        """Take the tokens that waited, and those that come."""
        self.is_full = False
        self._has_room.set()

    @property
    def tokens(self) -> list[int]:
        return [token for delta in self.deltas for token in delta.token_ids]

    async def received(self, count: int) -> None:
        await until(lambda: len(self.tokens) >= count or self.task.done())
        assert len(self.tokens) >= count

    async def end(self) -> list[int]:
        async with asyncio.timeout(WAIT_S):
            await self.task
        return self.tokens

    async def cancel(self) -> None:
        self.task.cancel()
        await asyncio.wait([self.task])


def failed(leg, worker, *, retryable: bool = True, lacks_room: bool = False) -> AttemptFailed:
    return AttemptFailed(
        request_id=leg.request_id,
        attempt=leg.attempt,
        worker_id=worker.info.worker_id,
        reason="out of luck",
        retryable=retryable,
        lacks_room=lacks_room,
    )


async def finish_on(worker, consumer: Consumer, index: int = 0) -> list[int]:
    """Serve the next Generate whole, each token being 1000 + its index."""
    leg = await worker.received.next(Generate)
    assert leg.num_output == index
    worker.tokens(leg, index, [1000 + each for each in range(index, 6)], finish=FinishReason.STOP)
    return await consumer.end()


WHOLE = [1000, 1001, 1002, 1003, 1004, 1005]


OWN_NONCE = 1 << 40


async def all_sent(harness: Harness, worker: FakeWorker) -> None:
    """Wait until all that the router has sent to a worker has arrived."""
    known = harness.fleet.worker(worker.info.worker_id)
    assert known is not None
    known.link.send(Ping(nonce=OWN_NONCE))
    while (await worker.received.next(Ping)).nonce != OWN_NONCE:
        pass


TOLD = PromptLogprobs(0, bytes(4 * 99), bytes(4 * 99), b"", b"")


async def first_with(workers: dict, kind: type):
    await until(lambda: any(each.received.count(kind) for each in workers.values()))
    return next(each for each in workers.values() if each.received.count(kind))


def stats_of(worker: FakeWorker, num_running: int = 1, blocks_stuck: int = 0) -> WorkerStats:
    return WorkerStats(
        worker_id=worker.info.worker_id,
        incarnation=worker.info.incarnation,
        num_waiting=0,
        num_running=num_running,
        queued_tokens=0,
        blocks_total=1000,
        blocks_used=max(25, blocks_stuck),
        blocks_stuck=blocks_stuck,
        blocks_cached=0,
    )
