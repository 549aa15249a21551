"""Every live setting takes the values within its bounds, and no others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from console.dashboard.live_limits import live_settings
from protocol import wire
from protocol.errors import InvalidRequest
from protocol.messages import SetLimits

NAMES = [
    ("prefill", "chunk_max_tokens"),
    ("decode", "chunk_max_tokens"),
    ("decode", "itl_target_ms"),
    ("router", "ttft_target_ms"),
    ("router", "tpot_target_ms"),
    ("router", "goodput_target"),
]


class Link:
    """Takes messages for a worker, as bytes."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def send(self, message: SetLimits) -> bool:
        self.sent.append(wire.encode(message))
        return True


@pytest.mark.parametrize(("scope", "name"), NAMES)
def test_a_value_at_a_bound_is_applied_and_one_beyond_it_is_refused(scope: str, name: str) -> None:
    targets, link = SimpleNamespace(), Link()
    report: Any = SimpleNamespace(targets=targets)
    fleet: Any = SimpleNamespace(known=lambda role: [SimpleNamespace(link=link)])
    setting = live_settings(report, fleet).find(scope, name)
    assert setting.maximum is not None
    for value in (setting.minimum, setting.maximum):
        assert setting.write(setting.check(value)) == (1, 1)
        if scope == "router":
            assert getattr(targets, name) == value
        else:
            assert getattr(wire.decode_control(link.sent[-1]), name) == value
    for value in (setting.minimum - 1, setting.maximum * 2, 10**30, 1e308):
        with pytest.raises(InvalidRequest, match="must be at least"):
            setting.check(value)
