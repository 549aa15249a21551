"""Where one answer's time went, for a client that asks with `x-baton-timing: 1`.

A short form of the trace that operators see. The workers' own traces come with the last tokens,
so nothing is waited for; what has no number did not happen, or its worker was not asked to the
end (a stop string was found here).
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
    """Milliseconds of one choice: of its last attempt, but for `ttft_ms` and `decode_ms`.

    `index` is its place in the answer; None of a candidate that was not the best.
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
"""Gives the trace of a generation by its id."""


def choice_timing(index: int | None, trace: RequestTrace) -> ChoiceTiming:
    """What a trace says now."""
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
    """The JSON object, or the last one of several events, with one more field, `baton`."""
    end = document.rindex(b"}")
    return document[:end] + b',"baton":' + msgspec.json.encode(timing) + document[end:]
