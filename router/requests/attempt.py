"""One attempt at a request: its workers, and the load that they were charged with for it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from protocol.messages import Abort
from protocol.registration import WorkerState
from router.fleet.worker import Reservation, Worker
from router.routing.view import Placement


@dataclass
class Attempt:
    """One try: its workers, and the load they were charged with for it.

    `first_index` is the output index of the first token that this attempt produces. `prefill` is
    where its KV comes from, if from elsewhere: a prefill worker, or the decode worker that hands
    the request over. `is_leaving` says that its own decode worker was asked to hand it over,
    `is_moved` that all KV has arrived there.
    """

    number: int
    first_index: int
    placement: Placement
    decode: Worker
    prefill: Worker | None
    reservations: list[tuple[Worker, Reservation]]
    decode_runs: bool = False
    is_moved: bool = False
    is_leaving: bool = False
    gap_timer: asyncio.TimerHandle | None = None

    def involves(self, worker: Worker) -> bool:
        """Whether the attempt still depends on a worker.

        Once the decode worker holds all KV, and shows that by a token after the first if nobody
        said so, it no longer matters what becomes of the prefill worker.
        """
        needs_prefill = not (self.is_moved or self.decode_runs)
        return worker is self.decode or (worker is self.prefill and needs_prefill)

    @property
    def may_leave(self) -> bool:
        """Whether its decode worker drains, and was not asked yet to hand it over."""
        return self.decode.info.state is WorkerState.DRAINING and not self.is_leaving

    def release(self, worker: Worker) -> None:
        """Take back what a worker was charged with."""
        if not self.reservations:
            return
        for owner, reservation in self.reservations:
            if owner is worker:
                owner.release(reservation)
        self.reservations = [each for each in self.reservations if each[0] is not worker]

    def close(self) -> None:
        """Take back every charge and stop the timer."""
        for owner, reservation in self.reservations:
            owner.release(reservation)
        if self.gap_timer is not None:
            self.gap_timer.cancel()

    def abort(self, request_id: str, reason: str, failed: Worker | None = None) -> None:
        """Tell both legs to forget the attempt; the one that failed knows."""
        for worker in (self.decode, self.prefill):
            if worker is not None and worker is not failed:
                worker.link.send(Abort(request_id=request_id, attempt=self.number, reason=reason))
