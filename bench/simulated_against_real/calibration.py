"""Times the steps and messages of a fleet, from the traces that its router keeps.

Single prompts show how long chunks take and the delays around them; simultaneous requests show how
long decodes take. The simulated fleet first serves the same requests, so that its step models have
learned from the same steps.
"""

from __future__ import annotations

import asyncio
import os
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import psutil

from bench.replay.player import Played, Player
from bench.replay.vocabulary import Target
from bench.simulated_against_real.computing import Traced, decode_steps, timed_decodes
from bench.simulated_against_real.fleets import Timing
from bench.simulated_against_real.loads import MIXTURE, Costs, load_trace
from bench.simulated_against_real.mixture import Mixture
from protocol.errors import BatonError
from simulator.delays import Delays
from simulator.devices.measured_steps import Table, TabledSteps, table_value
from simulator.traces.sessions import Session, Trace, Turn

_PROMPTS = (16, 32, 64, 128, 256, 512)
_REPEATS = 8
_AT_ONCE = (2, 4, 8, 16, 32)
_SHORT_PROMPT, _OUTPUT = 24, 40
_PAUSE_S = 0.03
_LEAST_STEPS = 8
_MIXTURE_S = 15.0


@dataclass(frozen=True)
class Profile:
    """The measurements of one kind of worker, its router and its links. A request takes
    `request_cpu_s` and `token_cpu_s` for each output token of the router and of the client, which
    share the workers' cores. `contention`, `decode_contention` and `turn_s` are those of
    `WorkerSpec`. `served` is what the fleet had served when it was measured, one trace after the
    other."""

    times: TabledSteps
    delays: Delays
    handoff_s: float
    request_cpu_s: float = 0.0
    token_cpu_s: float = 0.0
    contention: float = 0.0
    turn_s: float = 0.0
    decode_contention: float = 0.0
    served: tuple[Trace, ...] = ()

    @property
    def costs(self) -> Costs:
        """The times that limit a load."""
        return Costs(self.times, self.request_cpu_s, self.token_cpu_s)

    @property
    def timing(self) -> Timing:
        """The times that the simulator needs."""
        return Timing(
            self.times,
            self.delays,
            self.contention,
            self.handoff_s,
            self.turn_s,
            self.decode_contention,
        )

    def as_card(self) -> dict[str, Any]:
        """A file for `--gpu`."""

        def in_us(table: Table) -> list[list[float]]:
            return [[number, round(seconds * 1e6, 2)] for number, seconds in table]

        return {
            "like": "L40S",
            "steps": {
                "decodes_us": in_us(self.times.decodes),
                "chunks_us": in_us(self.times.chunks),
                "per_context_us": self.times.per_context_s * 1e6,
                "per_pair_us": self.times.per_pair_s * 1e6,
            },
        }


def calibration_traces(context: int) -> list[Trace]:
    """Single prompts of growing length; then groups of requests at once, the last ones with long
    prompts."""
    longest = context - _OUTPUT - 1
    lengths = [each for each in _PROMPTS if each < longest]
    lengths.append(min(longest, 900))
    lone = [Turn(_PAUSE_S, each, 4) for each in lengths for _ in range(_REPEATS)]
    traces = [Trace("lone", [Session("lone", 0.0, tuple(lone))])]
    groups = [(each, _SHORT_PROMPT) for each in _AT_ONCE]
    groups += [(each, min(longest, 400)) for each in (2, 4, 8)]
    for count, prompt in groups:
        name, turn = f"group {count}x{prompt}", Turn(0.0, prompt, _OUTPUT)
        traces.append(Trace(name, [Session(f"{name} {n}", 0.0, (turn,)) for n in range(count)]))
    return traces


def calibrate(player: Player, target: Target, context: int, router_pid: int) -> Profile:
    """Measure a fleet that is idle. Raises BatonError."""
    lone, *others = calibration_traces(context)
    alone, alone_s = _traced(player, target, lone, router_pid)
    began_wall_s = player.began_wall_s
    groups, groups_s = list[tuple[Played, dict[str, Any]]](), 0.0
    for each in others:
        group, took_s = _traced(player, target, each, router_pid)
        groups, groups_s = groups + group, groups_s + took_s
    request_cpu_s, token_cpu_s = _shared_out(
        (len(alone), sum(each.num_output for each, _ in alone), alone_s),
        (len(groups), sum(each.num_output for each, _ in groups), groups_s),
    )
    turn_s = _turn_s([each for _, each in groups])
    chunks, per_pair = chunk_table([each for _, each in alone], turn_s)
    decodes, per_context = decode_table(groups)
    times = TabledSteps(decodes, chunks, per_context, per_pair)
    handoff_s = _handoff_s([each for _, each in alone])
    delays = delays_of(began_wall_s, alone)
    bare = Profile(times, delays, handoff_s, request_cpu_s, token_cpu_s, turn_s=turn_s)
    load = load_trace(MIXTURE, bare.costs, context, _MIXTURE_S)
    traced, _ = _traced(player, target, load, router_pid)
    profile = with_mixture(bare, Mixture(traced, player.began_wall_s))
    return replace(profile, served=(lone, *others, load))


def with_mixture(bare: Profile, mixture: Mixture) -> Profile:
    """The profile with the mixture's delays and contention, and with decodes as quick as those
    beside no other step."""
    times = bare.times
    alone_share, decode_contention = mixture.decodes(times)
    decodes = tuple((rows, took * alone_share) for rows, took in times.decodes)
    measured = mixture.delays()
    message_s = min(bare.delays.message_s, _low(measured.sending[0]), _low(measured.last[0]))
    return replace(
        bare,
        times=replace(times, decodes=decodes, per_context_s=times.per_context_s * alone_share),
        delays=replace(bare.delays, message_s=max(1e-5, message_s), measured=measured),
        contention=mixture.contention(times),
        decode_contention=decode_contention,
    )


def _low(samples: Sequence[float]) -> float:
    """The delay that only a tenth of the messages undercut."""
    return sorted(samples)[len(samples) // 10]


def _cpu_s(router_pid: int) -> float:
    """CPU seconds of the router and of this process so far."""
    times = [psutil.Process(pid).cpu_times() for pid in (router_pid, os.getpid())]
    return sum(each.user + each.system for each in times)


def _shared_out(one: tuple[int, int, float], other: tuple[int, int, float]) -> tuple[float, float]:
    """Seconds of a request and of a token, from two sums: requests, tokens, seconds."""
    (n, t, took), (m, u, lasted) = one, other
    token_s = (n * lasted - m * took) / (n * u - m * t)
    token_s = min(max(0.0, token_s), lasted / u)
    return max(0.0, (took - t * token_s) / n), token_s


def _traced(
    player: Player, target: Target, trace: Trace, router_pid: int
) -> tuple[list[tuple[Played, dict[str, Any]]], float]:
    """Every request with its trace, and the CPU seconds that router and client took for them."""
    before_s = _cpu_s(router_pid)
    played = asyncio.run(player.play(trace))
    took_s = _cpu_s(router_pid) - before_s
    failed = next((each.error for each in played if each.error), None)
    if failed is not None:
        raise BatonError(f"a request of the calibration failed: {failed}")
    traced = [(each, target.ask(f"/requests/{each.request_id}/trace")) for each in played]
    return traced, took_s


def _attempt(trace: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = trace["attempts"][-1]
    return found


def _chunks(trace: Mapping[str, Any]) -> list[tuple[float, float, int]]:
    """Begin, end and tokens of a prompt's chunks, by the router's clock."""
    attempt = _attempt(trace)
    worker = attempt["prefill"] or attempt["decode"]
    return [(start / 1e6, end / 1e6, tokens) for start, end, tokens in worker["chunks"]]


def _turn_s(traces: Sequence[Mapping[str, Any]]) -> float:
    """The time between two steps of a worker that has work."""
    gaps = [
        later[0] - step[1]
        for trace in traces
        for step, later in pairwise(decode_steps(trace))
        if 0 <= later[0] - step[1] < 0.005
    ]
    return statistics.median(gaps) if gaps else 0.0


def chunk_table(traces: Sequence[Mapping[str, Any]], turn_s: float) -> tuple[Table, float]:
    """Seconds by tokens, and by pair."""
    first: dict[int, list[float]] = defaultdict(list)
    later: list[tuple[int, int, float]] = []
    for trace in traces:
        done = 0
        for start, end, tokens in _chunks(trace):
            if done:
                later.append((tokens, done, end - start + turn_s))
            else:
                first[tokens].append(end - start + turn_s)
            done += tokens
    whole = rising(
        [(tokens, statistics.median(took), len(took)) for tokens, took in sorted(first.items())]
    )
    per_pair = 0.0
    if later:
        extra = [
            (took - table_value(whole, tokens)) / (tokens * done) for tokens, done, took in later
        ]
        per_pair = max(0.0, statistics.median(extra))
    bare = [(n, took - per_pair * n * (n + 1) / 2, len(first[n])) for n, took in whole]
    return rising(bare), per_pair


def decode_table(groups: Traced) -> tuple[Table, float]:
    """Seconds by sequences, and by token of their contexts."""
    taken: dict[tuple[int, bool], list[tuple[float, float]]] = defaultdict(list)
    for played, trace in groups:
        is_long = played.num_prompt > _SHORT_PROMPT
        for each in timed_decodes(played, trace):
            taken[each.rows, is_long].append((each.seconds, each.context))
    medians = {
        key: tuple(statistics.median(part) for part in zip(*values, strict=True))
        for key, values in taken.items()
        if len(values) >= _LEAST_STEPS
    }
    slopes = [
        (medians[rows, True][0] - medians[rows, False][0])
        / (medians[rows, True][1] - medians[rows, False][1])
        for rows, is_long in medians
        if is_long and (rows, False) in medians
    ]
    slope = max(0.0, statistics.median(slopes)) if slopes else 0.0
    points = [
        (rows, took - slope * context, len(taken[rows, is_long]))
        for (rows, is_long), (took, context) in sorted(medians.items())
        if not is_long
    ]
    if not points:
        raise BatonError("the calibration saw no decode steps")
    return rising(points), slope


def rising(points: Sequence[tuple[int, float, int]]) -> Table:
    """The closest table in which more work never takes less time; neighbours that contradict that
    are averaged. `points`: work, seconds, number of observations."""
    pools: list[tuple[list[int], float, int]] = []
    for number, took, weight in points:
        numbers = [number]
        while pools and pools[-1][1] >= took:
            before, mean, others = pools.pop()
            took = (mean * others + took * weight) / (others + weight)
            numbers, weight = before + numbers, weight + others
        pools.append((numbers, took, weight))
    return tuple((number, max(0.0, took)) for numbers, took, _ in pools for number in numbers)


def delays_of(began_wall_s: float, alone: Sequence[tuple[Played, Mapping[str, Any]]]) -> Delays:
    """The delays around the chunks of a single prompt."""
    before: dict[int, list[float]] = defaultdict(list)
    messages, answers = [], []
    for played, trace in alone:
        placed = _attempt(trace)["started_us"] / 1e6
        chunks = _chunks(trace)
        before[played.num_prompt].append(placed - (began_wall_s + played.sent))
        messages.append(chunks[0][0] - placed)
        answers.append(began_wall_s + played.first_token - chunks[-1][1])
    low, high = min(before), max(before)
    least, most = (statistics.median(before[each]) for each in (low, high))
    slope = max(0.0, (most - least) / (high - low))
    message_s = max(1e-5, statistics.median(messages))
    return Delays(
        message_s=message_s,
        request_s=max(0.0, least - slope * low),
        request_token_s=slope,
        answer_s=max(0.0, statistics.median(answers) - message_s),
    )


def _handoff_s(traces: Sequence[Mapping[str, Any]]) -> float:
    """From the last chunk's end to the first decode step elsewhere; 0 if all stayed."""
    found = [each["handoff_ms"] / 1e3 for each in traces if each.get("handoff_ms") is not None]
    return statistics.median(found) if found else 0.0
