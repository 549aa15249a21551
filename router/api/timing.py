"""Where one answer's time went, for a client that sends `x-baton-timing: 1`.

A short form of the trace that operators see. Workers send their traces with the last tokens, so
the answer never waits for a trace. A value is null if the phase did not happen, or if the router
ended the generation before the worker finished (the router found a stop string).
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from msgspec import Struct

from router.requests.trace import RequestTrace

TIMING_HEADER = "x-baton-timing"


class PlacementShown(Struct, frozen=True):
    """Where the last attempt ran, and why. `mode` is "local" or "remote"."""

    mode: str
    prefill: str | None
    decode: str
    reason: str


class ChoiceTiming(Struct, frozen=True):
    """Durations of one choice in ms: of its last attempt, except for `ttft_ms` and `decode_ms`.

    `index` is its place in the answer; None for a `best_of` candidate that is not returned.
    """

    index: int | None
    placement: PlacementShown | None
    num_attempts: int
    ttft_ms: float | None
    queue_ms: float | None
    prefill_ms: float | None
    handoff_ms: float | None
    decode_ms: float | None


class Timing(Struct, frozen=True):
    """The `baton` object of an answer, or of a stream's last chunk."""

    choices: list[ChoiceTiming]


TraceLookup = Callable[[str], RequestTrace | None]
"""Looks up the trace of a generation by its id."""


def choice_timing(index: int | None, trace: RequestTrace) -> ChoiceTiming:
    """The timing of a choice, from its trace so far."""
    spans = trace.durations()
    placement = None
    if trace.attempts:
        last = trace.attempts[-1].placement
        prefill = last.prefill.worker_id if last.prefill else None
        placement = PlacementShown(last.mode.value, prefill, last.decode.worker_id, last.reason)
    return ChoiceTiming(
        index=index,
        placement=placement,
        num_attempts=len(trace.attempts),
        ttft_ms=spans["ttft_ms"],
        queue_ms=spans["queue_ms"],
        prefill_ms=spans["prefill_ms"],
        handoff_ms=spans["handoff_ms"],
        decode_ms=spans["decode_ms"],
    )


def add_timing(document: bytes, timing: Timing) -> bytes:
    """Adds the field `baton` to the JSON object, or to the last one of several events."""
    end = document.rindex(b"}")
    return document[:end] + b',"baton":' + msgspec.json.encode(timing) + document[end:]
