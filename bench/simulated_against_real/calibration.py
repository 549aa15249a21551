"""Measures a fleet: sends it traces, and keeps what its router reports about their requests.

Single prompts show how long chunks take and the delays around them; simultaneous requests show how
long decodes take. Pieces of a mixture, some of which are sent between the loads, show how the
fleet's processes slow each other down, even if the speed of the machine changes meanwhile. The
simulated fleet serves the same requests in the same order, so that its step models have learned
from the same steps.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import psutil

from bench.replay.player import Player
from bench.replay.vocabulary import Target
from bench.simulated_against_real.fleet_profile import (
    Profile,
    chunk_table,
    decode_table,
    delays_of,
    with_mixture,
)
from bench.simulated_against_real.loads import MIXTURE, Load, calibration_traces, load_trace
from bench.simulated_against_real.mixture import Mixture
from bench.simulated_against_real.timeline import Timeline, Traced
from protocol.errors import BatonError
from simulator.devices.measured_steps import TabledSteps
from simulator.traces.sessions import Trace

PARTS = 8
"""The parts in which a load is played."""


@dataclass(frozen=True)
class Served:
    """A trace that the fleet has served, from `began_wall_s` on in seconds since the Unix epoch,
    and the CPU seconds that router and client took for it."""

    trace: Trace
    traced: Traced
    began_wall_s: float
    cpu_s: float


class Calibration:
    """The measurements of a fleet that is idle between traces; `served` has all of them in order.
    Raises BatonError if a request fails."""

    def __init__(self, player: Player, target: Target, context: int, router_pid: int) -> None:
        self._player = player
        self._target = target
        self._context = context
        self._router_pid = router_pid
        self.served: list[Served] = []
        lone, *groups = calibration_traces(context)
        self._bare = _bare_profile(self.play(lone), [self.play(each) for each in groups])

    def play(self, trace: Trace) -> Served:
        """Send a trace, and keep what becomes of it."""
        before_s = _cpu_s(self._router_pid)
        played = asyncio.run(self._player.play(trace))
        took_s = _cpu_s(self._router_pid) - before_s
        failed = [each.error for each in played if each.error]
        if failed:
            raise BatonError(f"{len(failed)} requests failed, such as: {failed[0]}")
        traced = [(each, self._target.ask(f"/requests/{each.request_id}/trace")) for each in played]
        served = Served(trace, traced, self._player.began_wall_s, took_s)
        self.served.append(served)
        return served

    def play_parts(self, load: Load, seconds: float) -> tuple[list[Served], list[Served]]:
        """Send a load of about so many seconds in parts, and pieces of the mixture around and
        between them. The pieces are as long in all and as dense as the parts, and see the same
        changes of the machine's speed."""
        part_s = seconds / PARTS
        parts, pieces = list[Served](), [self.play_mixture(load.share, part_s / 2)]
        for number, part in enumerate(load.parts(PARTS), 1):
            parts.append(self.play_load(part, part_s))
            pieces.append(self.play_mixture(load.share, part_s if number < PARTS else part_s / 2))
        return parts, pieces

    def play_mixture(self, share: float, seconds: float) -> Served:
        """Send another piece of the mixture, of about so many seconds, as dense as a load with this
        share of the capacity: steps of busier workers are quicker, because their cores seldom
        halt."""
        number = len(self.served)
        name, seed = f"{MIXTURE.name} {number}", MIXTURE.seed + 100 * number
        load = replace(MIXTURE, name=name, seed=seed, share=share)
        return self.play_load(load, seconds)

    def play_load(self, load: Load, seconds: float) -> Served:
        """Send a load that is as dense as the fleet allows."""
        return self.play(load_trace(load, self._bare.costs, self._context, seconds))

    def profile(self, mixtures: Sequence[Served]) -> Profile:
        """The measurements of the fleet, with those of these pieces of the mixture."""
        played = [(each.traced, each.began_wall_s) for each in mixtures]
        names = tuple(each.trace.name for each in mixtures)
        return replace(with_mixture(self._bare, Mixture(played)), handoffs_of=names)


def _bare_profile(lone: Served, groups: Sequence[Served]) -> Profile:
    """The profile of a fleet whose processes do nothing to each other."""
    request_cpu_s, token_cpu_s = _shared_out(_sums([lone]), _sums(groups))
    together = Timeline([each for group in groups for each in group.traced])
    chunks, per_pair = chunk_table(Timeline(lone.traced).steps)
    decodes, per_context = decode_table(together.steps)
    return Profile(
        TabledSteps(decodes, chunks, per_context, per_pair),
        delays_of(lone.began_wall_s, lone.traced),
        request_cpu_s=request_cpu_s,
        token_cpu_s=token_cpu_s,
        turn_s=together.turn_s,
    )


def _sums(served: Sequence[Served]) -> tuple[int, int, float]:
    """Requests, output tokens, and CPU seconds of router and client."""
    played = [each for one in served for each, _ in one.traced]
    return len(played), sum(each.num_output for each in played), sum(e.cpu_s for e in served)


def _shared_out(one: tuple[int, int, float], other: tuple[int, int, float]) -> tuple[float, float]:
    """Seconds of a request and of a token, from two sums: requests, tokens, seconds."""
    (n, t, took), (m, u, lasted) = one, other
    token_s = (n * lasted - m * took) / (n * u - m * t)
    token_s = min(max(0.0, token_s), lasted / u)
    return max(0.0, (took - t * token_s) / n), token_s


def _cpu_s(router_pid: int) -> float:
    """CPU seconds of the router and of this process so far."""
    times = [psutil.Process(pid).cpu_times() for pid in (router_pid, os.getpid())]
    return sum(each.user + each.system for each in times)
