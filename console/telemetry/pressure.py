"""Which side of the fleet is short: pressure against the targets, with hysteresis.

Pressure 1.00 means: exactly at the target. A side becomes short after `SHORT_AFTER_S` above 1.00
and stops being short after `ENOUGH_AFTER_S` below 0.95, so that the verdict does not flicker.
Pure: `now_us` is passed in.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

SHORT_AFTER_S = 5
ENOUGH_AFTER_S = 30
SHORT, ENOUGH, TIGHT = 1.0, 0.95, 0.9


class SideState(StrEnum):
    """The state of a side."""

    SHORT = "short"
    TIGHT = "tight"
    ROOM = "has room"


@dataclass
class Side:
    """One side's state over time; `since_us` is when the state began."""

    state: SideState | None = None
    since_us: int = 0
    _above_us: int | None = None
    _below_us: int | None = None

    def observe(self, pressure: float | None, now_us: int) -> None:
        """Take the current pressure; None if unknown."""
        if pressure is None:
            self._turn(None, now_us)
            self._above_us = self._below_us = None
            return
        self._above_us = _since(pressure > SHORT, self._above_us, now_us)
        self._below_us = _since(pressure < ENOUGH, self._below_us, now_us)
        if self.state is SideState.SHORT:
            is_enough = _lasted(self._below_us, ENOUGH_AFTER_S, now_us)
        else:
            is_enough = not _lasted(self._above_us, SHORT_AFTER_S, now_us)
        if not is_enough:
            self._turn(SideState.SHORT, now_us)
        else:
            self._turn(SideState.TIGHT if pressure > TIGHT else SideState.ROOM, now_us)

    def _turn(self, state: SideState | None, now_us: int) -> None:
        if state is not self.state:
            self.state, self.since_us = state, now_us


@dataclass
class Verdict:
    """The two sides, and the sentence about them. A sentence from the facts comes before it."""

    prefill: Side = field(default_factory=Side)
    decode: Side = field(default_factory=Side)

    @property
    def sentence(self) -> str:
        """The sentence, of at most five words."""
        prefill, decode = self.prefill.state, self.decode.state
        if prefill is None and decode is None:
            return "No request in the last minute"
        for state in (SideState.SHORT, SideState.TIGHT):
            if prefill is state and decode is state:
                return f"Both pools are {state.value}"
            if prefill is state:
                return f"Prefill is {state.value}"
            if decode is state:
                return f"Decode is {state.value}"
        return "Both pools have room"

    @property
    def since_us(self) -> int:
        """The time since which the sentence holds."""
        sides = [each for each in (self.prefill, self.decode) if each.state is not None]
        worst = [each for each in sides if each.state is SideState.SHORT] or [
            each for each in sides if each.state is SideState.TIGHT
        ]
        return max((each.since_us for each in worst or sides), default=0)


def _since(holds: bool, since_us: int | None, now_us: int) -> int | None:
    """The time since which a condition holds; None if it does not."""
    if not holds:
        return None
    return now_us if since_us is None else since_us


def _lasted(since_us: int | None, seconds: int, now_us: int) -> bool:
    return since_us is not None and now_us - since_us >= seconds * 1_000_000
