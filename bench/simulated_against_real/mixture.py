"""What a fleet's processes do to each other, measured under a load of its own: delays by the number
of workers that compute, and how much longer steps take beside other workers' steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from bench.replay.player import Played
from bench.simulated_against_real.computing import Computing, Traced, timed_decodes
from simulator.delays import ByComputing, MeasuredDelays
from simulator.devices.measured_steps import TabledSteps
from simulator.devices.step_times import ChunkWork

_LEAST_SAMPLES = 10


@dataclass(frozen=True)
class _Course:
    """The times of a request, by the wall clock: `chunks` on the worker `prompt`, steps until
    `last_step` on the worker `decode`."""

    sent: float
    placed: float
    chunks: list[tuple[float, float, int]]
    first_token: float
    last_step: float
    end: float
    prompt: str
    decode: str


class _Step(NamedTuple):
    """A step of a worker by the wall clock, the seconds that it took, and those that a table has
    for it."""

    worker: str
    start: float
    end: float
    took_s: float
    expected_s: float


class Mixture:
    """A load that was played, from `began_wall_s` on, in seconds since the Unix epoch."""

    def __init__(self, traced: Traced, began_wall_s: float) -> None:
        self._courses = [_course(played, trace, began_wall_s) for played, trace in traced]
        self._traced = traced
        self._computing = Computing([trace for _, trace in traced])

    def delays(self) -> MeasuredDelays:
        """The delays of the load's requests."""
        placing, sending, first, last = (defaultdict[int, list[float]](list) for _ in range(4))
        for each in self._courses:
            placing[self._computing.number(each.sent)].append(each.placed - each.sent)
            if not self._computing.is_under_way(each.prompt, each.placed):
                number = self._computing.number(each.placed, each.prompt)
                sending[number].append(each.chunks[0][0] - each.placed)
            done = each.chunks[-1][1]
            first[self._computing.number(done, each.prompt)].append(each.first_token - done)
            number = self._computing.number(each.last_step, each.decode)
            last[number].append(each.end - each.last_step)
        return MeasuredDelays(*map(_by_computing, (placing, sending, first, last)))

    def contention(self, times: TabledSteps) -> float:
        """The share by which chunks took longer, in all, while another worker computed, than while
        none did."""
        alone, beside = self._ratios(self._chunks(times))
        return min(1.0, max(0.0, beside / alone - 1.0))

    def decodes(self, times: TabledSteps) -> tuple[float, float]:
        """By what factor decodes took longer than those times while no other worker computed, and
        by what share they took longer still, in all, while one did."""
        alone, beside = self._ratios(self._decodes(times))
        return alone, max(0.0, beside / alone - 1.0)

    def _ratios(self, steps: Iterable[_Step]) -> tuple[float, float]:
        """By what factor steps took longer than expected, in all: those during which no other
        worker computed, and those during which one did all the time."""
        took, expected = {True: 0.0, False: 0.0}, {True: 0.0, False: 0.0}
        for each in steps:
            share = self._computing.share_beside(each.worker, each.start, each.end)
            if share in (0.0, 1.0):
                took[share == 1.0] += each.took_s
                expected[share == 1.0] += each.expected_s
        if not expected[False]:
            return 1.0, 1.0
        alone = took[False] / expected[False]
        return alone, took[True] / expected[True] if expected[True] else alone

    def _chunks(self, times: TabledSteps) -> Iterator[_Step]:
        for each in self._courses:
            done = 0
            for start, end, tokens in each.chunks:
                pairs = done * tokens + tokens * (tokens + 1) // 2
                expected_s = times.seconds(0, 0, ChunkWork(tokens, pairs, done + tokens))
                yield _Step(each.prompt, start, end, end - start, expected_s)
                done += tokens

    def _decodes(self, times: TabledSteps) -> Iterator[_Step]:
        for course, (played, trace) in zip(self._courses, self._traced, strict=True):
            for each in timed_decodes(played, trace):
                fixed_s, slope_s = times.decode_line(each.rows)
                expected_s = fixed_s + slope_s * each.context
                yield _Step(course.decode, each.start, each.end, each.seconds, expected_s)


def _course(played: Played, trace: Mapping[str, Any], began_wall_s: float) -> _Course:
    attempt = trace["attempts"][-1]
    prompt, decode = attempt["prefill"] or attempt["decode"], attempt["decode"]
    chunks = [(start / 1e6, end / 1e6, tokens) for start, end, tokens in prompt["chunks"]]
    steps = decode["steps"] if decode else []
    return _Course(
        sent=began_wall_s + played.sent,
        placed=attempt["started_us"] / 1e6,
        chunks=chunks,
        first_token=began_wall_s + played.first_token,
        last_step=steps[-1][1] / 1e6 if steps else chunks[-1][1],
        end=began_wall_s + played.end,
        prompt=prompt["worker_id"],
        decode=(decode or prompt)["worker_id"],
    )


def _by_computing(found: Mapping[int, Sequence[float]]) -> ByComputing:
    """The samples by number. A number with few samples gets those of the number below, too; the
    numbers below the lowest one get that one's."""
    lowest, highest = min(found), max(found)
    samples = [sorted(max(0.0, each) for each in found[lowest])] * (lowest + 1)
    for number in range(lowest + 1, highest + 1):
        own = [max(0.0, each) for each in found.get(number, ())]
        if len(own) < _LEAST_SAMPLES:
            own += samples[-1]
        samples.append(sorted(own))
    return tuple(map(tuple, samples))
