"""The states of a handoff on either side and their transitions; any other move is illegal.

Pure tables: `kv_transfer.handoff.sender` and `kv_transfer.handoff.receiver` act on the moves.
"""

from __future__ import annotations

from enum import StrEnum

from kv_transfer.handoff.key import IllegalMove


class SenderState(StrEnum):
    """State of a handoff on the prefill side."""

    ASKED_EARLY = "asked early"  # the decode worker's ask came before the prompt
    WAITING = "waiting"  # open, not asked for yet
    ASKED = "asked"  # open and asked for, not granted yet
    SENDING = "sending"  # open and granted
    DRAINING = "draining"  # no more writes are posted; some may be outstanding
    CLOSED = "closed"


class SenderEvent(StrEnum):
    """Event that changes the state on the prefill side."""

    OPEN = "open"
    ASK = "be asked"
    GRANT = "grant"
    STOP = "stop"
    DRAINED = "drained"


_SENDER_MOVES = {
    (SenderState.ASKED_EARLY, SenderEvent.OPEN): SenderState.ASKED,
    (SenderState.WAITING, SenderEvent.ASK): SenderState.ASKED,
    (SenderState.ASKED, SenderEvent.GRANT): SenderState.SENDING,
    (SenderState.ASKED_EARLY, SenderEvent.STOP): SenderState.DRAINING,
    (SenderState.WAITING, SenderEvent.STOP): SenderState.DRAINING,
    (SenderState.ASKED, SenderEvent.STOP): SenderState.DRAINING,
    (SenderState.SENDING, SenderEvent.STOP): SenderState.DRAINING,
    (SenderState.DRAINING, SenderEvent.DRAINED): SenderState.CLOSED,
}


def sender_transition(state: SenderState, event: SenderEvent) -> SenderState:
    """The next state. Raises IllegalMove."""
    try:
        return _SENDER_MOVES[state, event]
    except KeyError:
        raise IllegalMove(f"a sender cannot {event} when {state}") from None


class ReceiverState(StrEnum):
    """State of a handoff on the decode side, from the grant on; an ask alone has no state."""

    GRANTED = "granted"  # wanted; the peer may write
    CLOSED_EARLY = "closed early"  # wanted; closed normally, but notifications are on their way
    VERIFYING = "verifying"  # every block has arrived; the owner compares digests
    ABORTING = "aborting"  # not wanted; the peer may write until it answers
    LANDING = "landing"  # not wanted; posted writes may land until a deadline
    ENDED = "ended"  # the fence is lifted


class ReceiverEvent(StrEnum):
    """Event that changes the state on the decode side."""

    ARRIVED = "arrived"  # every block has arrived
    CHECK = "check"  # every block has arrived, and digests must be compared
    GIVE_UP = "give up"  # the blocks are no longer wanted
    CLOSE = "close"  # the peer writes no more, and all its writes have landed
    LOSE = "lose"  # the peer writes no more, but a posted write may still land
    EXPIRE = "expire"  # the time for landing is over


_RECEIVER_MOVES = {
    (ReceiverState.GRANTED, ReceiverEvent.ARRIVED): ReceiverState.ENDED,
    (ReceiverState.GRANTED, ReceiverEvent.CHECK): ReceiverState.VERIFYING,
    (ReceiverState.GRANTED, ReceiverEvent.GIVE_UP): ReceiverState.ABORTING,
    (ReceiverState.GRANTED, ReceiverEvent.CLOSE): ReceiverState.CLOSED_EARLY,
    (ReceiverState.GRANTED, ReceiverEvent.LOSE): ReceiverState.LANDING,
    (ReceiverState.CLOSED_EARLY, ReceiverEvent.ARRIVED): ReceiverState.ENDED,
    (ReceiverState.CLOSED_EARLY, ReceiverEvent.CHECK): ReceiverState.VERIFYING,
    (ReceiverState.CLOSED_EARLY, ReceiverEvent.GIVE_UP): ReceiverState.ENDED,
    (ReceiverState.CLOSED_EARLY, ReceiverEvent.EXPIRE): ReceiverState.ENDED,
    (ReceiverState.VERIFYING, ReceiverEvent.ARRIVED): ReceiverState.ENDED,
    (ReceiverState.VERIFYING, ReceiverEvent.GIVE_UP): ReceiverState.ENDED,
    (ReceiverState.ABORTING, ReceiverEvent.ARRIVED): ReceiverState.ENDED,
    (ReceiverState.ABORTING, ReceiverEvent.CLOSE): ReceiverState.ENDED,
    (ReceiverState.ABORTING, ReceiverEvent.LOSE): ReceiverState.LANDING,
    (ReceiverState.LANDING, ReceiverEvent.ARRIVED): ReceiverState.ENDED,
    (ReceiverState.LANDING, ReceiverEvent.EXPIRE): ReceiverState.ENDED,
}


def receiver_transition(state: ReceiverState, event: ReceiverEvent) -> ReceiverState:
    """The next state. Raises IllegalMove."""
    try:
        return _RECEIVER_MOVES[state, event]
    except KeyError:
        raise IllegalMove(f"a receiver cannot {event} when {state}") from None
