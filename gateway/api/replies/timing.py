"""Where one answer's time went, for a client that sends `x-baton-timing: 1`.

A short form of the trace that operators see. A decode worker sends its trace with its last token, a
prefill worker with the first token; that message may arrive after all tokens of the decode worker.
The answer waits for no trace. A value is null in three cases: the phase did not happen, its
worker's trace has not arrived yet, or the router found a stop string and ended the generation
before the worker finished.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from router.requests.interface import ChosenWorkers, GenerationTiming

TIMING_HEADER = "x-baton-timing"


class ChoiceTiming(Struct, frozen=True):
    """Durations of one choice in ms: of its last attempt, except for `ttft_ms` and `decode_ms`.

    `index` is its place in the answer; None for a `best_of` candidate that is not returned.
    """

    index: int | None
    placement: ChosenWorkers | None
    num_attempts: int
    ttft_ms: float | None
    queue_ms: float | None
    prefill_ms: float | None
    handoff_ms: float | None
    decode_ms: float | None


class Timing(Struct, frozen=True):
    """The `baton` object of an answer, or of a stream's last chunk."""

    choices: list[ChoiceTiming]


def choice_timing(index: int | None, timing: GenerationTiming) -> ChoiceTiming:
    """The timing of a choice, from that of its generation so far."""
    return ChoiceTiming(index, **msgspec.structs.asdict(timing))


def add_timing(document: bytes, timing: Timing) -> bytes:
    """Adds the field `baton` to the JSON object, or to the last one of several events."""
    end = document.rindex(b"}")
    return document[:end] + b',"baton":' + msgspec.json.encode(timing) + document[end:]
