"""A simulated router: the real view of the fleet and the real decisions; messages are events.

Workers' reports and cache events reach its `FleetView` after the time that a message takes, and
requests reach the workers after the same time. Like real workers, simulated ones report changes of
their caches at once, and their load at most every `report_s`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from process.sockets.message_budget import MessageBudget
from protocol.errors import Overloaded, PromptTooLong, TargetUnreachable
from protocol.events import CacheEvents, WorkerStats
from protocol.messages import CacheDump
from protocol.registration import WorkerInfo, WorkerState
from router.routing.caches.cache_index import CacheIndex
from router.routing.decision import Charge, Decision, Query, apply
from router.routing.fleet_view import FleetView
from router.routing.output_lengths import OutputLengths
from router.routing.placement import NO_TARGETS, Targets
from router.routing.shedding import Asker, WaitingPrompt, shed
from router.routing.urgent_work import UrgentWork
from router.routing.worker_view import Liveness, WorkerView
from scheduling.load_report import load_report, step_counters
from simulator.delays import DelayDraws, Delays
from simulator.event_queue import EventQueue
from simulator.policies.choices import Policy
from simulator.requests import Request
from simulator.worker import SimulatedWorker
from worker.moved_blocks import kept_windows

EXPECTED_S = 10.0
"""How long blocks of a routed prompt are expected on its worker."""
IDLE_S = 1.0
"""The time after which an idle worker reports again."""
_MOST_REPEATS = 100
"""Reports of a worker that stays idle: after that time its step model counts for nothing."""


class SimulatedRouter:
    """One router; `name` is its session with the workers. Calls `on_end` with each request that is
    over, whether it was served or refused."""

    def __init__(
        self,
        name: str,
        queue: EventQueue,
        policy: Policy,
        rng: random.Random,
        draws: DelayDraws,
        targets: Targets = NO_TARGETS,
    ) -> None:
        self.name = name
        self.on_end: Callable[[Request], None] = lambda _: None
        self.refuses_late = False
        self._queue = queue
        self._policy = policy
        self._rng = rng
        self._draws = draws
        self._targets = targets
        self.view = FleetView(CacheIndex(EXPECTED_S))
        self._workers: dict[str, SimulatedWorker] = {}
        self._num_sent: dict[str, int] = {}
        self._waiting: dict[int, WaitingPrompt] = {}
        self._reserved: dict[int, list[Charge]] = {}
        self._outputs = OutputLengths()
        self._urgent = UrgentWork()

    def connect(self, worker: SimulatedWorker) -> None:
        """Use a worker from now on."""
        view = WorkerView(_registration(worker), Liveness.ANSWERS)
        self.view.join(view)
        self.view.index.apply_dump(
            worker.name, CacheDump(incarnation=worker.name, seq=0, hashes=[])
        )
        self._workers[worker.name] = worker
        self._num_sent[worker.name] = 0

    def submit(self, request: Request) -> None:
        """Place a request that has just come, in this router's turn, and send it to its workers."""
        request.router = self.name
        wait_s = self.view.wait_s
        if wait_s:
            self._queue.at(self._queue.now + wait_s, self._place, request)
        else:
            self._place(request)

    def _place(self, request: Request) -> None:
        now = self._queue.now
        worker = next(iter(self._workers.values()))
        size = worker.spec.config.block_size
        query = Query(
            num_tokens=request.num_prompt,
            max_tokens=request.num_prompt + request.num_output,
            block_size=size,
            hashes=request.content[: request.num_prompt // size],
            may_fetch=False,
            session=request.session,
            output_tokens=self._outputs.expected(request.num_output),
            targets=self._targets,
        )
        try:
            decision = self._policy(self.view, query, now, self._rng)
            if self.refuses_late:
                self._check_targets(request, decision)
        except (Overloaded, PromptTooLong) as error:
            request.failure = type(error).__name__
            self.on_end(request)
            return
        request.session = decision.session
        self._reserved[request.number] = apply(self.view, decision, now)
        for owner, reservation in self._reserved[request.number]:
            if isinstance(owner, WorkerView):
                self._num_sent[owner.worker_id] += 1
                owner.note_sent(reservation, self.name, self._num_sent[owner.worker_id])
        self._send(request, decision)

    def _check_targets(self, request: Request, decision: Decision) -> None:
        share, priority = request.share, request.priority
        left = self._urgent.left_for(share, priority)
        asker = Asker(self._targets, share, priority, left, self.view.others_share)
        found = shed(asker, decision.placement, decision.loads, self._waiting.values())
        if found is not None:
            raise TargetUnreachable("", math.ceil(found.late_ms / 1000))

    def _send(self, request: Request, decision: Decision) -> None:
        placement = decision.placement
        computing = placement.prefill or placement.decode
        self._waiting[request.number] = WaitingPrompt(
            computing.worker_id, computing.recompute_tokens, request.share, request.priority
        )
        self._urgent.note(request.share, request.priority, computing.recompute_tokens)
        request.decode, request.rule = placement.decode.worker_id, placement.rule.value
        decode = self._workers[request.decode]
        arrives = self._queue.now + self._draws.sending_s(request.decode)
        self._queue.at(arrives, decode.deliver, decode.generate, request)
        if placement.prefill is not None:
            request.prefill = placement.prefill.worker_id
            prefill = self._workers[request.prefill]
            arrives = self._queue.now + self._draws.sending_s(request.prefill)
            self._queue.at(arrives, prefill.deliver, prefill.prefill, request)

    # -- what workers report ------------------------------------------------------------------

    def on_first_token(self, request: Request, time: float) -> None:
        """Note that the request's first token reached the router at `time`."""
        worker = request.prefill or request.decode
        request.first_token = time + self._draws.answering_s(worker, is_last=False)
        self._waiting.pop(request.number, None)

    def on_moved(self, request: Request) -> None:
        """The blocks of the request's prompt have arrived at its decode worker."""
        if request.prefill is not None:
            took_ms = request.write_s * 1000
            self.view.pairs.observe(request.prefill, request.decode, request.sent_blocks, took_ms)

    def on_last_token(self, request: Request) -> None:
        """End the request: its reservations end, and its last token goes to the client."""
        answering_s = self._draws.answering_s(request.decode, is_last=True)
        request.end = max(request.first_token, self._queue.now + answering_s)
        self._outputs.observe(request.num_output)
        for view, reservation in self._reserved.pop(request.number):
            view.release(reservation)
        if request.end > self._queue.now:
            self._queue.at(request.end, self.on_end, request)
        else:
            self.on_end(request)

    def take_events(self, events: CacheEvents) -> None:
        """Take the changes of a worker's cache."""
        assert not self.view.index.apply_events(events), "no event is lost here"

    def take_stats(self, stats: WorkerStats) -> None:
        """Take a worker's load; the changes of its cache were taken before."""
        view = self.view.worker(stats.worker_id)
        assert view is not None, "all workers stay"
        self.view.take_stats(view, stats)


class Exchange:
    """The channel on which a router tells the others what it has sent, as often as `LoadChannel`
    does."""

    def __init__(
        self, queue: EventQueue, delays: Delays, routers: Sequence[SimulatedRouter]
    ) -> None:
        self._queue = queue
        self._takes_s = 2 * delays.message_s
        self._routers = routers
        self._allowed = {each.name: 0.0 for each in routers}
        self._telling: set[str] = set()
        if delays.tell_s and len(routers) > 1:
            self._budgets = {each.name: MessageBudget(delays.tell_s) for each in routers}
            for each in routers:
                each.view.on_applied = partial(self._tell_soon, each)

    def _tell_soon(self, router: SimulatedRouter) -> None:
        if router.name not in self._telling:
            self._telling.add(router.name)
            due = max(self._queue.now, self._allowed[router.name])
            self._queue.at(due, self._tell, router)

    def _tell(self, router: SimulatedRouter) -> None:
        now = self._queue.now
        self._telling.remove(router.name)
        self._allowed[router.name] = self._budgets[router.name].spend(now)
        sent, arrives = router.view.newly_sent(), now + self._takes_s
        for each in self._routers:
            if each is not router:
                self._queue.at(arrives, each.view.reserve_for_others, sent)


class Reports:
    """The listener of every worker, which passes the workers' reports to the routers."""

    def __init__(self, queue: EventQueue, delays: Delays) -> None:
        self.routers: dict[str, SimulatedRouter] = {}
        self._queue = queue
        self._message_s = delays.message_s
        self._report_s = delays.report_s
        self._seq: dict[str, int] = {}
        self._due: dict[str, float] = {}
        self._held: dict[str, WorkerStats] = {}  # until they are due
        self._repeats: dict[str, int] = {}  # that are left until the worker's load changes

    def on_first_token(self, request: Request, time: float) -> None:
        """See `Listener`."""
        self.routers[request.router].on_first_token(request, time + self._message_s)

    def on_moved(self, request: Request, time: float) -> None:
        """See `Listener`."""
        router = self.routers[request.router]
        self._queue.at(time + self._message_s, router.on_moved, request)

    def on_end(self, request: Request, time: float) -> None:
        """See `Listener`."""
        router = self.routers[request.router]
        self._queue.at(time + self._message_s, router.on_last_token, request)

    def on_change(self, worker: SimulatedWorker) -> None:
        """See `Listener`. Changes of the cache go out at once, the load not too often."""
        now, name = self._queue.now, worker.name
        self._repeats[name] = _MOST_REPEATS
        events = self._events(worker)
        if events is not None:
            for router in self.routers.values():
                self._queue.at(now + self._message_s, router.take_events, events)
        stats, due = _stats(worker, self._seq.get(name, 0), now), self._due.get(name, 0.0)
        if now >= due:
            self._report(name, stats)
        else:
            if name not in self._held:
                self._queue.at(due, self._report_held, name)
            self._held[name] = stats

    def repeat(self, workers: Iterable[SimulatedWorker]) -> None:
        """Report the load of idle workers again if their last report is `IDLE_S` old. Workers that
        have never had a request report nothing."""
        now = self._queue.now
        for worker in workers:
            name = worker.name
            reported, left = self._due.get(name, 0.0) - self._report_s, self._repeats.get(name, 0)
            if left and not worker.is_busy and now - reported >= IDLE_S:
                self._repeats[name] = left - 1
                self._report(name, _stats(worker, self._seq.get(name, 0), now))

    def _report_held(self, name: str) -> None:
        stats = self._held.pop(name, None)
        if stats is not None:
            self._report(name, stats)

    def _report(self, name: str, stats: WorkerStats) -> None:
        now = self._queue.now
        self._held.pop(name, None)
        self._due[name] = now + self._report_s
        for router in self.routers.values():
            self._queue.at(now + self._message_s, router.take_stats, stats)

    def _events(self, worker: SimulatedWorker) -> CacheEvents | None:
        delta = worker.scheduler.pools.drain_events()
        if not delta.stored and not delta.removed:
            return None
        seq = self._seq[worker.name] = self._seq.get(worker.name, 0) + 1
        return CacheEvents(
            worker_id=worker.name,
            incarnation=worker.name,
            seq=seq,
            stored=delta.stored,
            removed=delta.removed,
        )


def _stats(worker: SimulatedWorker, seq: int, now: float) -> WorkerStats:
    usage = worker.usage
    return load_report(
        worker.scheduler,
        worker_id=worker.name,
        incarnation=worker.name,
        cache_seq=seq,
        received=dict(worker.received),
        num_handoffs=worker.handoffs.num_open,
        reported_us=round(now * 1e6),
        counters={
            **step_counters(worker.scheduler.model.totals),
            "steps": usage.num_steps,
            "prefill_tokens": usage.prefill_tokens,
        },
    )


def _registration(worker: SimulatedWorker) -> WorkerInfo:
    spec = worker.spec
    return WorkerInfo(
        worker_id=worker.name,
        incarnation=worker.name,
        role=spec.role,
        state=WorkerState.READY,
        host="",
        pid=1,
        control="",
        events="",
        protocol_version=0,
        model="",
        model_fingerprint="",
        layout_fingerprint="",
        transport="",
        block_size=spec.config.block_size,
        num_blocks=worker.scheduler.blocks.num_blocks,
        max_context=spec.max_context,
        max_batch_size=spec.config.max_batch_size,
        chunk_max_tokens=spec.config.chunk_max_tokens,
        itl_target_ms=spec.config.itl_target_s * 1000,
        **_kept(worker),
    )


def _kept(worker: SimulatedWorker) -> dict[str, Any]:
    """The fields of a worker's registration about its groups of layers."""
    layout = worker.spec.layout
    if layout is None:
        return {}
    return {
        "has_windows": worker.scheduler.pools.has_windows,
        "windows": kept_windows(worker.scheduler, layout),
        "block_bytes": round(worker.bytes_by_group[0]),
    }
