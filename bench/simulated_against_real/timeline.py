"""Every step of each worker, put together from the traces of the requests that it served.

A request's trace has the steps that computed its chunks and its tokens, so the traces of all
requests that a worker served give the work of each step. A worker computes one step at a time. The
times of one step differ a little between traces, because the router shifts traces to its own clock.
"""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from bench.replay.player import Played
from scheduling.step_model import attended_pairs
from simulator.devices.step_times import ChunkWork

_SHORT_PAUSE_S = 0.001
"""A worker whose next step begins after at most this pause had work meanwhile."""

Traced = Sequence[tuple[Played, Mapping[str, Any]]]
"""Requests with their traces."""


@dataclass
class TimedStep:
    """A step of a worker from `start` to `end`, in seconds since the Unix epoch: `rows` sequences
    with `context` tokens in all decoded, beside prompt chunks of `num_tokens` tokens with `pairs`
    of queries and keys. `goes_on` if one of its requests had work behind it. `seconds` last until
    the begin of the next step."""

    worker: str
    start: float
    end: float
    rows: int = 0
    context: int = 0
    num_tokens: int = 0
    pairs: int = 0
    goes_on: bool = False
    seconds: float = 0.0

    def add(self, other: TimedStep) -> None:
        """Add the work of another request in the same step."""
        self.rows += other.rows
        self.context += other.context
        self.num_tokens += other.num_tokens
        self.pairs += other.pairs
        self.goes_on |= other.goes_on

    @property
    def chunks(self) -> ChunkWork:
        """The prompt chunks of the step."""
        return ChunkWork(self.num_tokens, self.pairs)


class Timeline:
    """The steps of all workers, each worker's in their order. `turn_s` is the usual time between
    two steps of a worker that has work; it counts behind steps that no other one followed."""

    def __init__(self, traced: Traced) -> None:
        self._by_worker: dict[str, list[TimedStep]] = {}
        for part in sorted(_parts(traced), key=lambda each: each.start):
            steps = self._by_worker.setdefault(part.worker, [])
            if steps and part.start < (steps[-1].start + steps[-1].end) / 2:
                steps[-1].add(part)
            else:
                steps.append(part)
        self._spans = {worker: _spans(steps) for worker, steps in self._by_worker.items()}
        turns = [
            later.start - step.end
            for steps in self._by_worker.values()
            for step, later in pairwise(steps)
            if step.goes_on
        ]
        self.turn_s = max(0.0, statistics.median(turns)) if turns else 0.0
        for steps in self._by_worker.values():
            _time(steps, self.turn_s)

    @property
    def steps(self) -> Iterator[TimedStep]:
        """The steps, worker by worker."""
        for steps in self._by_worker.values():
            yield from steps

    def number(self, at: float, besides: str = "") -> int:
        """The workers that had work at a time, besides the one with this name."""
        return sum(self.is_under_way(worker, at) for worker in self._spans if worker != besides)

    def is_under_way(self, worker: str, at: float) -> bool:
        """Whether a worker had work at a time."""
        starts, ends = self._spans.get(worker, ((), ()))
        index = bisect_right(starts, at) - 1
        return index >= 0 and at < ends[index]


def _parts(traced: Traced) -> Iterator[TimedStep]:
    """The steps of each request, with its own work."""
    for played, trace in traced:
        attempt = trace["attempts"][-1]
        prompt, decode = attempt["prefill"] or attempt["decode"], attempt["decode"]
        own: list[TimedStep] = []
        done = prompt["cached_tokens"]
        for start_us, end_us, tokens in prompt["chunks"]:
            pairs = attended_pairs(tokens, done)
            own.append(_bare(prompt, start_us, end_us))
            own[-1].num_tokens, own[-1].pairs = tokens, pairs
            done += tokens
        context = played.num_prompt + 1
        for start_us, end_us, _, num_steps, _ in decode["steps"] if decode else ():
            own.append(_bare(decode, start_us, end_us))
            own[-1].rows, own[-1].context = 1, context
            context += num_steps
        for each, later in pairwise(own):
            each.goes_on = each.worker == later.worker
        yield from own


def _bare(worker: Mapping[str, Any], start_us: int, end_us: int) -> TimedStep:
    return TimedStep(worker["worker_id"], start_us / 1e6, end_us / 1e6)


def _time(steps: Sequence[TimedStep], turn_s: float) -> None:
    for step in steps:
        step.seconds = step.end - step.start + turn_s
    for step, later in pairwise(steps):
        if step.goes_on:
            step.seconds = max(0.0, later.start - step.start)


def _spans(steps: Sequence[TimedStep]) -> tuple[list[float], list[float]]:
    """Begins and ends of the spans in which a worker had work."""
    starts, ends = [steps[0].start], list[float]()
    for step, later in pairwise(steps):
        if not step.goes_on and later.start - step.end > _SHORT_PAUSE_S:
            ends.append(step.end)
            starts.append(later.start)
    return starts, [*ends, steps[-1].end]
