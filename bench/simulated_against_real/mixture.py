"""What a fleet's processes do to each other, measured under a load of its own: delays and the
factors by which steps take longer than predicted, by the number of workers that compute.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from bench.replay.player import Played
from bench.simulated_against_real.timeline import TimedStep, Timeline, Traced
from simulator.delays import ByComputing, MeasuredDelays
from simulator.devices.measured_steps import TabledSteps
from simulator.devices.step_noise import Classes, Factors, StepNoise

_LEAST_SAMPLES = 10
_MOST_CLASSES, _LEAST_OF_CLASS = 6, 20
"""Classes of steps by their predicted time, and the least number of steps of each."""


@dataclass(frozen=True)
class _Course:
    """The times of a request, by the wall clock: its chunks on the worker `prompt`, steps from
    `first_step` until `last_step` on the worker `decode`."""

    sent: float
    placed: float
    begun: float
    done: float
    first_token: float
    first_step: float
    last_step: float
    end: float
    prompt: str
    decode: str


class Mixture:
    """Loads that were played one after the other, each from a begin on in seconds since the Unix
    epoch."""

    def __init__(self, played: Sequence[tuple[Traced, float]]) -> None:
        self._pieces = [
            (Timeline(traced), [_course(one, trace, began) for one, trace in traced])
            for traced, began in played
        ]

    @property
    def turn_s(self) -> float:
        """The time between two steps of a worker that has work, the mean of the loads."""
        return math.fsum(each.turn_s for each, _ in self._pieces) / len(self._pieces)

    @property
    def handoff_s(self) -> float:
        """The mean time from the turn's end behind a prompt until its first decode step on another
        worker; 0 if all prompts stayed."""
        found = [
            max(0.0, each.first_step - each.done - timeline.turn_s)
            for timeline, courses in self._pieces
            for each in courses
            if each.prompt != each.decode and each.first_step > each.done
        ]
        return math.fsum(found) / len(found) if found else 0.0

    def delays(self) -> MeasuredDelays:
        """The delays of the loads' requests. Those behind a step begin with the turn's end."""
        placing, sending, first, last = (defaultdict[int, list[float]](list) for _ in range(4))
        for timeline, courses in self._pieces:
            for each in courses:
                placing[timeline.number(each.sent)].append(each.placed - each.sent)
                if not timeline.is_under_way(each.prompt, each.placed):
                    number = timeline.number(each.placed, each.prompt)
                    sending[number].append(each.begun - each.placed)
                number = timeline.number(each.done, each.prompt)
                first[number].append(each.first_token - each.done - timeline.turn_s)
                number = timeline.number(each.last_step, each.decode)
                last[number].append(each.end - each.last_step - timeline.turn_s)
        return MeasuredDelays(*map(_by_computing, (placing, sending, first, last)))

    def noise(self, times: TabledSteps) -> StepNoise:
        """By what factors steps took longer than those times."""
        chunks, decodes = list[_Factor](), list[_Factor]()
        for timeline, _ in self._pieces:
            for step in timeline.steps:
                predicted_s = _predicted_s(step, times)
                factor = step.seconds / predicted_s
                found = _Factor(predicted_s, timeline.number(step.start, step.worker), factor)
                (chunks if step.num_tokens else decodes).append(found)
        return StepNoise(_classes(chunks), _classes(decodes))


class _Factor(NamedTuple):
    predicted_s: float
    num_computing: int
    factor: float


def _classes(factors: Sequence[_Factor]) -> Classes:
    """Classes of steps that take about equally long in all. Equally long steps are in one class."""
    of_class_s = math.fsum(each.predicted_s for each in factors) / _MOST_CLASSES
    rising = sorted(factors, key=lambda each: each.predicted_s)
    found: list[tuple[float, Factors]] = []
    members, sum_s = list[_Factor](), 0.0
    for number, each in enumerate(rising, 1):
        members.append(each)
        sum_s += each.predicted_s
        num_left = len(rising) - number
        is_full = len(members) >= _LEAST_OF_CLASS and sum_s >= of_class_s
        may_end = num_left >= _LEAST_OF_CLASS and rising[number].predicted_s > each.predicted_s
        if not num_left or (is_full and may_end):
            by_number = defaultdict[int, list[float]](list)
            for member in members:
                by_number[member.num_computing].append(member.factor)
            found.append((each.predicted_s, _by_computing(by_number)))
            members, sum_s = [], 0.0
    return tuple(found)


def _predicted_s(step: TimedStep, times: TabledSteps) -> float:
    if step.num_tokens:
        return times.seconds(step.rows, step.context, step.chunks)
    fixed_s, slope_s = times.decode_line(step.rows)
    return fixed_s + slope_s * step.context


def _course(played: Played, trace: Mapping[str, Any], began_wall_s: float) -> _Course:
    attempt = trace["attempts"][-1]
    prompt, decode = attempt["prefill"] or attempt["decode"], attempt["decode"]
    chunks, steps = prompt["chunks"], decode["steps"] if decode else []
    done = chunks[-1][1] / 1e6
    return _Course(
        sent=began_wall_s + played.sent,
        placed=attempt["started_us"] / 1e6,
        begun=chunks[0][0] / 1e6,
        done=done,
        first_token=began_wall_s + played.first_token,
        first_step=steps[0][0] / 1e6 if steps else done,
        last_step=steps[-1][1] / 1e6 if steps else done,
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
