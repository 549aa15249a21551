"""Builds a fleet in virtual time and runs a trace through it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter

from router.routing.placement import NO_TARGETS, Targets
from simulator.delays import USUAL_DELAYS, DelayDraws, Delays
from simulator.event_queue import Arrival, EventQueue
from simulator.network import Network
from simulator.policies.choices import Policy
from simulator.requests import Request
from simulator.router import IDLE_S, Exchange, Reports, SimulatedRouter
from simulator.traces.sessions import Session, Trace
from simulator.worker import SimulatedWorker
from simulator.worker_spec import WorkerSpec


@dataclass(frozen=True)
class FleetSpec:
    """A fleet: its pools, each as `(specification, number of workers)`, and the links between
    workers.

    - `policy` makes the policy of a router.
    - `targets`: what every request names as its targets; with `refuses_late`, requests that are
      predicted to miss them are refused.
    - `link_bytes_per_s`, `link_s`: bandwidth of a worker's network card in one direction, and the
      latency of a transfer.
    """

    pools: tuple[tuple[WorkerSpec, int], ...]
    policy: Callable[[], Policy]
    link_bytes_per_s: float
    link_s: float = 2e-5
    delays: Delays = USUAL_DELAYS
    num_routers: int = 1
    targets: Targets = NO_TARGETS
    refuses_late: bool = False


@dataclass
class Outcome:
    """The result: the requests in the order of their arrival, the workers, the time of the last
    event, and whether the simulation was completed."""

    requests: list[Request] = field(default_factory=list)
    workers: list[SimulatedWorker] = field(default_factory=list)
    duration_s: float = 0.0
    is_whole: bool = True


class Fleet:
    """Workers and routers of one simulation."""

    def __init__(self, spec: FleetSpec, seed: int) -> None:
        self._queue = EventQueue()
        self._reports = Reports(self._queue, spec.delays)
        count = sum(number for _, number in spec.pools)
        network = Network(self._queue, [spec.link_bytes_per_s] * count, spec.link_s)
        rng_of_steps = random.Random(f"{seed}/steps")
        self._outcome = Outcome()
        for pool, number in spec.pools:
            for _ in range(number):
                index = len(self._outcome.workers)
                worker = SimulatedWorker(
                    index, pool, self._queue, network, self._reports, spec.delays.message_s
                )
                worker.rng = rng_of_steps
                self._outcome.workers.append(worker)
        self._introduce()
        self._routers: list[SimulatedRouter] = []
        self._draws: list[DelayDraws] = []
        for number in range(spec.num_routers):
            name, rng = f"router-{number}", random.Random(f"{seed}/{number}")
            rng_of_delays = random.Random(f"{seed}/{number}/delays")
            draws = DelayDraws(spec.delays, rng_of_delays, self._num_computing)
            router = SimulatedRouter(name, self._queue, spec.policy(), rng, draws, spec.targets)
            self._draws.append(draws)
            router.refuses_late = spec.refuses_late
            router.view.stagger.rank = number
            router.on_end = self._on_end
            self._reports.routers[router.name] = router
            self._routers.append(router)
            for worker in self._outcome.workers:
                router.connect(worker)
        Exchange(self._queue, spec.delays, self._routers)
        self._queue.every(IDLE_S, partial(self._reports.repeat, self._outcome.workers))
        self._turns: dict[int, tuple[Session, int, float]] = {}
        self._num_ended = 0
        self._goes_on: Callable[[Request], bool] = lambda _: True

    @property
    def num_events(self) -> int:
        """Events so far."""
        return self._queue.num_run

    def run(
        self,
        trace: Trace,
        on_progress: Callable[[int], None] = lambda _: None,
        goes_on: Callable[[Request], bool] = lambda _: True,
    ) -> Outcome:
        """Serve all of a trace. `on_progress` is called now and then with the number of requests
        that are over. `goes_on` is called with each such request; if it returns False, the
        simulation ends at once."""
        self._goes_on = goes_on
        self._queue.arrive(sorted(self._first_turns(trace.sessions), key=itemgetter(0)))
        self._queue.run(lambda: on_progress(self._num_ended))
        on_progress(self._num_ended)
        self._outcome.duration_s = self._queue.now
        return self._outcome

    def _introduce(self) -> None:
        """Let the workers know each other."""
        workers = self._outcome.workers
        peers = {each.name: each.handoffs for each in workers}
        num_decode = sum(each.spec.role.value == "decode" for each in workers)
        for each in workers:
            each.handoffs.peers = peers
            each.neighbours = [other for other in workers if other is not each]
            each.scheduler.shares.num_targets = num_decode

    def _num_computing(self, worker: str) -> int:
        """The workers whose steps are under way, besides the one with this name."""
        return sum(each.is_busy and each.name != worker for each in self._outcome.workers)

    def _first_turns(self, sessions: Iterable[Session], began: float = 0.0) -> list[Arrival]:
        """When the sessions' first turns arrive, if all that the sessions wait for began then."""
        found: list[Arrival] = []
        for each in sessions:
            if each.turns:
                start = began + each.start_s
                first = start + each.turns[0].pause_s
                found.append((first, self._submit, (each, 0, start)))
        return found

    def _submit(self, session: Session, index: int, start: float) -> None:
        """Send a turn of a session that began at `start`."""
        turn = session.turns[index]
        size = self._outcome.workers[0].spec.config.block_size
        request = Request(
            number=len(self._outcome.requests),
            session=session.name if len(session.turns) > 1 else "",
            num_prompt=turn.num_prompt,
            num_output=turn.num_output,
            content=() if turn.blocks is None else turn.blocks.digests(size),
            arrival=self._queue.now,
            share=session.share,
            priority=session.priority,
        )
        self._outcome.requests.append(request)
        self._turns[request.number] = session, index, start
        number = request.number % len(self._routers)
        router, delay_s = self._routers[number], self._draws[number].placing_s(request.num_prompt)
        if delay_s:
            self._queue.at(self._queue.now + delay_s, router.submit, request)
        else:
            router.submit(request)

    def _on_end(self, request: Request) -> None:
        """End a turn: start the sessions that it starts, and its next turn after a pause."""
        request.content = ()
        self._num_ended += 1
        if not self._goes_on(request):
            self._outcome.is_whole = False
            self._queue.stop()
            return
        session, index, start = self._turns.pop(request.number)
        now = self._queue.now
        for time, action, arguments in self._first_turns(session.turns[index].starts, now):
            self._queue.at(time, action, *arguments)
        if index + 1 < len(session.turns):
            turn = session.turns[index + 1]
            due = max(now + turn.pause_s, start + turn.not_before_s)
            self._queue.at(due, self._submit, session, index + 1, start)
