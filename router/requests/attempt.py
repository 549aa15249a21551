"""One attempt at a request: its workers and the load reserved on them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from protocol.messages import Abort, KvHolder
from protocol.registration import WorkerState
from router.fleet.worker import Worker
from router.routing.decision import Charge
from router.routing.pairs import Pair
from router.routing.view import Placement


@dataclass
class Attempt:
    """One attempt: its workers and the load reserved on them.

    - `first_index`: the output index of the first token that this attempt produces.
    - `prefill`: the other worker that sends the KV, if any: a prefill worker, or the decode worker
      that hands the request over.
    - `holders`: workers from which the one that computes the prompt may fetch leading blocks.
    - `session`: the one that its prompt belongs to, as far as it is known.
    - `is_leaving`: the attempt's own decode worker was asked to hand the request over.
    - `is_moved`: all KV has arrived at the decode worker.
    """

    number: int
    first_index: int
    placement: Placement
    decode: Worker
    prefill: Worker | None
    reservations: list[Charge]
    holders: list[KvHolder] = field(default_factory=list)
    session: str = ""
    decode_runs: bool = False
    is_moved: bool = False
    is_leaving: bool = False
    block_size: int = 0
    gap_timer: asyncio.TimerHandle | None = None

    def involves(self, worker: Worker) -> bool:
        """Whether the attempt still depends on a worker.

        Once the decode worker holds all KV, the attempt no longer depends on the prefill worker. A
        second token proves this even if the prefill worker has not reported it.
        """
        needs_prefill = not (self.is_moved or self.decode_runs)
        return worker is self.decode or (worker is self.prefill and needs_prefill)

    @property
    def may_leave(self) -> bool:
        """Whether the decode worker drains and has not been asked to hand the request over."""
        return self.decode.info.state is WorkerState.DRAINING and not self.is_leaving

    def sent(self, worker: Worker) -> None:
        """Note that this worker's leg was just sent; its stats say how many legs they count."""
        for owner, reservation in self.reservations:
            if owner is worker:
                worker.sent(reservation)

    def release(self, worker: Worker) -> None:
        """Release the load reserved on a worker."""
        if not self.reservations:
            return
        for owner, reservation in self.reservations:
            if owner is worker:
                owner.release(reservation)
        self.reservations = [each for each in self.reservations if each[0] is not worker]

    def release_pair(self) -> None:
        """All KV has arrived: the way between the workers is free again."""
        for owner, reservation in self.reservations:
            if isinstance(owner, Pair):
                owner.release(reservation)

    def close(self) -> None:
        """Release every reservation and stop the timer."""
        for owner, reservation in self.reservations:
            owner.release(reservation)
        if self.gap_timer is not None:
            self.gap_timer.cancel()

    def abort(self, request_id: str, reason: str, failed: Worker | None = None) -> None:
        """Tell both legs, except a failed one, to drop the attempt."""
        for worker in (self.decode, self.prefill):
            if worker is not None and worker is not failed:
                worker.link.send(Abort(request_id=request_id, attempt=self.number, reason=reason))
