"""One attempt at a request: its workers and the load reserved on them. Pure."""

from __future__ import annotations

import msgspec

from protocol.message_base import Message
from protocol.messages import KvHolder
from protocol.registration import WorkerState
from router.fleet.worker import Worker
from router.routing.decision import Charge
from router.routing.pairs import Pair
from router.routing.placement import Placement


class Send(msgspec.Struct, frozen=True):
    """An action: send a message to a worker, if it can be reached."""

    worker: Worker
    message: Message


class Attempt(msgspec.Struct, eq=False):
    """The state of a generation that runs on workers.

    - `first_index`: the output index of the first token that this attempt produces.
    - `prefill`: the other worker that sends the KV, if any: a prefill worker, or the decode worker
      that hands the request over.
    - `holders`: workers from which the one that computes the prompt may fetch leading blocks.
    - `session`: the session that its prompt belongs to, if it is known.
    - `decode_runs`: the decode worker has all KV, because it has sent a token of its own.
    - `is_moved`: all KV has arrived at the decode worker.
    - `is_leaving`: the attempt's own decode worker was asked to hand the request over.
    - `is_watched`: tokens have overtaken the first one, which must come soon.
    """

    number: int
    first_index: int
    placement: Placement
    decode: Worker
    prefill: Worker | None
    reservations: list[Charge]
    holders: list[KvHolder] = []
    session: str = ""
    decode_runs: bool = False
    is_moved: bool = False
    is_leaving: bool = False
    is_watched: bool = False
    block_size: int = 0

    def awaits(self, worker: Worker, number: int) -> bool:
        """Whether a message of this worker about attempt `number` is one of this attempt."""
        return number == self.number and (worker is self.decode or self.involves(worker))

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
        for owner, reservation in self.reservations:
            if owner is worker:
                owner.release(reservation)
        self.reservations = [each for each in self.reservations if each[0] is not worker]

    def release_pair(self) -> None:
        """All KV has arrived: the way between the workers is free again."""
        for owner, reservation in self.reservations:
            if isinstance(owner, Pair):
                owner.release(reservation)
        self.reservations = [each for each in self.reservations if not isinstance(each[0], Pair)]

    def close(self) -> None:
        """Release every reservation."""
        for owner, reservation in self.reservations:
            owner.release(reservation)
