"""One worker as decisions see it: registration, last stats, and the load sent there since.

Pure. The worker's stats do not include a request that was just sent, so the request counts here as
a reservation. Stats and requests use different connections, without a common order, so stats say
how many requests they count. A reservation ends with the first stats that count its request, unless
its owner releases it earlier.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum, auto

import msgspec

from protocol.events import WorkerStats
from protocol.messages import Role
from protocol.registration import WorkerInfo, WorkerState
from router.routing.pace import Pace, freshness, trusts, under_load, unloaded_pace
from router.routing.placement import WorkerLoad
from router.routing.prediction import WorkerSpeed
from router.routing.sent_requests import MOST_REQUESTS, SentRequest, SentRequests
from router.routing.unseen_load import NOTHING, Arrivals, Unseen

_CHUNK_TOKENS, _ITL_TARGET_MS = 512, 50.0  # of workers that do not report them
_MOST_REPORTS = 3
"""A request of another router that so many reports do not count has not arrived."""
_MOST_BIAS = 0.1
"""Predictions of steps cancel out if their sum is off by at most this part."""


class Liveness(Enum):
    """What the connection to a worker shows. SLOW: connected, but silent for no longer than a long
    step may take. SILENT: for longer."""

    ANSWERS = auto()
    SLOW = auto()
    SILENT = auto()
    UNCONNECTED = auto()


class Reservation(msgspec.Struct, eq=False, gc=False):
    """Load that was sent to a worker whose stats do not include it yet. `number` counts the
    requests that `session` has sent; 0 until this one is sent. `reports_left`: the number of
    reports after which another router's reservation ends in any case; None for one of ours."""

    tokens: int
    blocks: int
    session: str = ""
    number: int = 0
    reports_left: int | None = None

    def count_report(self, received: dict[str, int]) -> bool:
        """Note a report with these numbers of received requests. Returns whether it ends the
        reservation."""
        if 0 < self.number <= received.get(self.session, 0):
            return True
        if self.reports_left is None:
            return False
        self.reports_left -= 1
        return self.reports_left == 0


class WorkerView:
    """A worker of a `FleetView`. Owns its reservations.

    `takes_requests`: whether new requests may go to this worker: its lease says READY and it is
    connected. `on_standing` is called when this, its role or its liveness may have changed.
    """

    def __init__(self, info: WorkerInfo, liveness: Liveness = Liveness.UNCONNECTED) -> None:
        self.on_standing: Callable[[], object] = _nothing
        self.worker_id = info.worker_id
        self.info = info
        self.role: Role = info.role
        self.is_prefill, self.is_decode = _pools(info.role)
        self.note_liveness(liveness)
        self.stats: WorkerStats | None = None
        self.speed: WorkerSpeed | None = None
        self.arrivals = Arrivals()
        self._session, self._num_sent, self._num_told = "", 0, 0
        self._reservations: set[Reservation] = set()
        self._reserved_tokens = self._reserved_blocks = 0
        self._stepped_us = 0
        self.kept_load: WorkerLoad | None = None
        """The last result of `load`, while it holds."""
        self._unloaded: Pace | None = None  # for the last speed, and `_typical`
        self._typical: WorkerSpeed | None = None
        self._others = NOTHING

    def renew(self, info: WorkerInfo) -> None:
        """Take the newest registration of the same process."""
        self.info, self.role, self.kept_load = info, info.role, None
        self.is_prefill, self.is_decode = _pools(info.role)
        self.note_liveness(self.liveness)

    def note_liveness(self, liveness: Liveness) -> None:
        """Note what the connection shows now."""
        self.liveness = liveness
        self.answers = liveness is Liveness.ANSWERS
        is_connected = liveness is not Liveness.UNCONNECTED
        self.takes_requests = is_connected and self.info.state is WorkerState.READY
        self.on_standing()

    @property
    def num_reservations(self) -> int:
        """Number of sent requests, also of other routers, that the stats may not include yet."""
        return len(self._reservations)

    @property
    def free_blocks(self) -> int:
        """Blocks that are neither used nor waited for, by the last stats and the requests sent
        since."""
        return self.info.num_blocks - self.load().blocks_claimed

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that the worker still has to compute, including requests sent since its
        stats."""
        queued = self.stats.queued_tokens if self.stats is not None else 0
        return queued + self._reserved_tokens

    def take_stats(self, stats: WorkerStats) -> None:
        """Take the newest stats; end the reservations that they include."""
        num_steps = stats.counters.get("steps", 0)
        if self.stats is None or num_steps != self.stats.counters.get("steps", 0):
            self._stepped_us = stats.reported_us
        if self.stats is not None:
            self.arrivals.observe(self.stats.received, stats.received, self._session)
        self.stats = stats
        self.speed = _speed(self.info, stats, stats.reported_us - self._stepped_us)
        self.kept_load = self._unloaded = None
        if self._reservations:
            for each in [e for e in self._reservations if e.count_report(stats.received)]:
                self.release(each)

    def reserve(self, tokens: int, blocks: int) -> Reservation:
        """Reserve load for a request: prompt tokens to compute, blocks to hold."""
        reservation = Reservation(tokens, blocks)
        self._reservations.add(reservation)
        self._reserved_tokens += tokens
        self._reserved_blocks += blocks
        self.kept_load = None
        return reservation

    def note_sent(self, reservation: Reservation, session: str, number: int) -> None:
        """Note that the request of a reservation has just been sent, as this session's
        `number`th."""
        reservation.session, reservation.number = session, number
        if session != self._session:
            self._session, self._num_told = session, 0
        self._num_sent = number

    def newly_sent(self) -> SentRequests | None:
        """This router's requests since the last call; None if there are none."""
        first, last, session = self._num_told + 1, self._num_sent, self._session
        if first > last:
            return None
        self._num_told = last
        requests = [
            SentRequest(each.number, each.tokens, each.blocks)
            for each in self._reservations
            if each.number >= first and each.session == session
        ]
        return SentRequests(self.worker_id, session, first, last, requests[:MOST_REQUESTS])

    def reserve_for_others(self, sent: SentRequests) -> None:
        """Reserve the load of another router's requests until the stats include them."""
        self.arrivals.note_told(max(0, sent.last - sent.first + 1))
        num_seen = 0 if self.stats is None else self.stats.received.get(sent.session, 0)
        for each in sent.requests:
            if each.number > num_seen and len(self._reservations) < MOST_REQUESTS:
                reservation = self.reserve(each.tokens, each.blocks)
                reservation.session, reservation.number = sent.session, each.number
                reservation.reports_left = _MOST_REPORTS

    def release(self, reservation: Reservation) -> None:
        """End a reservation: its request is over there or was never sent. May be called again."""
        if reservation in self._reservations:
            self._reservations.remove(reservation)
            self._reserved_tokens -= reservation.tokens
            self._reserved_blocks -= reservation.blocks
            self.kept_load = None

    @property
    def unseen(self) -> Unseen:
        """The requests that no report counts yet, of this router and of messages from others."""
        return Unseen(len(self._reservations), self._reserved_tokens, self._reserved_blocks)

    def assume(self, typical: WorkerSpeed | None) -> None:
        """Take the speed of the fleet's workers, which counts as far as the worker's own is not
        trusted."""
        self._typical, self._unloaded, self.kept_load = typical, None, None

    def load(self, others: Unseen = NOTHING) -> WorkerLoad:
        """The load for a placement: the last stats plus the reservations, and what `others` have
        probably sent meanwhile."""
        load = self.kept_load
        if load is None or (others is not self._others and others != self._others):
            load = self.kept_load = self._new_load(others)
            self._others = others
        return load

    def _new_load(self, others: Unseen) -> WorkerLoad:
        stats, info = self.stats, self.info
        num_waiting, num_running, stuck, host_us, disk_us = len(self._reservations), 0, 0, 0, 0
        queued, claimed = self._reserved_tokens, self._reserved_blocks
        if stats is not None:
            num_waiting, num_running = num_waiting + stats.num_waiting, stats.num_running
            queued, stuck = queued + stats.queued_tokens, stats.blocks_stuck
            # the queue of a prefill worker counts by its tokens instead
            claimed += stats.blocks_used + (stats.blocks_waiting if self.is_decode else 0)
            host_us, disk_us = stats.host_tier_block_us, stats.disk_tier_block_us
        if others is not NOTHING:
            num_waiting += round(others.requests)
            queued += round(others.tokens)
            claimed += round(others.blocks)
        num_requests = num_waiting + num_running
        num_prompts, num_decoding = num_waiting, num_requests
        if self.is_prefill:
            num_prompts, num_decoding = num_requests, 0
        pace = self._unloaded
        if pace is None:
            pace = self._unloaded = unloaded_pace(self.speed, self._typical)
        pace = under_load(pace, queued, num_prompts, num_decoding)
        return WorkerLoad(
            self.worker_id, num_requests, queued, info.num_blocks, claimed, stuck,
            info.max_context, pace, info.max_batch_size, host_us, disk_us, self.speed,
        )  # fmt: skip


def _nothing() -> None:
    """The callback of a worker that belongs to no view."""


def _pools(role: Role) -> tuple[bool, bool]:
    return role is Role.PREFILL, role is Role.DECODE


def _is_accurate(counters: Mapping[str, int]) -> bool:
    """Whether a step model has proven anything: its errors are at most half of the time of all
    steps, or they cancel out. On a machine that other work disturbs, each step may be far off, but
    a queue takes as long as predicted."""
    took_us = counters.get("step_us", 0)
    off_us = abs(counters.get("predicted_step_us", 0) - took_us)
    is_close = 2 * counters.get("step_error_us", 0) <= took_us
    return took_us > 0 and (is_close or off_us <= _MOST_BIAS * took_us)


def _speed(info: WorkerInfo, stats: WorkerStats, idle_us: int) -> WorkerSpeed:
    """What predictions need to know about a worker. Assumes that the contexts of the decoding
    sequences fill the blocks in use."""
    is_decode, counters = info.role is Role.DECODE, stats.counters
    is_accurate = _is_accurate(counters)
    proven = counters.get("prefill_tokens", 0) if is_accurate else 0
    num_steps = counters.get("steps", 0) if is_accurate else 0
    step_trust, token_trust = trusts(num_steps, proven)
    return WorkerSpeed(
        fixed_us=stats.step_fixed_us,
        per_token_us=stats.step_per_token_us,
        per_attended_us=stats.step_per_attended_us,
        chunk_max_tokens=info.chunk_max_tokens or _CHUNK_TOKENS,
        itl_target_ms=info.itl_target_ms or _ITL_TARGET_MS,
        num_decodes=stats.num_running if is_decode else 0,
        context_tokens=stats.blocks_used * info.block_size if is_decode else 0,
        proven_tokens=proven,
        step_trust=step_trust,
        token_trust=token_trust,
        freshness=freshness(idle_us),
    )
