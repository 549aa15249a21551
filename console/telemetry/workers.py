"""The workers as operators see them: those of the fleet, and lost ones.

Joins the fleet's registrations with its history, which knows since when a worker loads or drains,
and why a worker is lost. Every worker has its condition (`router.fleet.conditions`).
"""

from __future__ import annotations

from typing import Any

from protocol.messages import Role
from protocol.registration import WorkerState
from router.fleet.conditions import Condition, State
from router.fleet.fleet import Fleet
from router.fleet.history import FleetHistory, LostWorker
from router.fleet.worker import describe

LOST = "lost"


def workers_json(fleet: Fleet) -> list[dict[str, Any]]:
    """Every worker, by role and id."""
    history = fleet.history
    shown = [_worker_json(each, fleet) for each in fleet.as_json()]
    present = {each["worker_id"] for each in shown}
    conditions = fleet.conditions()
    shown += [
        _lost_json(each, conditions[each.info.worker_id])
        for each in history.lost()
        if each.info.worker_id not in present
    ]
    return sorted(shown, key=lambda each: (each["role"], each["worker_id"]))


def _worker_json(shown: dict[str, Any], fleet: Fleet) -> dict[str, Any]:
    history, worker_id = fleet.history, shown["worker_id"]
    worker = fleet.worker(worker_id)
    more: dict[str, Any] = {
        "step_ms": None,
        "tokens_per_s": None,
        **shown,
        **_no_loss(),
        "loading_since_us": history.loading_since_us(worker_id),
        "last_load_ms": history.last_load_ms(Role(shown["role"])),
        "drain_deadline_us": _drain_deadline_us(shown, fleet, history),
    }
    condition = shown["condition"]
    if worker is not None and condition["state"] == State.LOST:
        more |= {
            "state": LOST,
            "lost_us": condition["since_us"],
            "lost_reason": condition["reason"],
            "requests_moved": worker.requests_moved,
        }
    return more


def _drain_deadline_us(shown: dict[str, Any], fleet: Fleet, history: FleetHistory) -> int | None:
    """The time when a draining worker stops its remaining work."""
    since_us = history.draining_since_us(shown["worker_id"])
    worker = fleet.worker(shown["worker_id"])
    if since_us is None or worker is None or shown["state"] != WorkerState.DRAINING:
        return None
    return since_us + round(worker.info.drain_grace_s * 1e6)


def _lost_json(lost: LostWorker, condition: Condition) -> dict[str, Any]:
    return {
        "step_ms": None,
        "tokens_per_s": None,
        **describe(lost.info, None, is_connected=False),
        "condition": condition.as_json(),
        "state": LOST,
        "lost_us": lost.at_us,
        "lost_reason": lost.reason,
        "requests_moved": lost.requests_moved,
        "loading_since_us": None,
        "last_load_ms": None,
        "drain_deadline_us": None,
    }


def _no_loss() -> dict[str, None]:
    return {"lost_us": None, "lost_reason": None, "requests_moved": None}
