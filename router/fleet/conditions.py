"""The condition of each worker of a fleet: whether requests may go there, else why not and since
when; and the state of the store that holds the registrations.

Everything that shows workers reads these: `/fleet`, the page, `baton status`, the doctor, metrics.
`Conditions` owns the time since which each condition holds; `router.fleet.fleet` finds the
conditions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from process.number_text import exact
from protocol.messages import HelloRefused, Role
from protocol.registration import WorkerInfo, WorkerState
from router.fleet.history import LostWorker


class State(StrEnum):
    """A worker's state as a router sees it; requests go to USABLE ones only.

    A STARTING worker loads, or is being connected. A STALLED one says that it makes no progress,
    and a SILENT one does not answer. NOT_CONNECTED workers cannot be reached, REFUSED ones may not
    be used, and LOST ones are gone without having drained.
    """

    USABLE = "usable"
    STARTING = "starting"
    DRAINING = "draining"
    STALLED = "stalled"
    SILENT = "silent"
    NOT_CONNECTED = "not connected"
    REFUSED = "refused"
    LOST = "lost"


class Cause(StrEnum):
    """Why a worker is unusable, as a label of metrics."""

    MODEL = "other_model"
    PROTOCOL = "other_protocol"
    LAYOUT = "other_layout"
    SECRET = "other_secret"
    ADDRESS = "address"
    CONNECTION = "connection_broke"
    SILENT = "silent"
    STALLED = "stalled"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Condition:
    """A worker's condition. `cause` and `reason` are empty where the state says everything.
    `is_replaced` tells that a worker of the same role has come since this one was lost."""

    state: State
    cause: Cause | None = None
    reason: str = ""
    since_us: int = 0
    is_replaced: bool = False

    def __str__(self) -> str:
        return f"{self.state}: {self.reason}" if self.reason else str(self.state)

    def as_json(self) -> dict[str, Any]:
        """The condition as `/fleet` shows it."""
        return {
            "state": self.state.value,
            "cause": None if self.cause is None else self.cause.value,
            "reason": self.reason or None,
            "since_us": self.since_us,
            "is_replaced": self.is_replaced,
        }


@dataclass(frozen=True, slots=True)
class StoreState:
    """The store that holds the registrations: why it does not answer, and a warning for operators,
    such as of a certificate that expires soon. None where there is nothing to say."""

    trouble: str | None = None
    notice: str | None = None


LOST_AFTER_US = 1_000_000
"""A worker counts as lost if it is not back this long after its connection broke."""
USABLE = Condition(State.USABLE)
CONNECTING = Condition(State.STARTING, reason="this router connects to it")
NOT_USED_YET = Condition(State.STARTING, reason="it has just registered")
BROKEN = Condition(State.NOT_CONNECTED, Cause.CONNECTION, "its connection broke")
OTHER_SECRET = Condition(
    State.REFUSED, Cause.SECRET, "its BATON_CLUSTER_SECRET is not this router's"
)
SILENT = Condition(State.SILENT, Cause.SILENT, "it is connected and does not answer")
_CAUSES = {"model fingerprint": Cause.MODEL, "protocol version": Cause.PROTOCOL}
"""The cause, by the reason for which a worker refuses a router."""


def unreachable(control: str, seconds: float) -> Condition:
    """The condition of a worker that has never answered at its address."""
    text = f"it is registered at {control} and has not answered there for {exact(seconds)} s"
    return Condition(State.NOT_CONNECTED, Cause.ADDRESS, text)


def refused_by_worker(refused: HelloRefused) -> Condition:
    """The condition of a worker that refuses this router, or whose address is another worker's."""
    text = f"its {refused.what} is {refused.ours} and this router's {refused.theirs}"
    if refused.what == "worker":
        text = f"{refused.ours} answers at its address"
    return Condition(State.REFUSED, _CAUSES.get(refused.what, Cause.ADDRESS), text)


def registered_condition(state: WorkerState) -> Condition | None:
    """The condition that follows from the registration alone; None for a ready worker."""
    if state is WorkerState.LOADING:
        return Condition(State.STARTING, reason="it loads its weights")
    if state is WorkerState.DRAINING:
        return Condition(State.DRAINING)
    if state is WorkerState.STALLED:
        text = "requests wait there, and it makes no progress"
        return Condition(State.STALLED, Cause.STALLED, text)
    return None


MAX_KNOWN = 4096
"""Most worker ids for which the time of first use is kept."""


@dataclass
class _Standing:
    incarnation: str
    condition: Condition


class Conditions:
    """The current conditions, with the time since which each holds."""

    def __init__(self, wall_us: Callable[[], int]) -> None:
        self._wall_us = wall_us
        self._standing: dict[str, _Standing] = {}
        self._first_usable_us: dict[str, int] = {}

    def note(self, found: Mapping[str, tuple[WorkerInfo, Condition]]) -> None:
        """Take the conditions of all workers that are registered or connected."""
        now_us = self._wall_us()
        for gone in self._standing.keys() - found.keys():
            del self._standing[gone]
        for worker_id, (info, condition) in found.items():
            known = self._standing.get(worker_id)
            if known is None or known.incarnation != info.incarnation:
                known = self._standing[worker_id] = _Standing(info.incarnation, condition)
                known.condition = _since(condition, now_us)
            elif (known.condition.state, known.condition.cause) != (
                condition.state,
                condition.cause,
            ):
                known.condition = _since(condition, now_us)
            else:
                known.condition = _since(condition, known.condition.since_us)
            if condition.state is State.USABLE:
                self._first_usable_us.setdefault(worker_id, now_us)
        while len(self._first_usable_us) > MAX_KNOWN:
            del self._first_usable_us[next(iter(self._first_usable_us))]

    def all(self) -> dict[str, Condition]:
        """The current conditions, by worker id."""
        return {name: each.condition for name, each in self._standing.items()}

    def usable_us(self, worker_ids: Iterable[str]) -> list[int]:
        """When each usable worker became usable for the first time, by id. A worker that comes back
        keeps its time, so it does not count as the replacement of another."""
        return [
            self._first_usable_us[each]
            for each in worker_ids
            if each in self._standing and self._standing[each].condition.state is State.USABLE
        ]


def _since(condition: Condition, since_us: int) -> Condition:
    return condition if condition.since_us else replace(condition, since_us=since_us)


def lost_conditions(
    lost: Iterable[LostWorker], usable_us: Mapping[Role, list[int]]
) -> dict[str, Condition]:
    """The conditions of lost workers, by id. `usable_us`: by role, when each usable worker became
    usable for the first time. A worker that came after a loss replaces the lost one."""
    newcomers = {role: sorted(times) for role, times in usable_us.items()}
    found = {}
    for each in sorted(lost, key=lambda each: each.at_us):
        later = [at for at in newcomers.get(each.info.role, ()) if at > each.at_us]
        if later:
            newcomers[each.info.role].remove(later[0])
        found[each.info.worker_id] = Condition(
            State.LOST, Cause.LOST, each.reason, each.at_us, is_replaced=bool(later)
        )
    return found
