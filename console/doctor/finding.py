"""Findings, as `GET /doctor` and `baton doctor` show them."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Any

import msgspec

from console.doctor.observation import MIN_REQUESTS, Observation


class Urgency(StrEnum):
    """How soon somebody has to act."""

    URGENT = "urgent"
    """Clients notice: goodput is below its target."""
    SOON = "soon"


class Bar(msgspec.Struct, frozen=True):
    """One bar of a set; the outlier is flagged."""

    name: str
    value: float
    is_flagged: bool = False


class Number(msgspec.Struct, frozen=True):
    """One figure with its name, ready to show."""

    value: str
    name: str


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """The measured values behind a finding: at most one set of bars, and at most four numbers."""

    kind: str
    unit: str = ""
    bars: tuple[Bar, ...] = ()
    numbers: tuple[Number, ...] = ()


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A change to make: of a setting, or an action if `new` is None. `live` settings can be changed
    while the process runs; `old` is None if the router does not know the value."""

    setting: str
    text: str
    scope: str = ""
    old: str | None = None
    new: str | None = None
    live: bool = False
    predicted: dict[str, float] | None = None


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """The finding of one rule. `since_us` is the time at which it was first found, 0 until `Doctor`
    sets it. `stages` are the stages of requests whose time the finding explains."""

    rule: str
    title: str
    text: tuple[str, ...]
    evidence: Evidence
    changes: tuple[Change, ...]
    urgency: Urgency = Urgency.SOON
    since_us: int = 0
    stages: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """This finding as `GET /doctor` shows it."""
        shown: dict[str, Any] = msgspec.to_builtins(self)
        return shown


class Passed(msgspec.Struct, frozen=True, kw_only=True):
    """A rule that found nothing, with the figure that it examined."""

    rule: str
    title: str
    text: str


class Rule(msgspec.Struct, frozen=True):
    """A check by name. `check` returns a finding, the words of a check that passed, or None if it
    cannot tell.

    - `stages`: the stages (`router.requests.stages`) whose time a finding explains.
    - `yields_to`: rules whose findings, if there are any, are the cause of this rule's symptom.
    - `is_fact`: the rule needs no minimum number of requests, and its finding ends with the fact.
    - `min_requests`: the number of finished requests that a rule about no fact needs.
    """

    name: str
    title: str
    check: Callable[[Observation], Finding | str | None]
    stages: tuple[str, ...] = ()
    yields_to: tuple[str, ...] = ()
    is_fact: bool = False
    min_requests: int = MIN_REQUESTS
