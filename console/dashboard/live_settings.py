"""Settings that may change while the fleet runs; a change lasts until the process ends.

Only numbers are live. A router's setting changes in this router only; a worker's goes to every
worker of its role that this router is connected to. Each setting can read and write its own value.
This module checks bounds and words errors for operators.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from process.number_text import exact
from protocol.errors import InvalidRequest

Number = int | float
ROUTER = "router"
"""The scope of router settings. The scope of worker settings is the role's name."""
_BOTH_TARGETS = "goodput counts requests that meet both targets"
_WORDS = {
    "ttft_target_ms": ("Target: time to first token", _BOTH_TARGETS),
    "tpot_target_ms": ("Target: time per output token", _BOTH_TARGETS),
    "goodput_target": ("Target: goodput", "share of requests that are to meet both targets"),
    "chunk_max_tokens": ("Prefill chunk budget", "most prompt tokens that a step computes"),
    "itl_target_ms": (
        "Decode step target", "inter-token latency that chunks beside running decodes keep to",
    ),
}  # fmt: skip
"""The title of each setting, and what it does."""


@dataclass(frozen=True, slots=True)
class LiveSetting:
    """One setting: where it applies, its bounds, and its current value. `read` returns None if the
    value is unknown. `write` returns two numbers: of processes that got the value, and of those
    that should get it."""

    name: str
    scope: str
    unit: str
    minimum: Number
    maximum: Number | None
    is_whole: bool
    read: Callable[[], Number | None]
    write: Callable[[Number], tuple[int, int]]

    @property
    def kind(self) -> str:
        """The kind of process that has the setting."""
        return "router" if self.scope == ROUTER else "worker"

    def as_json(self) -> dict[str, Any]:
        """One element of `GET /control/settings`."""
        title, text = _WORDS.get(self.name, (self.name, ""))
        return {
            "name": self.name,
            "scope": self.scope,
            "title": title,
            "text": text,
            "value": self.read(),
            "unit": self.unit,
            "minimum": self.minimum,
            "maximum": self.maximum,
            "live": True,
        }

    def check(self, value: object) -> Number:
        """The value, if it may be set. Raises InvalidRequest."""
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise InvalidRequest(f"'{self.name}' must be a number", "value")
        if not math.isfinite(value) or (self.is_whole and value != int(value)):
            kind = "whole number" if self.is_whole else "finite number"
            raise InvalidRequest(f"'{self.name}' must be a {kind}", "value")
        if value < self.minimum or (self.maximum is not None and value > self.maximum):
            most = "" if self.maximum is None else f" and at most {exact(self.maximum)}"
            raise InvalidRequest(
                f"'{self.name}' must be at least {exact(self.minimum)}{most} {self.unit}", "value"
            )
        return int(value) if self.is_whole else float(value)


class LiveSettings:
    """The settings by scope and name."""

    def __init__(self, settings: Iterable[LiveSetting]) -> None:
        self._settings = {(each.scope, each.name): each for each in settings}

    def find(self, scope: object, name: object) -> LiveSetting:
        """The setting. Raises InvalidRequest."""
        found = next((s for (sc, n), s in self._settings.items() if (sc, n) == (scope, name)), None)
        if found is None:
            names = ", ".join(f"{name} ({scope})" for scope, name in self._settings)
            raise InvalidRequest(f"no live setting has this name and scope; use one of {names}")
        return found

    def as_json(self) -> list[dict[str, Any]]:
        """The body of `GET /control/settings`."""
        return [each.as_json() for each in self._settings.values()]
