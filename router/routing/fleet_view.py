"""The fleet as a value: workers' loads, the load reserved on them, the blocks that they cache.

Pure: no clock, no sockets, no tasks. Connections or a simulator feed it. `decision.decide` reads
it; `decision.apply` reserves the load of the decided placement in it. Views with equal input give
equal decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf

from protocol.events import WorkerStats
from protocol.messages import Role
from router.routing.caches.cache_index import CacheIndex, PrefixMatch
from router.routing.pace import typical_speed
from router.routing.pairs import Pairs
from router.routing.placement import WorkerLoad
from router.routing.prediction import WorkerSpeed
from router.routing.sent_requests import SentRequests
from router.routing.sessions import Sessions
from router.routing.stagger import Stagger
from router.routing.unseen_load import others_of, unseen_of_others
from router.routing.worker_view import Liveness, WorkerView


class FleetView:
    """The workers of a fleet by id, their cache index, and the sessions that they served."""

    def __init__(self, index: CacheIndex) -> None:
        self.index = index
        self.sessions = Sessions()
        self.pairs = Pairs()
        self.stagger = Stagger()
        self.on_applied: Callable[[], object] = lambda: None
        """Called after each decision that was applied, before its requests are sent."""
        self._workers: dict[str, WorkerView] = {}
        self._pools: tuple[list[WorkerView], list[WorkerView]] | None = None
        self._typical: dict[Role, WorkerSpeed | None] = dict.fromkeys(Role)
        self._others = 0.0
        self._num_unaveraged: float = inf  # reports since the averages were computed

    def join(self, worker: WorkerView) -> None:
        """Add a worker; its cache counts as empty until its events and dump have come."""
        info = worker.info
        self.index.join(info.worker_id, info.incarnation, info.num_blocks, info.has_windows)
        self._workers[worker.worker_id] = worker
        worker.on_standing = self._forget_pools
        worker.assume(self._typical[worker.role])
        self._forget_pools()
        self.pairs.join(info)
        self._num_unaveraged = inf

    def leave(self, worker_id: str) -> None:
        """Forget a worker and its blocks."""
        del self._workers[worker_id]
        self._forget_pools()
        self.index.leave(worker_id)
        self.pairs.forget(worker_id)
        self._num_unaveraged = inf

    def take_stats(self, worker: WorkerView, stats: WorkerStats) -> None:
        """Take the newest stats of a worker."""
        worker.take_stats(stats)
        self.pairs.barriers.take_refusals(worker.worker_id, stats.refused_by)
        self._num_unaveraged += 1

    def newly_sent(self) -> list[SentRequests]:
        """What this router has sent since the last call, for the other routers."""
        found = [each.newly_sent() for each in self._workers.values()]
        return [each for each in found if each is not None]

    def reserve_for_others(self, sent: Sequence[SentRequests]) -> None:
        """Count what another router has sent."""
        self.stagger.note_told(sent)
        for each in sent:
            worker = self._workers.get(each.worker_id)
            if worker is not None:
                worker.reserve_for_others(each)

    @property
    def wait_s(self) -> float:
        """How long to wait before the next placement, so that routers do not all place at once."""
        typical = self.typical(Role.PREFILL) if self.stagger.rank else None
        return 0.0 if typical is None else self.stagger.wait_s(typical.per_token_us)

    def worker(self, worker_id: str) -> WorkerView | None:
        """The worker with this id."""
        return self._workers.get(worker_id)

    def ready(self, role: Role) -> list[WorkerView]:
        """Workers of a role that accept new requests, as in `ready_pools`."""
        decode, prefill = self.ready_pools()
        return prefill if role is Role.PREFILL else decode

    def ready_pools(self) -> tuple[list[WorkerView], list[WorkerView]]:
        """The decode workers, and the prefill workers, that accept new requests.

        Decode workers that do not answer at the moment are left out only if others answer: a slow
        worker is not dead. Prefill workers that do not answer are always left out, because decode
        workers can compute prompts, too; but if none answers, they may all be in a long step.
        """
        if self._pools is None:
            self._pools = self._find_pools()
        return self._pools

    def _forget_pools(self) -> None:
        """Find the pools again when they are asked for: a worker's standing may have changed."""
        self._pools = None

    def _find_pools(self) -> tuple[list[WorkerView], list[WorkerView]]:
        decode: list[WorkerView] = []
        prefill: list[WorkerView] = []
        others: list[WorkerView] = []
        for each in self._workers.values():
            self.pairs.barriers.take(each.info)
            if not each.takes_requests:
                continue
            if not each.answers:
                others.append(each)
            elif each.is_prefill:
                prefill.append(each)
            elif each.is_decode:
                decode.append(each)
        if others:
            decode = decode or [each for each in others if each.is_decode]
            prefill = prefill or [e for e in others if e.is_prefill and e.liveness is Liveness.SLOW]
        return decode, prefill

    def loads(self, workers: Sequence[WorkerView]) -> list[WorkerLoad]:
        """The loads of these workers of one role. A worker whose speed is not trusted counts as
        typical. Loads include requests that were just sent, and those that other routers have
        probably sent."""
        if not workers:
            return []
        _, others = self._averages()
        if not others:
            return [each.kept_load or each.load() for each in workers]
        unseen = unseen_of_others([each.unseen for each in workers], others)
        return [each.load(more) for each, more in zip(workers, unseen, strict=True)]

    def typical(self, role: Role) -> WorkerSpeed | None:
        """The speed of a typical worker of a role; of the fleet if none of that role is trusted."""
        return self._averages()[0][role]

    @property
    def others_share(self) -> float:
        """The share of the workers' recent requests that other routers sent without telling this
        one, as of the last decision."""
        return self._others / (1.0 + self._others)

    def _averages(self) -> tuple[Mapping[Role, WorkerSpeed | None], float]:
        """The speed of a typical worker of each role, and how many requests others send for each
        known one. They are computed again after as many reports as there are workers."""
        if self._num_unaveraged >= len(self._workers):
            everybody = self._workers.values()
            fleet = [each.speed for each in everybody]
            others = others_of([each.arrivals for each in everybody])
            for role, former in self._typical.items():
                pool = [each for each in everybody if each.role is role]
                typical = typical_speed([each.speed for each in pool], fleet)
                self._typical[role] = typical
                if typical != former or (self._others and not others):
                    for each in pool:
                        each.assume(typical)
            self._others, self._num_unaveraged = others, 0
        return self._typical, self._others

    def matches(self, hashes: Sequence[bytes], now: float) -> Mapping[str, PrefixMatch]:
        """The number of these leading blocks that each worker holds, for workers that hold any."""
        return self.index.matches(hashes, now) if hashes else {}
