"""The simulator's description of a fleet, made from the traces of requests that it served. Pure."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bench.simulated_against_real.fleets import Timing
from bench.simulated_against_real.loads import LONGEST_SHORT, Costs
from bench.simulated_against_real.mixture import Mixture
from bench.simulated_against_real.timeline import TimedStep, Traced
from protocol.errors import BatonError
from scheduling.step_model import attended_pairs
from simulator.delays import Delays
from simulator.devices.measured_steps import Table, TabledSteps, table_value
from simulator.devices.step_noise import StepNoise

_LEAST_STEPS = 8


@dataclass(frozen=True)
class Profile:
    """The measurements of one kind of worker, its router and its links. A request takes
    `request_cpu_s` and `token_cpu_s` for each output token of the router and of the client, which
    share the workers' cores. `noise` and `turn_s` are those of `WorkerSpec`. Handoffs between
    workers took `handoff_s` on average in the traces `handoffs_of`, 0 if there were none; `link_s`
    is the latency of links."""

    times: TabledSteps
    delays: Delays
    handoff_s: float = 0.0
    handoffs_of: tuple[str, ...] = ()
    link_s: float = 2e-5
    request_cpu_s: float = 0.0
    token_cpu_s: float = 0.0
    turn_s: float = 0.0
    noise: StepNoise | None = None

    @property
    def costs(self) -> Costs:
        """The times that limit a load."""
        return Costs(self.times, self.request_cpu_s, self.token_cpu_s)

    @property
    def timing(self) -> Timing:
        """The times that the simulator needs."""
        return Timing(self.times, self.delays, self.link_s, self.turn_s, self.noise)

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


def with_mixture(bare: Profile, mixture: Mixture) -> Profile:
    """The profile with the mixture's delays, turns and noise. Its steps take as long as the
    mixture's did beside no other step."""
    times, measured = bare.times, mixture.delays()
    message_s = min(bare.delays.message_s, _low(measured.sending[0]), _low(measured.last[0]))
    return replace(
        bare,
        delays=replace(bare.delays, message_s=max(1e-5, message_s), measured=measured),
        noise=mixture.noise(times),
        turn_s=mixture.turn_s,
        handoff_s=mixture.handoff_s,
    )


def _low(samples: Sequence[float]) -> float:
    """The delay that only a tenth of the messages undercut."""
    return sorted(samples)[len(samples) // 10]


def chunk_table(steps: Iterable[TimedStep]) -> tuple[Table, float]:
    """Seconds by tokens, and by pair of a query and a key before the chunk, of steps in which
    nothing decodes."""
    first: dict[int, list[float]] = defaultdict(list)
    later: list[tuple[int, int, float]] = []
    for each in steps:
        done = (each.pairs - attended_pairs(each.num_tokens, 0)) // max(1, each.num_tokens)
        if each.rows or not each.num_tokens:
            continue
        if done:
            later.append((each.num_tokens, done, each.seconds))
        else:
            first[each.num_tokens].append(each.seconds)
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


def decode_table(steps: Iterable[TimedStep]) -> tuple[Table, float]:
    """Seconds by sequences, and by token of their contexts, of steps without chunks."""
    taken: dict[tuple[int, bool], list[tuple[float, float]]] = defaultdict(list)
    for each in steps:
        if each.goes_on and not each.num_tokens:
            is_long = each.context > each.rows * LONGEST_SHORT
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


def delays_of(began_wall_s: float, alone: Traced) -> Delays:
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


def _attempt(trace: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = trace["attempts"][-1]
    return found


def _chunks(trace: Mapping[str, Any]) -> list[tuple[float, float, int]]:
    """Begin, end and tokens of a prompt's chunks, by the router's clock."""
    attempt = _attempt(trace)
    worker = attempt["prefill"] or attempt["decode"]
    return [(start / 1e6, end / 1e6, tokens) for start, end, tokens in worker["chunks"]]
