"""Whether a failed attempt is retried, after which pause, and which workers the retry avoids. Pure.

Failures and deaths since the last new token are bounded. A request that makes progress may outlive
any number of workers, but a request that kills two workers is not given to a third. The pause grows
with every failure and is jittered.
"""

from __future__ import annotations

import random

import msgspec

from protocol.errors import GenerationFailed, Overloaded
from router.fleet.worker import Loss, Worker
from router.requests.machine.attempt import Attempt

MAX_DEATHS = 2
"""A request that lost this many workers in a row without a new token may be killing them."""


class FailureHistory(msgspec.Struct):
    """The failures of one request, and the workers its next attempt avoids or prefers.

    `num_failures` counts the failed attempts since the last new token. `num_deaths` counts the
    workers that died while they ran the request, since a decode worker last computed a token. A
    request that makes progress is not blamed for workers that die; no request is blamed for workers
    that hang.

    `suspects` are the legs of attempts that lost a worker, by incarnation. A second leg's death
    counts as another death only if that leg outlived the first: it has then answered the ping
    whose number is in `suspects` (None: the leg is dead). A decode worker may report a failed
    handoff before the router knows that the other end, `lost_peer`, has died. `failed` holds the
    incarnations to avoid, and `keeper` is the decode worker that already holds some blocks.
    """

    num_failures: int = 0
    num_deaths: int = 0
    suspects: dict[str, int | None] = {}
    lost_peer: Worker | None = None
    failed: set[str] = set()
    failed_handoffs: set[str] = set()
    keeper: Worker | None = None

    @property
    def prefer_decode(self) -> str | None:
        """The id of the decode worker that the next attempt prefers."""
        return None if self.keeper is None else self.keeper.worker_id

    @property
    def pinged_keeper(self) -> tuple[Worker, int] | None:
        """The `keeper`, if it is a suspect that was pinged, and the number of that ping."""
        ping = None if self.keeper is None else self.suspects.get(self.keeper.info.incarnation)
        return None if self.keeper is None or ping is None else (self.keeper, ping)

    def on_progress(self, attempt: Attempt, num_new: int) -> None:
        """A new token has come, number `num_new` of this attempt: reset the count of failures.

        The count of deaths is reset, too, except by the first token, which a prefill worker
        produces in every attempt: the step after it may be the one that kills.
        """
        self.num_failures = 0
        if attempt.prefill is None or num_new > 1:
            self.num_deaths = 0
            self.suspects.clear()
            self.lost_peer = None

    def blame(self, attempt: Attempt, worker: Worker) -> None:
        """Avoid this worker, because of a fault or an omission. If it is the prefill worker, the
        request stays on the decode worker, with the blocks that arrived."""
        self.keeper = attempt.decode if worker is attempt.prefill else None
        self.failed.add(worker.info.incarnation)

    def on_report(self, attempt: Attempt, worker: Worker) -> None:
        """A worker has reported that the attempt failed there.

        The decode worker reports a failed handoff, but usually the other end or the network between
        them is at fault. So the first time, the request stays on the decode worker, with the blocks
        that arrived, and avoids only the prefill worker.
        """
        incarnation, source = worker.info.incarnation, attempt.prefill
        is_handoff = source is not None and worker is attempt.decode and not attempt.decode_runs
        if source is None or not is_handoff or incarnation in self.failed_handoffs:
            self.blame(attempt, worker)
            return
        self.failed_handoffs.add(incarnation)
        self.lost_peer = source
        self.blame(attempt, source)

    def avoid(self, worker: Worker) -> None:
        """Let the next attempt avoid this worker, which has no room for the request."""
        self.keeper = None
        self.failed.add(worker.info.incarnation)

    def on_loss(self, attempt: Attempt, worker: Worker, loss: Loss) -> list[Worker]:
        """A worker of the attempt was lost. Count each death once, and both legs of an attempt once
        if they died together. Returns the workers to probe."""
        self.blame(attempt, worker)
        if loss is not Loss.BROKEN:
            return []
        others: list[Worker] = []
        if not self._fell_before(worker):
            self.num_deaths += 1
            legs = [each for each in (attempt.decode, attempt.prefill) if each is not None]
            others = [each for each in legs if each is not worker]
        probed = [each for each in others if each.info.incarnation not in self.suspects]
        self.suspects[worker.info.incarnation] = None
        return probed

    def on_probe(self, worker: Worker, ping: int) -> None:
        """Note that a suspect was pinged."""
        self.suspects[worker.info.incarnation] = ping

    def count_late_death(self, worker: Worker) -> None:
        """Count the death of a failed handoff's other end, which the router saw only after the
        failure. The worker that reported the failure outlived that death."""
        if self.lost_peer is worker:
            self.lost_peer = None
            if worker.info.incarnation not in self.suspects:
                self.num_deaths += 1
                self.suspects[worker.info.incarnation] = None

    def _fell_before(self, worker: Worker) -> bool:
        """Whether this death is already counted, alone or with another leg's."""
        incarnation = worker.info.incarnation
        if incarnation not in self.suspects:
            return False
        asked = self.suspects[incarnation]
        return asked is None or worker.link.last_pong < asked


class Retries:
    """The retry policy for all requests of a router."""

    def __init__(
        self, max_attempts: int, backoff_ms: float, backoff_max_ms: float, rng: random.Random
    ) -> None:
        self._max_attempts = max_attempts
        self._backoff_ms = backoff_ms
        self._backoff_max_ms = backoff_max_ms
        self._rng = rng

    def pause_s(
        self,
        request_id: str,
        failures: FailureHistory,
        num_attempts: int,
        reason: str,
        lacks_room: bool = False,
    ) -> float:
        """Count a failure of the `num_attempts`th attempt; returns the seconds until the next.

        Raises GenerationFailed if no other attempt is allowed, Overloaded if the last one failed
        only because no worker had room (`lacks_room`).
        """
        if failures.num_deaths >= MAX_DEATHS:
            raise GenerationFailed(
                f"request {request_id} is not tried again: {failures.num_deaths} workers died over "
                f"it; the last: {reason}"
            )
        failures.num_failures += 1
        if failures.num_failures >= self._max_attempts:
            error = Overloaded if lacks_room else GenerationFailed
            raise error(
                f"request {request_id} failed after {num_attempts} attempts; the last: {reason}"
            )
        backoff_ms: float = self._backoff_ms * 2 ** (failures.num_failures - 1)
        backoff_ms = min(backoff_ms, self._backoff_max_ms)
        return backoff_ms / 1000 * self._rng.uniform(0.5, 1.0)
