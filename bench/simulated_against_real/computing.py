"""When workers computed, and how long their decodes took, as the traces of requests tell."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from bench.replay.player import Played

Traced = Sequence[tuple[Played, Mapping[str, Any]]]
"""Requests with their traces."""


class Computing:
    """The spans in which each worker had work, in seconds since the Unix epoch."""

    def __init__(self, traces: Sequence[Mapping[str, Any]]) -> None:
        self._spans: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for trace in traces:
            attempt = trace["attempts"][-1]
            for worker in (attempt["prefill"], attempt["decode"]):
                spans = [*worker["chunks"], *worker.get("steps", ())] if worker else []
                if spans:
                    start, end = min(each[0] for each in spans), max(each[1] for each in spans)
                    self._spans[worker["worker_id"]].append((start / 1e6, end / 1e6))

    def number(self, at: float, besides: str = "") -> int:
        """The workers that had work at a time, besides the one with this name."""
        return sum(self.is_under_way(worker, at) for worker in self._spans if worker != besides)

    def is_under_way(self, worker: str, at: float) -> bool:
        """Whether a worker had work at a time."""
        return any(start <= at < end for start, end in self._spans[worker])

    def share_beside(self, worker: str, start: float, end: float) -> float:
        """The share of a span in which any other worker had work: exact if it is 0 or 1."""
        others = [
            (max(start, one), min(end, other))
            for name, spans in self._spans.items()
            if name != worker
            for one, other in spans
            if one < end and other > start
        ]
        covered, until = 0.0, start
        for one, other in sorted(others):
            covered += max(0.0, other - max(one, until))
            until = max(until, other)
        return 1.0 if math.isclose(covered, end - start) else covered / (end - start)


@dataclass(frozen=True)
class TimedDecode:
    """A step that only decodes, and is followed at once by one like it: it took `seconds` until
    that one's begin. `context` is that of its `rows` sequences, if all are as long as the request
    whose trace has it."""

    start: float
    end: float
    rows: int
    context: int
    seconds: float


def timed_decodes(played: Played, trace: Mapping[str, Any]) -> Iterator[TimedDecode]:
    """The decodes of a request, one for each entry of its trace."""
    context = played.num_prompt
    for step, later in pairwise(decode_steps(trace)):
        start, end, rows, count, tokens = step
        if not tokens and not later[4] and later[2] == rows and later[0] - end < 0.005:
            yield TimedDecode(start, end, rows, rows * context, (later[0] - start) / count)
        context += count


def decode_steps(trace: Mapping[str, Any]) -> list[tuple[float, float, int, int, int]]:
    """Begin, end, sequences, number of steps and prompt tokens of decode steps."""
    decode = trace["attempts"][-1]["decode"] or {"steps": []}
    return [(start / 1e6, end / 1e6, *rest) for start, end, *rest in decode["steps"]]
