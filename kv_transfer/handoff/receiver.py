"""The decode side of handoffs: which of our blocks a peer may still write to.

Owns the fence around every block that was granted. Pure: each event returns the actions that the
owner must carry out; time is passed in, in seconds of any one clock. A timeout alone never lifts
a fence. The fence is lifted, exactly once per handoff, when every block has arrived (a sender
writes each at most once), when the peer closed normally, or `landing_s` after the peer closed with
an error or was found dead: by then its posted writes have landed. Renewals and aborts are repeated
until the peer answers, so a lost message costs only time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kv_transfer.handoff.key import ClosedHandoffs, HandoffKey, IllegalMove, key_of
from kv_transfer.handoff.states import ReceiverEvent, ReceiverState, receiver_transition
from protocol.messages import KvClosed, KvGrant, KvRenew, KvWritten

_REMEMBERED = 8192
_WANTED = (ReceiverState.GRANTED, ReceiverState.CLOSED_EARLY)
_TIMED = (ReceiverState.CLOSED_EARLY, ReceiverState.LANDING)


@dataclass(frozen=True)
class SendGrant:
    """Send this to the prefill worker `peer`."""

    peer: str
    grant: KvGrant


@dataclass(frozen=True)
class SendRenew:
    """Send this to the prefill worker `peer`."""

    peer: str
    renew: KvRenew


@dataclass(frozen=True)
class SendAbort:
    """Ask the prefill worker `peer` to stop and to answer with KvClosed."""

    key: HandoffKey
    peer: str


@dataclass(frozen=True)
class Verify:
    """Every block has arrived: compare digests and answer with `verified`."""

    key: HandoffKey
    blocks: tuple[int, ...]
    digests: tuple[bytes, ...]


@dataclass(frozen=True)
class Complete:
    """Every granted block holds its data."""

    key: HandoffKey


@dataclass(frozen=True)
class Failed:
    """The attempt is over. `arrived`: prompt indices of the granted blocks that hold their data."""

    key: HandoffKey
    reason: str
    arrived: tuple[int, ...]


@dataclass(frozen=True)
class Unfence:
    """No peer can write to these blocks any more: the handoff's hold on them ends."""

    key: HandoffKey
    block_ids: tuple[int, ...]


ReceiverAction = SendGrant | SendRenew | SendAbort | Verify | Complete | Failed | Unfence


@dataclass
class _Handoff:
    state: ReceiverState
    peer: str
    first_block: int
    block_ids: tuple[int, ...]
    next_send: float  # when to send the next renewal or abort
    landed_at: float = 0.0  # in the timed states: when no write can land any more
    digests: dict[int, bytes] = field(default_factory=dict)  # of arrived blocks, by prompt index

    @property
    def end_block(self) -> int:
        return self.first_block + len(self.block_ids)

    @property
    def is_complete(self) -> bool:
        return len(self.digests) == len(self.block_ids)


class HandoffReceiver:
    """All handoffs of a decode worker. `ignored` counts events that belong to none of them;
    `blocks_received` counts the blocks that arrived, each once."""

    def __init__(self, agent: str, ttl_s: float, landing_s: float, checksum: bool = False) -> None:
        """Grants name our `agent` and live `ttl_s`; a posted write lands within `landing_s`."""
        self.ignored = 0
        self.blocks_received = 0
        self._agent = agent
        self._ttl_ms = max(1, round(ttl_s * 1000))
        self._interval_s = ttl_s / 3
        self._landing_s = landing_s
        self._checksum = checksum
        self._handoffs: dict[HandoffKey, _Handoff] = {}
        self._ended = ClosedHandoffs(_REMEMBERED)

    @property
    def num_open(self) -> int:
        """Handoffs whose fence is still up."""
        return len(self._handoffs)

    @property
    def num_fenced_blocks(self) -> int:
        """Blocks that a peer may still write to."""
        return sum(len(handoff.block_ids) for handoff in self._handoffs.values())

    def is_open(self, key: HandoffKey) -> bool:
        """Whether the handoff's blocks are still behind their fence."""
        return key in self._handoffs

    def is_known(self, key: HandoffKey) -> bool:
        """Whether the handoff was offered before and so cannot be offered again."""
        return key in self._handoffs or self._ended.error_of(key) is not None

    def arrived(self, key: HandoffKey) -> tuple[int, ...]:
        """Prompt indices of the granted blocks of an open handoff that already hold their data.

        Their contents no longer change, because a sender writes each block at most once.
        """
        handoff = self._handoffs.get(key)
        return () if handoff is None else self._arrived(handoff)

    # -- calls by the decode worker itself -----------------------------------------------

    def offer(
        self, key: HandoffKey, peer: str, first_block: int, block_ids: Sequence[int], now: float
    ) -> list[ReceiverAction]:
        """Grant our blocks to prefill worker `peer`, for the prompt blocks from `first_block` on.

        Without blocks the handoff is complete at once; the peer still needs the grant, so that it
        can release its own blocks.
        """
        if key in self._handoffs or self._ended.error_of(key) is not None:
            raise IllegalMove(f"handoff {key} is offered twice")
        handoff = _Handoff(
            ReceiverState.GRANTED, peer, first_block, tuple(block_ids), now + self._interval_s
        )
        self._handoffs[key] = handoff
        grant = KvGrant(
            request_id=key.request_id,
            attempt=key.attempt,
            agent=self._agent,
            first_block=first_block,
            block_ids=list(block_ids),
            ttl_ms=self._ttl_ms,
        )
        actions: list[ReceiverAction] = [SendGrant(peer, grant)]
        if not block_ids:
            actions += self._end(key, handoff, ReceiverEvent.ARRIVED, Complete(key))
        return actions

    def verified(self, key: HandoffKey, ok: bool) -> list[ReceiverAction]:
        """The answer to Verify."""
        handoff = self._handoffs.get(key)
        if handoff is None or handoff.state is not ReceiverState.VERIFYING:
            self.ignored += 1
            return []
        if ok:
            return self._end(key, handoff, ReceiverEvent.ARRIVED, Complete(key))
        failed = Failed(key, "the digest of a block differs", ())
        return self._end(key, handoff, ReceiverEvent.GIVE_UP, failed)

    def abort(self, key: HandoffKey) -> list[ReceiverAction]:
        """The blocks are no longer wanted; they stay fenced until Unfence."""
        handoff = self._handoffs.get(key)
        if handoff is None:
            self.ignored += 1
            return []
        if handoff.state is ReceiverState.GRANTED:
            return self._ask_to_stop(key, handoff)
        if handoff.state in (ReceiverState.CLOSED_EARLY, ReceiverState.VERIFYING):
            return self._end(key, handoff, ReceiverEvent.GIVE_UP)
        return []

    def sweep(self, now: float) -> list[ReceiverAction]:
        """Renew grants of wanted handoffs, repeat aborts, and lift the fences that are due."""
        actions: list[ReceiverAction] = []
        for key, handoff in list(self._handoffs.items()):
            if handoff.state in _TIMED and now >= handoff.landed_at:
                actions += self._expire(key, handoff)
            elif now >= handoff.next_send:
                handoff.next_send = now + self._interval_s
                if handoff.state is ReceiverState.GRANTED:
                    actions.append(SendRenew(handoff.peer, self._renew(key)))
                elif handoff.state is ReceiverState.ABORTING:
                    actions.append(SendAbort(key, handoff.peer))
        return actions

    # -- messages of prefill workers -----------------------------------------------------

    def written(self, written: KvWritten) -> list[ReceiverAction]:
        """A notification: these blocks have landed. A repeated notification changes nothing."""
        key = key_of(written)
        handoff = self._handoffs.get(key)
        if handoff is None or handoff.state is ReceiverState.VERIFYING:
            self.ignored += 1
            return []
        end = written.first_block + written.num_blocks
        num_digests = written.num_blocks if self._checksum else 0
        if (
            not handoff.first_block <= written.first_block < end <= handoff.end_block
            or len(written.digests) != num_digests
        ):
            return self._distrust(key, handoff)
        before = len(handoff.digests)
        for i, index in enumerate(range(written.first_block, end)):
            handoff.digests.setdefault(index, written.digests[i] if self._checksum else b"")
        self.blocks_received += len(handoff.digests) - before
        return self._finish(key, handoff) if handoff.is_complete else []

    def closed(self, closed: KvClosed, now: float) -> list[ReceiverAction]:
        """The peer posts no more writes; with an error, one of its writes may still land."""
        key = key_of(closed)
        handoff = self._handoffs.get(key)
        if handoff is None:
            if self._ended.error_of(key) is None:
                self.ignored += 1
            return []
        if handoff.state not in (ReceiverState.GRANTED, ReceiverState.ABORTING):
            return []
        if closed.error:
            return self._lose(key, handoff, closed.error, now)
        if handoff.state is ReceiverState.ABORTING:
            return self._end(key, handoff, ReceiverEvent.CLOSE)
        handoff.state = receiver_transition(handoff.state, ReceiverEvent.CLOSE)
        handoff.landed_at = now + self._landing_s
        return []

    def agent_gone(self, peer: str, now: float) -> list[ReceiverAction]:
        """The process of a prefill worker is dead: connection lost and lease expired."""
        actions: list[ReceiverAction] = []
        for key, handoff in list(self._handoffs.items()):
            if handoff.peer == peer and handoff.state in (
                ReceiverState.GRANTED,
                ReceiverState.ABORTING,
            ):
                actions += self._lose(key, handoff, "the prefill worker is gone", now)
        return actions

    # -- steps ---------------------------------------------------------------------------

    def _finish(self, key: HandoffKey, handoff: _Handoff) -> list[ReceiverAction]:
        """Every block has arrived."""
        if handoff.state not in _WANTED:
            return self._end(key, handoff, ReceiverEvent.ARRIVED)
        if not self._checksum:
            return self._end(key, handoff, ReceiverEvent.ARRIVED, Complete(key))
        handoff.state = receiver_transition(handoff.state, ReceiverEvent.CHECK)
        digests = tuple(digest for _, digest in sorted(handoff.digests.items()))
        return [Verify(key, handoff.block_ids, digests)]

    def _distrust(self, key: HandoffKey, handoff: _Handoff) -> list[ReceiverAction]:
        """The peer reports blocks that it was not granted: none of its data counts."""
        failed = Failed(key, "the prefill worker reports blocks that it was not granted", ())
        handoff.digests.clear()
        if handoff.state is ReceiverState.GRANTED:
            return [failed, *self._ask_to_stop(key, handoff)]
        if handoff.state is ReceiverState.CLOSED_EARLY:
            return self._end(key, handoff, ReceiverEvent.GIVE_UP, failed)
        self.ignored += 1
        return []

    def _ask_to_stop(self, key: HandoffKey, handoff: _Handoff) -> list[ReceiverAction]:
        handoff.state = receiver_transition(handoff.state, ReceiverEvent.GIVE_UP)
        return [SendAbort(key, handoff.peer)]

    def _lose(
        self, key: HandoffKey, handoff: _Handoff, reason: str, now: float
    ) -> list[ReceiverAction]:
        """Fail the handoff now if it was wanted, but keep the fence until no write can land."""
        wanted = handoff.state in _WANTED
        handoff.state = receiver_transition(handoff.state, ReceiverEvent.LOSE)
        handoff.landed_at = now + self._landing_s
        return [Failed(key, reason, self._arrived(handoff))] if wanted else []

    def _expire(self, key: HandoffKey, handoff: _Handoff) -> list[ReceiverAction]:
        if handoff.state is ReceiverState.LANDING:
            return self._end(key, handoff, ReceiverEvent.EXPIRE)
        reason = "the prefill worker closed before every block had arrived"
        failed = Failed(key, reason, self._arrived(handoff))
        return self._end(key, handoff, ReceiverEvent.EXPIRE, failed)

    def _end(
        self,
        key: HandoffKey,
        handoff: _Handoff,
        event: ReceiverEvent,
        outcome: Complete | Failed | None = None,
    ) -> list[ReceiverAction]:
        """Lift the fence, after reporting `outcome` if there is one."""
        handoff.state = receiver_transition(handoff.state, event)
        del self._handoffs[key]
        self._ended.remember(key, "")
        unfence = Unfence(key, handoff.block_ids)
        return [unfence] if outcome is None else [outcome, unfence]

    def _arrived(self, handoff: _Handoff) -> tuple[int, ...]:
        """The blocks that a later attempt need not send; unverified blocks do not count."""
        return () if self._checksum else tuple(sorted(handoff.digests))

    def _renew(self, key: HandoffKey) -> KvRenew:
        return KvRenew(request_id=key.request_id, attempt=key.attempt, ttl_ms=self._ttl_ms)
