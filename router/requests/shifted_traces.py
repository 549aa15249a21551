"""Workers' traces, shifted to the router's clock.

A trace is shifted by the measured offset of its worker's clock. Times that still contradict cause
and effect (a message received before it was sent) are moved, at most by the error of that
measurement. Pure.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from protocol.traces import ChunkSpan, DecodeTrace, GapSpan, PrefillTrace, WriteSpan
from router.fleet.clock_offset import ClockReading

T = TypeVar("T", PrefillTrace, DecodeTrace)


def shifted(trace: T, clock: ClockReading, not_before_us: int, not_after_us: int) -> T:
    """The trace by our clock, with all times moved between these marks (0: not known)."""
    moved = _moved(trace, -clock.offset_us)
    times = _times(moved)
    if not times:
        return moved
    early = not_before_us - times[0] if not_before_us else 0
    late = times[-1] - not_after_us if not_after_us else 0
    if early > 0 and late <= 0:
        return _moved(moved, min(early, clock.error_us))
    if late > 0 and early <= 0:
        return _moved(moved, -min(late, clock.error_us))
    return moved


def _times(trace: PrefillTrace | DecodeTrace) -> list[int]:
    """The first and last times at which the trace meets the router: the receipt of the request, and
    the last token that the worker sent."""
    last = trace.chunks[-1].end_us if trace.chunks else 0
    if isinstance(trace, DecodeTrace):
        last = trace.finished_us or last
    return sorted(each for each in (trace.received_us, last) if each)


def _moved(trace: T, by_us: int) -> T:
    if by_us == 0:
        return trace

    def at(time_us: int) -> int:
        return time_us + by_us if time_us else 0

    chunks = tuple(ChunkSpan(at(c.start_us), at(c.end_us), c.num_tokens) for c in trace.chunks)
    if isinstance(trace, PrefillTrace):
        writes = [
            WriteSpan(at(w.post_us), at(w.done_us), w.num_blocks, w.chunk) for w in trace.writes
        ]
        return msgspec.structs.replace(
            trace,
            received_us=at(trace.received_us),
            scheduled_us=at(trace.scheduled_us),
            chunks=chunks,
            waits=tuple(_gap(each, by_us) for each in trace.waits),
            writes=tuple(writes),
        )
    names = (
        "received_us", "admitted_us", "blocks_arrived_us", "first_token_us", "first_step_us",
        "finished_us", "steps_since_us",
    )  # fmt: skip
    return msgspec.structs.replace(
        trace,
        chunks=chunks,
        stalls=tuple(_gap(each, by_us) for each in trace.stalls),
        **{name: at(getattr(trace, name)) for name in names},
    )


def _gap(gap: GapSpan, by_us: int) -> GapSpan:
    return GapSpan(gap.start_us + by_us, gap.end_us + by_us, gap.reason)
