"""Baton's placement without one of its parts, to show what that part is worth.

Each policy decides on the router's own view, with a part of it hidden.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Self

import msgspec

from router.routing.caches.cache_index import PrefixMatch
from router.routing.decision import Decision, Query, decide
from router.routing.fleet_view import FleetView
from router.routing.pace import GUESS, pace_of
from router.routing.placement import WorkerLoad
from router.routing.prediction import WorkerSpeed
from router.routing.sessions import Sessions
from router.routing.worker_view import WorkerView


class _PartOfView(FleetView):
    """A view that shares everything with another one."""

    @classmethod
    def of(cls, view: FleetView) -> Self:
        part = cls.__new__(cls)
        part.__dict__ = view.__dict__
        return part


class _WithoutPrediction(_PartOfView):
    """All workers count as equally fast, whatever they report."""

    def loads(self, workers: Sequence[WorkerView]) -> list[WorkerLoad]:
        return [
            msgspec.structs.replace(
                load,
                speed=None,
                pace=pace_of(
                    GUESS, GUESS, load.queued_tokens, load.num_requests, load.num_requests
                ),
            )
            for load in super().loads(workers)
        ]


class _WithoutPending(_PartOfView):
    """Only what workers have reported counts, not what was sent to them since."""

    def loads(self, workers: Sequence[WorkerView]) -> list[WorkerLoad]:
        return [_reported(each, self.typical(each.role)).load() for each in workers]

    def matches(self, hashes: Sequence[bytes], now: float) -> Mapping[str, PrefixMatch]:
        found = super().matches(hashes, now)
        return {name: PrefixMatch(match.held, match.held) for name, match in found.items()}


class _WithoutSessions(_PartOfView):
    """No request belongs to a session."""

    @property
    def sessions(self) -> Sessions:  # type: ignore[override]
        return Sessions()


def _reported(worker: WorkerView, typical: WorkerSpeed | None) -> WorkerView:
    """A worker without the load that was reserved there."""
    bare = WorkerView(worker.info, worker.liveness)
    bare.assume(typical)
    bare.stats, bare.speed = worker.stats, worker.speed
    return bare


def without_prediction(view: FleetView, query: Query, now: float, rng: random.Random) -> Decision:
    """All workers count as equally fast."""
    return decide(_WithoutPrediction.of(view), query, now, rng)


def without_pending(view: FleetView, query: Query, now: float, rng: random.Random) -> Decision:
    """Only what workers have reported counts."""
    return decide(_WithoutPending.of(view), query, now, rng)


def without_sessions(view: FleetView, query: Query, now: float, rng: random.Random) -> Decision:
    """No request belongs to a session, here and on workers."""
    unnamed = msgspec.structs.replace(query, session="")
    decision = decide(_WithoutSessions.of(view), unnamed, now, rng)
    return msgspec.structs.replace(decision, session="")
