"""The table of live settings. A setting applies in this router or in its workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from console.dashboard.live_settings import ROUTER, LiveSetting, LiveSettings, Number
from console.telemetry.fleet_report import FleetReport
from protocol.field_bounds import MAX_DIMENSION, MAX_DURATION
from protocol.messages import Role, SetLimits
from router.fleet.fleet import Fleet


def live_settings(report: FleetReport, fleet: Fleet) -> LiveSettings:
    """The settings that may change while the fleet runs."""
    targets = report.targets

    def tpot_target() -> Number | None:
        known: Number | None = report.as_json()["targets"]["tpot_target_ms"]
        return known

    return LiveSettings(
        [
            _of_workers("chunk_max_tokens", Role.PREFILL, "tokens", fleet),
            _of_workers("chunk_max_tokens", Role.DECODE, "tokens", fleet),
            _of_workers("itl_target_ms", Role.DECODE, "ms", fleet),
            LiveSetting(
                "ttft_target_ms", ROUTER, "ms", 1, MAX_DURATION, False,
                lambda: targets.ttft_target_ms, _writer(targets, "ttft_target_ms"),
            ),
            LiveSetting(
                "tpot_target_ms", ROUTER, "ms", 0.1, MAX_DURATION, False,
                tpot_target, _writer(targets, "tpot_target_ms"),
            ),
            LiveSetting(
                "goodput_target", ROUTER, "", 0, 1, False,
                lambda: targets.goodput_target, _writer(targets, "goodput_target"),
            ),
        ]
    )  # fmt: skip


def _writer(owner: Any, name: str) -> Callable[[Number], tuple[int, int]]:
    """A function that sets an attribute of an object of this router."""

    def write(value: Number) -> tuple[int, int]:
        setattr(owner, name, value)
        return 1, 1

    return write


def _of_workers(name: str, role: Role, unit: str, fleet: Fleet) -> LiveSetting:
    """A limit of the steps of a role's workers. Its value is known if all these workers agree."""

    def read() -> Number | None:
        values: set[Number] = {getattr(each.info, name) for each in fleet.known(role)}
        return values.pop() if len(values) == 1 else None

    def write(value: Number) -> tuple[int, int]:
        workers = fleet.known(role)
        message = msgspec.convert({"type": SetLimits.__name__, name: value}, SetLimits)
        return sum(each.link.send(message) for each in workers), len(workers)

    is_whole = name.endswith("_tokens")
    maximum = MAX_DIMENSION if is_whole else MAX_DURATION
    return LiveSetting(name, role.value, unit, 1, maximum, is_whole, read, write)
