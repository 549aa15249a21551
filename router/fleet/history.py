"""The events of the fleet in the last hour, and the workers it has lost.

Owns the events that operators see as marks on the time axis, and the last registration of every
lost worker. A lost worker is forgotten after an hour, or when a worker with its id is back. The
fleet, and the code that changes a setting, add events; the clock is passed in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from process.number_text import count
from protocol.messages import Role
from protocol.registration import WorkerInfo, WorkerState

KEPT_US = 3_600_000_000
MAX_EVENTS = 200
MAX_LOST = 200
ROLLOUT_US = 600_000_000
"""Workers of a role that leave in order and are replaced within this time are one rollout."""


class EventKind(StrEnum):
    """The kind of an event."""

    ROLLOUT = "rollout"
    LOST = "lost"
    DRAIN = "drain"
    JOINED = "joined"
    SETTING = "setting"


@dataclass(frozen=True, slots=True)
class FleetEvent:
    """An event of the fleet; `worker_id` is empty if it concerns no worker."""

    at_us: int
    kind: EventKind
    worker_id: str
    text: str


@dataclass(frozen=True, slots=True)
class LostWorker:
    """A lost worker: the reason, the time, and the number of its requests that moved on."""

    info: WorkerInfo
    at_us: int
    reason: str
    requests_moved: int


@dataclass
class _Member:
    """The last known registration of a worker; times are 0 for what has not been seen."""

    info: WorkerInfo
    loading_us: int = 0
    draining_us: int = 0


class FleetHistory:
    """Events and losses of one fleet, as one router saw them."""

    def __init__(self, wall_us: Callable[[], int]) -> None:
        self.wall_us = wall_us
        self._events: deque[FleetEvent] = deque(maxlen=MAX_EVENTS)
        self._lost: dict[str, LostWorker] = {}
        self._members: dict[str, _Member] = {}
        self._last_load_ms: dict[Role, float] = {}
        self._left_us: dict[Role, int] = {}
        self._rollout_us: dict[Role, int] = {}
        self._has_begun = False

    # -- reports ----------------------------------------------------------------------------

    def note_members(self, members: Mapping[str, WorkerInfo]) -> None:
        """Take the current registrations and note the differences. The first registrations add no
        event."""
        now_us = self.wall_us()
        for worker_id, info in members.items():
            member = self._members.get(worker_id)
            if member is None or member.info.incarnation != info.incarnation:
                self._join(info, now_us)
            elif member.info.state is not info.state:
                self._change(member, info, now_us)
        for worker_id in [each for each in self._members if each not in members]:
            member = self._members.pop(worker_id)
            if member.draining_us:
                self._left_us[member.info.role] = now_us
        self._has_begun = self._has_begun or bool(members)

    def note_lost(self, info: WorkerInfo, reason: str, requests_moved: int) -> None:
        """Note that the router gave up a worker. A worker that drained has left in order and is no
        loss."""
        now_us = self.wall_us()
        if info.state is WorkerState.DRAINING:
            self.add(EventKind.DRAIN, f"{info.worker_id} has drained and left", info.worker_id)
            return
        self._lost[info.worker_id] = LostWorker(info, now_us, reason, requests_moved)
        while len(self._lost) > MAX_LOST:
            del self._lost[next(iter(self._lost))]
        text = f"{info.worker_id} lost: {reason}. {count(requests_moved, 'request')} moved"
        self.add(EventKind.LOST, text, info.worker_id)

    def add(self, kind: EventKind, text: str, worker_id: str = "") -> None:
        """Add an event with the current time."""
        self._events.append(FleetEvent(self.wall_us(), kind, worker_id, text))

    # -- questions --------------------------------------------------------------------------

    def events(self) -> list[FleetEvent]:
        """The events of the last hour, oldest first."""
        since_us = self.wall_us() - KEPT_US
        return [each for each in self._events if each.at_us >= since_us]

    def lost(self) -> list[LostWorker]:
        """Workers that were lost in the last hour and are not back."""
        since_us = self.wall_us() - KEPT_US
        return [each for each in self._lost.values() if each.at_us >= since_us]

    def lost_info(self, worker_id: str) -> WorkerInfo | None:
        """The last registration of a lost worker that is not back."""
        lost = self._lost.get(worker_id)
        return None if lost is None else lost.info

    def loading_since_us(self, worker_id: str) -> int | None:
        """The time since which a worker loads."""
        member = self._members.get(worker_id)
        is_loading = member is not None and member.info.state is WorkerState.LOADING
        return member.loading_us if member is not None and is_loading else None

    def draining_since_us(self, worker_id: str) -> int | None:
        """The time since which a worker drains."""
        member = self._members.get(worker_id)
        return (member.draining_us or None) if member is not None else None

    def last_load_ms(self, role: Role) -> float | None:
        """How long the role's last worker took to load, from its registration until it was
        ready."""
        return self._last_load_ms.get(role)

    # -- steps ------------------------------------------------------------------------------

    def _join(self, info: WorkerInfo, now_us: int) -> None:
        is_loading = info.state is WorkerState.LOADING
        self._members[info.worker_id] = _Member(info, now_us if is_loading else 0)
        if info.state is WorkerState.DRAINING:
            self._members[info.worker_id].draining_us = now_us
        self._lost.pop(info.worker_id, None)
        if not self._has_begun:
            return
        text = f"{info.worker_id} joined" + ("; it loads its weights" if is_loading else "")
        self.add(EventKind.JOINED, text, info.worker_id)
        role = info.role
        has_left = now_us - self._left_us.get(role, -ROLLOUT_US) < ROLLOUT_US
        is_new = now_us - self._rollout_us.get(role, -ROLLOUT_US) >= ROLLOUT_US
        if has_left and is_new:
            self._rollout_us[role] = now_us
            self.add(EventKind.ROLLOUT, f"Rollout on the {role.value} pool: workers are replaced")

    def _change(self, member: _Member, info: WorkerInfo, now_us: int) -> None:
        if member.info.state is WorkerState.LOADING and member.loading_us:
            self._last_load_ms[info.role] = (now_us - member.loading_us) / 1000
        if info.state is WorkerState.DRAINING:
            member.draining_us = now_us
            self.add(EventKind.DRAIN, f"{info.worker_id} drains", info.worker_id)
        else:
            member.draining_us = 0
        member.info = info
