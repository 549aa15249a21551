"""The events of a process's flight recorder: short notes about requests, steps and peers.

Times are microseconds since the Unix epoch, by the clock of the process that recorded the event.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from protocol.field_bounds import Count, RequestId, Signed, Text


class FlightKind(StrEnum):
    """What happened. The brackets say what the event's `number` and `tokens` count."""

    STEP = "step"
    """The worker ran a step (sequences that decoded, prompt tokens)."""
    RECEIVED = "received"
    """A request arrived (tokens of its prompt)."""
    SCHEDULED = "scheduled"
    """The first chunk of a prompt is about to run (cached tokens)."""
    ADMITTED = "admitted"
    """A decode worker reserved blocks for a request (its blocks, cached tokens)."""
    CHUNK = "chunk"
    """A chunk of a prompt was computed (tokens)."""
    WRITE = "write"
    """Blocks were written to a decode worker (blocks)."""
    ARRIVED = "arrived"
    """All granted blocks have arrived from a prefill worker (blocks)."""
    FETCH = "fetch"
    """Leading blocks were requested from a worker that holds them (blocks)."""
    FETCHED = "fetched"
    """Requested leading blocks have arrived (blocks)."""
    FETCH_LEFT = "fetch_left"
    """The worker failed or fell silent, so the request waits again; the text says why."""
    FIRST_TOKEN = "first_token"
    """The first token was chosen, or came from the prefill worker."""
    PREEMPTED = "preempted"
    """A sequence lost its blocks to an older one."""
    HANDED_OVER = "handed_over"
    """A draining worker passed a request on."""
    ABORTED = "aborted"
    """The router, or a peer, no longer wants an attempt."""
    FAILED = "failed"
    """An attempt failed; the text says why."""
    FINISHED = "finished"
    """An attempt ended well (output tokens)."""
    PLACED = "placed"
    """The router chose workers for an attempt; the text names them."""
    REFUSED = "refused"
    """The router refused a request before its first attempt."""
    LAGGED = "lagged"
    """The event loop of the router ran a timer late, by the event's duration."""
    FLEET = "fleet"
    """A worker came, went or drained, a setting changed, or a lease lapsed."""


class FlightEvent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One event. `duration_us` is 0 for an instant; `request_id` "" if no request is concerned."""

    at_us: Signed
    duration_us: Count
    kind: FlightKind
    request_id: RequestId = ""
    attempt: Signed = 0
    number: Signed = 0
    tokens: Signed = 0
    text: Text = ""
