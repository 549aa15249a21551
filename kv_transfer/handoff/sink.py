"""The sink side of handoffs: awaited blocks, and blocks that a peer may still write to.

A handoff starts with an ask, for which no block is reserved. The source answers Begun when it holds
every block of the prompt. Only then are blocks reserved and granted, so that memory of a sink never
waits for memory of a source. Owns the fence around every granted block. Pure: each event returns
the actions that the owner must carry out; time is passed in, in seconds of any one clock.

A timeout alone never lifts a fence. The fence is lifted, exactly once per handoff, when every block
has arrived (a source writes each at most once), when the peer closed normally, or `landing_s` after
the peer closed with an error or was found dead: by then its posted writes have landed. Asks,
renewals and aborts are repeated until they are answered, so a lost message costs only time.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import inf

from kv_transfer.handoff.actions import (
    Begun,
    Complete,
    Failed,
    Fetched,
    SendAbort,
    SendFetch,
    SendGrant,
    SendRenew,
    SinkAction,
    Unfence,
    Verify,
)
from kv_transfer.handoff.asks import Asks
from kv_transfer.handoff.grants import Grants, WantedBlocks
from kv_transfer.handoff.incoming import FetchLimits, Incoming, IncomingGroup
from kv_transfer.handoff.key import ClosedHandoffs, HandoffKey, IllegalMove, key_of
from kv_transfer.handoff.states import SinkEvent, SinkState, sink_transition
from protocol.handoff_messages import GroupBlocks, KvBegun, KvClosed, KvWritten

_REMEMBERED = 8192
_STRANGE = "the source reports blocks that it was not granted"
_WANTED = (SinkState.GRANTED, SinkState.STOPPING, SinkState.CLOSED_EARLY)
_OPEN = (SinkState.GRANTED, SinkState.STOPPING, SinkState.ABORTING)  # the peer has not closed
_TIMED = (SinkState.CLOSED_EARLY, SinkState.LANDING)


class HandoffSink:
    """All handoffs that this worker receives. `ignored` counts events of unknown handoffs;
    `blocks_received` counts the blocks that arrived, each once, and `num_stopped` the fetches that
    took too long."""

    def __init__(self, agent: str, ttl_s: float, landing_s: float, checksum: bool = False) -> None:
        """`agent` is our name in asks and grants, `ttl_s` their time to live. A posted write lands
        within `landing_s`."""
        self.ignored = 0
        self.blocks_received = 0
        self.num_stopped = 0
        self._interval_s = ttl_s / 3
        self._landing_s = landing_s
        self._checksum = checksum
        ttl_ms = max(1, round(ttl_s * 1000))
        self._asks = Asks(agent, ttl_ms, self._interval_s)
        self._grants = Grants(agent, ttl_ms)
        self._handoffs: dict[HandoffKey, Incoming] = {}
        self._ended = ClosedHandoffs(_REMEMBERED)

    @property
    def num_open(self) -> int:
        """Handoffs whose fence is still up."""
        return len(self._handoffs)

    @property
    def num_fenced_blocks(self) -> int:
        """Blocks that a peer may still write to."""
        return sum(len(ids) for each in self._handoffs.values() for ids in each.blocks)

    def fenced_by(self, peers: Collection[str]) -> list[HandoffKey]:
        """Handoffs whose blocks one of these peers may still write to."""
        return [key for key, handoff in self._handoffs.items() if handoff.peer in peers]

    def is_open(self, key: HandoffKey) -> bool:
        """Whether the handoff's blocks are still behind their fence."""
        return key in self._handoffs

    def is_asking(self, key: HandoffKey) -> bool:
        """Whether the handoff was asked for and nothing has been granted yet."""
        return key in self._asks

    def peer_of(self, key: HandoffKey) -> str | None:
        """The source that was asked for a handoff whose fence is up or that waits for its source;
        None for other handoffs."""
        held = self._asks.find(key) or self._handoffs.get(key)
        return None if held is None else held.peer

    def is_known(self, key: HandoffKey) -> bool:
        """Whether the handoff was asked for before and cannot be asked for again."""
        is_open = key in self._asks or key in self._handoffs
        return is_open or self._ended.error_of(key) is not None

    def arrived(self, key: HandoffKey) -> tuple[int, ...]:
        """The blocks of an open handoff that hold their data by now, as prompt indices; of the
        first group only.

        Their contents no longer change, because a source writes each block at most once.
        """
        handoff = self._handoffs.get(key)
        return () if handoff is None else self._arrived(handoff)

    # -- calls by the owner -------------------------------------------------------------------

    def ask(self, key: HandoffKey, peer: str, now: float, prompt: bytes = b"") -> list[SinkAction]:
        """Ask source `peer` for the prompt with this digest: Begun or Failed follows."""
        if self.is_known(key):
            raise IllegalMove(f"handoff {key} is asked for twice")
        return [self._asks.add(key, peer, prompt, now)]

    def offer(
        self,
        key: HandoffKey,
        first_block: int,
        block_ids: Sequence[int],
        now: float,
        others: Sequence[GroupBlocks] = (),
    ) -> list[SinkAction]:
        """Grant our blocks, for the prompt blocks from `first_block` on, to a peer that has begun;
        `others` are those of all groups but the first.

        Without blocks the handoff is complete at once; the peer still needs the grant, so that it
        can release its own blocks. Raises IllegalMove before Begun.
        """
        ask = self._asks.find(key)
        if ask is None or not ask.has_begun:
            raise IllegalMove(f"handoff {key} is offered before its source has begun")
        self._asks.pop(key)
        grant = self._grants.of_handoff(key, first_block, block_ids, others)
        groups = [IncomingGroup(each.first_block, tuple(each.block_ids)) for each in grant.groups]
        handoff = Incoming(SinkState.GRANTED, ask.peer, groups, now + self._interval_s)
        self._handoffs[key] = handoff
        actions: list[SinkAction] = [SendGrant(ask.peer, grant)]
        if handoff.is_complete:
            actions += self._end(key, handoff, SinkEvent.ARRIVED, Complete(key))
        return actions

    def fetch(
        self, key: HandoffKey, peer: str, wanted: WantedBlocks, limits: FetchLimits, now: float
    ) -> list[SinkAction]:
        """Grant blocks that we already own to a peer, each with the hash of what it is to hold.
        Fetched or Failed follows, unless the caller aborts."""
        if self.is_known(key) or key.part < 1 or not wanted.blocks:
            raise IllegalMove(f"{key} cannot be fetched")
        first = IncomingGroup(wanted.first_block, tuple(block for _, block in wanted.blocks))
        others = [IncomingGroup(0, tuple(each.block_ids)) for each in wanted.others]
        self._handoffs[key] = Incoming(
            SinkState.GRANTED,
            peer,
            [first, *others],
            now + self._interval_s,
            stop_at=now + limits.deadline_s,
            stop_wait_s=limits.stop_wait_s,
        )
        return [SendFetch(peer, self._grants.of_fetch(key, wanted))]

    def verified(self, key: HandoffKey, ok: bool, num_intact: int = 0) -> list[SinkAction]:
        """The answer to Verify: whether all digests of the group are right. If not, a fetch keeps
        the first `num_intact` blocks."""
        handoff = self._handoffs.get(key)
        if handoff is None or handoff.state is not SinkState.VERIFYING:
            self.ignored += 1
            return []
        if key.part and not ok:
            handoff.expect(0 if handoff.is_whole_or_nothing else num_intact)
        elif ok:
            handoff.num_verified += 1
            if check := self._next_check(key, handoff):
                return [check]
        if ok or key.part:
            return self._end(key, handoff, SinkEvent.ARRIVED, _outcome(key, handoff))
        failed = Failed(key, "the digest of a block differs", ())
        return self._end(key, handoff, SinkEvent.GIVE_UP, failed)

    def abort(self, key: HandoffKey) -> list[SinkAction]:
        """Give up the blocks. Granted ones stay fenced until Unfence."""
        ask = self._asks.pop(key)
        if ask is not None:
            self._ended.remember(key, "")
            return [SendAbort(key, ask.peer)]
        handoff = self._handoffs.get(key)
        if handoff is None:
            self.ignored += 1
            return []
        if handoff.state in (SinkState.GRANTED, SinkState.STOPPING):
            return self._ask_to_stop(key, handoff)
        if handoff.state in (SinkState.CLOSED_EARLY, SinkState.VERIFYING):
            return self._end(key, handoff, SinkEvent.GIVE_UP)
        return []

    def sweep(self, now: float) -> list[SinkAction]:
        """Repeat asks and aborts, renew grants of wanted handoffs, stop fetches that take too long,
        and lift the fences that are due."""
        actions: list[SinkAction] = [*self._asks.due(now)]
        for key, handoff in list(self._handoffs.items()):
            if handoff.state in _TIMED and now >= handoff.landed_at:
                actions += self._expire(key, handoff)
            elif now >= handoff.stop_at:
                actions += self._overrun(key, handoff, now)
            elif now >= handoff.next_send:
                handoff.next_send = now + self._interval_s
                if handoff.state is SinkState.GRANTED:
                    actions.append(SendRenew(handoff.peer, self._grants.renewal(key)))
                elif handoff.state in (SinkState.STOPPING, SinkState.ABORTING):
                    actions.append(SendAbort(key, handoff.peer))
        return actions

    # -- messages of sources ------------------------------------------------------------------

    def begun(self, begun: KvBegun) -> list[SinkAction]:
        """Note that the source holds every block of the prompt. A repeated answer changes
        nothing."""
        key = key_of(begun)
        ask = self._asks.find(key)
        if ask is None or ask.has_begun:
            self.ignored += not self.is_known(key)
            return []
        ask.has_begun = True
        return [Begun(key)]

    def written(self, written: KvWritten) -> list[SinkAction]:
        """A notification: these blocks have landed. A repeated notification changes nothing."""
        key = key_of(written)
        handoff = self._handoffs.get(key)
        if handoff is None or handoff.state is SinkState.VERIFYING:
            self.ignored += 1
            return []
        group = handoff.find(written.group)
        num_digests = written.num_blocks if self._checksum else 0
        if group is None or not group.can_hold(written) or len(written.digests) != num_digests:
            return self._distrust(key, handoff)
        self.blocks_received += group.add(written)
        return self._finish(key, handoff) if handoff.is_complete else []

    def closed(self, closed: KvClosed, now: float) -> list[SinkAction]:
        """Note that the peer posts no more writes. If it closed with an error, one of its writes
        may still land."""
        key = key_of(closed)
        if key in self._asks:
            reason = closed.error or "the source closed before anything was granted"
            return [self._end_ask(key, reason)]
        handoff = self._handoffs.get(key)
        if handoff is None:
            self.ignored += not self.is_known(key)
            return []
        if handoff.state not in _OPEN:
            return []
        if closed.error:
            return self._lose(key, handoff, closed.error, now)
        if handoff.state is SinkState.ABORTING:
            return self._end(key, handoff, SinkEvent.CLOSE)
        if key.part:
            if not handoff.may_end_with(closed.num_blocks):
                failed = Failed(key, _STRANGE, ())
                return [failed, *self._end(key, self._give_up(handoff), SinkEvent.CLOSE)]
            handoff.expect(closed.num_blocks)
            if handoff.is_complete:
                return self._finish(key, handoff)
            if handoff.state is SinkState.STOPPING:
                return self._settle_for(key, handoff, SinkEvent.CLOSE)
        handoff.state = sink_transition(handoff.state, SinkEvent.CLOSE)
        handoff.landed_at = now + self._landing_s
        return []

    def agent_gone(self, peer: str, now: float) -> list[SinkAction]:
        """Note that the process of a source is dead: its connection is lost and its lease has
        expired. `now` is inf while it may still write over a connection; `cut` follows."""
        asks = self._asks.of_peer(peer)
        actions: list[SinkAction] = [self._end_ask(key, "the source is gone") for key in asks]
        for key, handoff in list(self._handoffs.items()):
            if handoff.peer == peer and handoff.state in _OPEN:
                actions += self._lose(key, handoff, "the source is gone", now)
        return actions

    def cut(self, now: float) -> None:
        """Note that sources which were found dead can write over no connection any more."""
        for handoff in self._handoffs.values():
            if handoff.landed_at == inf:
                handoff.landed_at = now + self._landing_s

    # -- steps ---------------------------------------------------------------------------

    def _finish(self, key: HandoffKey, handoff: Incoming) -> list[SinkAction]:
        """Complete the handoff: every block has arrived."""
        if handoff.state not in _WANTED:
            return self._end(key, handoff, SinkEvent.ARRIVED)
        return self._settle_for(key, handoff, SinkEvent.ARRIVED)

    def _settle_for(self, key: HandoffKey, handoff: Incoming, event: SinkEvent) -> list[SinkAction]:
        """End a wanted handoff with the blocks that have arrived, after a check of their digests.
        Only a fetch may lack some: it then keeps the leading blocks, up to the first that is
        missing."""
        if key.part:
            handoff.settle()
        check = self._next_check(key, handoff) if self._checksum else None
        if check is None:
            return self._end(key, handoff, event, _outcome(key, handoff))
        handoff.state = sink_transition(handoff.state, SinkEvent.CHECK)
        return [check]

    @staticmethod
    def _next_check(key: HandoffKey, handoff: Incoming) -> Verify | None:
        """The next comparison of digests, which is that of the next group with blocks."""
        while handoff.num_verified < len(handoff.groups):
            group = handoff.groups[handoff.num_verified]
            if group.num_expected:
                digests = tuple(group.digests[i] for i in range(group.first_block, group.end_block))
                blocks = group.block_ids[: group.num_expected]
                return Verify(key, blocks, digests, handoff.num_verified)
            handoff.num_verified += 1
        return None

    def _overrun(self, key: HandoffKey, handoff: Incoming, now: float) -> list[SinkAction]:
        """Handle a passed deadline of a fetch: ask the source to stop, or continue without its
        answer."""
        if handoff.state is SinkState.GRANTED:
            handoff.state = sink_transition(handoff.state, SinkEvent.STOP)
            handoff.stop_at = now + handoff.stop_wait_s
            self.num_stopped += 1
            return [SendAbort(key, handoff.peer)]
        handoff.stop_at = inf
        if handoff.state is not SinkState.STOPPING:
            return []
        failed = Failed(key, "the source does not answer", self._arrived(handoff))
        return [failed, *self._ask_to_stop(key, handoff)]

    def _distrust(self, key: HandoffKey, handoff: Incoming) -> list[SinkAction]:
        """Fail the handoff: the peer reports blocks that it was not granted, so none of its data
        counts."""
        failed = Failed(key, _STRANGE, ())
        for group in handoff.groups:
            group.digests.clear()
        if handoff.state in (SinkState.GRANTED, SinkState.STOPPING):
            return [failed, *self._ask_to_stop(key, handoff)]
        if handoff.state is SinkState.CLOSED_EARLY:
            return self._end(key, handoff, SinkEvent.GIVE_UP, failed)
        self.ignored += 1
        return []

    def _ask_to_stop(self, key: HandoffKey, handoff: Incoming) -> list[SinkAction]:
        self._give_up(handoff)
        return [SendAbort(key, handoff.peer)]

    @staticmethod
    def _give_up(handoff: Incoming) -> Incoming:
        handoff.state = sink_transition(handoff.state, SinkEvent.GIVE_UP)
        handoff.stop_at = inf
        return handoff

    def _lose(
        self, key: HandoffKey, handoff: Incoming, reason: str, now: float
    ) -> list[SinkAction]:
        """Fail the handoff now if it was wanted, but keep the fence until no write can land."""
        wanted = handoff.state in _WANTED
        handoff.state = sink_transition(handoff.state, SinkEvent.LOSE)
        handoff.landed_at = now + self._landing_s
        return [Failed(key, reason, self._arrived(handoff))] if wanted else []

    def _expire(self, key: HandoffKey, handoff: Incoming) -> list[SinkAction]:
        if handoff.state is SinkState.LANDING:
            return self._end(key, handoff, SinkEvent.EXPIRE)
        if key.part:
            return self._settle_for(key, handoff, SinkEvent.EXPIRE)
        reason = "the source closed before every block had arrived"
        failed = Failed(key, reason, self._arrived(handoff))
        return self._end(key, handoff, SinkEvent.EXPIRE, failed)

    def _end(
        self,
        key: HandoffKey,
        handoff: Incoming,
        event: SinkEvent,
        outcome: Complete | Fetched | Failed | None = None,
    ) -> list[SinkAction]:
        """Lift the fence, after reporting `outcome` if there is one."""
        handoff.state = sink_transition(handoff.state, event)
        del self._handoffs[key]
        self._ended.remember(key, "")
        unfence = Unfence(key, handoff.blocks)
        return [unfence] if outcome is None else [outcome, unfence]

    def _arrived(self, handoff: Incoming) -> tuple[int, ...]:
        """The blocks that a later attempt need not send. Unverified blocks do not count."""
        return () if self._checksum else tuple(sorted(handoff.groups[0].digests))

    def _end_ask(self, key: HandoffKey, reason: str) -> Failed:
        """Fail a handoff for which no block was granted, so that there is no fence."""
        self._asks.pop(key)
        self._ended.remember(key, "")
        return Failed(key, reason, ())


def _outcome(key: HandoffKey, handoff: Incoming) -> Complete | Fetched:
    return Fetched(key, handoff.groups[0].num_expected) if key.part else Complete(key)
