"""The states of a handoff on either side and their transitions; any other move is illegal.

Pure tables: `kv_transfer.handoff.source` and `kv_transfer.handoff.sink` act on the moves.
"""

from __future__ import annotations

from enum import StrEnum

from kv_transfer.handoff.key import IllegalMove


class SourceState(StrEnum):
    """The state of a handoff at the source."""

    ASKED_EARLY = "asked early"  # the sink's ask came before the prompt
    WAITING = "waiting"  # open, not asked for yet
    ASKED = "asked"  # open and asked for, not granted yet
    SENDING = "sending"  # open and granted
    DRAINING = "draining"  # no more writes are posted; some may be outstanding
    CLOSED = "closed"


class SourceEvent(StrEnum):
    """An event that changes the state at the source."""

    OPEN = "open"
    ASK = "be asked"
    GRANT = "grant"
    STOP = "stop"
    DRAINED = "drained"


_SOURCE_MOVES = {
    (SourceState.ASKED_EARLY, SourceEvent.OPEN): SourceState.ASKED,
    (SourceState.WAITING, SourceEvent.ASK): SourceState.ASKED,
    (SourceState.ASKED, SourceEvent.GRANT): SourceState.SENDING,
    (SourceState.ASKED_EARLY, SourceEvent.STOP): SourceState.DRAINING,
    (SourceState.WAITING, SourceEvent.STOP): SourceState.DRAINING,
    (SourceState.ASKED, SourceEvent.STOP): SourceState.DRAINING,
    (SourceState.SENDING, SourceEvent.STOP): SourceState.DRAINING,
    (SourceState.DRAINING, SourceEvent.DRAINED): SourceState.CLOSED,
}


def source_transition(state: SourceState, event: SourceEvent) -> SourceState:
    """The next state. Raises IllegalMove."""
    try:
        return _SOURCE_MOVES[state, event]
    except KeyError:
        raise IllegalMove(f"a source cannot {event} when {state}") from None


class SinkState(StrEnum):
    """The state of a handoff at the sink, from the grant on. An ask alone has no state."""

    GRANTED = "granted"  # wanted; the peer may write
    STOPPING = "stopping"  # a fetch: the peer was asked to stop; what arrived is wanted
    CLOSED_EARLY = "closed early"  # wanted; closed normally, notifications are still to come
    VERIFYING = "verifying"  # every block has arrived; the owner compares digests
    ABORTING = "aborting"  # not wanted; the peer may write until it answers
    LANDING = "landing"  # not wanted; posted writes may land until a deadline
    ENDED = "ended"  # the fence is lifted


class SinkEvent(StrEnum):
    """An event that changes the state at the sink."""

    ARRIVED = "arrived"  # every block has arrived
    CHECK = "check"  # every block has arrived, and digests must be compared
    STOP = "stop"  # a fetch takes too long
    GIVE_UP = "give up"  # the blocks are no longer wanted
    CLOSE = "close"  # the peer writes no more, and all its writes have landed
    LOSE = "lose"  # the peer writes no more, but a posted write may still land
    EXPIRE = "expire"  # the time for landing is over


_SINK_MOVES = {
    (SinkState.GRANTED, SinkEvent.ARRIVED): SinkState.ENDED,
    (SinkState.GRANTED, SinkEvent.CHECK): SinkState.VERIFYING,
    (SinkState.GRANTED, SinkEvent.STOP): SinkState.STOPPING,
    (SinkState.GRANTED, SinkEvent.GIVE_UP): SinkState.ABORTING,
    (SinkState.GRANTED, SinkEvent.CLOSE): SinkState.CLOSED_EARLY,
    (SinkState.GRANTED, SinkEvent.LOSE): SinkState.LANDING,
    (SinkState.STOPPING, SinkEvent.ARRIVED): SinkState.ENDED,
    (SinkState.STOPPING, SinkEvent.CHECK): SinkState.VERIFYING,
    (SinkState.STOPPING, SinkEvent.CLOSE): SinkState.ENDED,
    (SinkState.STOPPING, SinkEvent.GIVE_UP): SinkState.ABORTING,
    (SinkState.STOPPING, SinkEvent.LOSE): SinkState.LANDING,
    (SinkState.CLOSED_EARLY, SinkEvent.ARRIVED): SinkState.ENDED,
    (SinkState.CLOSED_EARLY, SinkEvent.CHECK): SinkState.VERIFYING,
    (SinkState.CLOSED_EARLY, SinkEvent.GIVE_UP): SinkState.ENDED,
    (SinkState.CLOSED_EARLY, SinkEvent.EXPIRE): SinkState.ENDED,
    (SinkState.VERIFYING, SinkEvent.ARRIVED): SinkState.ENDED,
    (SinkState.VERIFYING, SinkEvent.GIVE_UP): SinkState.ENDED,
    (SinkState.ABORTING, SinkEvent.ARRIVED): SinkState.ENDED,
    (SinkState.ABORTING, SinkEvent.CLOSE): SinkState.ENDED,
    (SinkState.ABORTING, SinkEvent.LOSE): SinkState.LANDING,
    (SinkState.LANDING, SinkEvent.ARRIVED): SinkState.ENDED,
    (SinkState.LANDING, SinkEvent.EXPIRE): SinkState.ENDED,
}


def sink_transition(state: SinkState, event: SinkEvent) -> SinkState:
    """The next state. Raises IllegalMove."""
    try:
        return _SINK_MOVES[state, event]
    except KeyError:
        raise IllegalMove(f"a sink cannot {event} when {state}") from None
