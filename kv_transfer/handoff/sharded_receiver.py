"""The decode side of handoffs between pools that are sharded over tensor-parallel ranks.

Only tests use this module. It is kept until workers of several cards replace it with the one
handoff. One rank of a decode worker gets its blocks from every rank of the prefill worker that
shares heads with it. Each of these lanes is a handoff of its own in `kv_transfer.handoff.sink`,
with its own ask, grant, renewals, end and fence. This module joins the lanes: blocks may be granted
when every lane's source has begun, a block has arrived when it has arrived on every lane, the
handoff is complete when every lane is, it fails when the first lane fails, and its blocks are free
again when the fences of all lanes are lifted. Pure, as the sink is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kv_transfer.handoff.actions import (
    Begun,
    Complete,
    Failed,
    Fetched,
    SendAbort,
    SendAsk,
    SendFetch,
    SendGrant,
    SendRenew,
    SinkAction,
    Unfence,
    Verify,
)
from kv_transfer.handoff.key import HandoffKey, IllegalMove
from kv_transfer.handoff.sink import HandoffSink
from protocol.messages import KvBegun, KvClosed, KvWritten


@dataclass(frozen=True)
class VerifyLane:
    """Every block of source rank `source` has arrived: compare digests of the heads that it shares
    with us and answer with `verified`."""

    source: int
    verify: Verify


ShardedReceiverAction = (
    SendAsk | Begun | SendGrant | SendRenew | SendAbort | VerifyLane | Complete | Failed | Unfence
)


@dataclass
class _Ask:
    sources: frozenset[int]
    not_begun: set[int]  # source ranks


@dataclass
class _Handoff:
    first_block: int
    block_ids: tuple[int, ...]
    incomplete: set[int]  # source ranks
    fenced: set[int]  # source ranks whose lane's fence is still up
    is_wanted: bool = True
    failed_lanes: dict[int, tuple[int, ...]] = field(default_factory=dict)  # what had arrived

    @property
    def indices(self) -> frozenset[int]:
        """Prompt indices of the handoff's blocks."""
        return frozenset(range(self.first_block, self.first_block + len(self.block_ids)))


class ShardedReceiver:
    """All handoffs of one rank of a decode worker, from the source ranks passed to `ask`."""

    def __init__(self, make_sink: Callable[[], HandoffSink]) -> None:
        """`make_sink` makes the state machine of one lane; each source rank has its own."""
        self._make_sink = make_sink
        self._lanes: dict[int, HandoffSink] = {}  # by source rank
        self._asks: dict[HandoffKey, _Ask] = {}
        self._handoffs: dict[HandoffKey, _Handoff] = {}
        self._ignored = 0

    @property
    def ignored(self) -> int:
        """Number of events that belong to no handoff."""
        return self._ignored + sum(lane.ignored for lane in self._lanes.values())

    @property
    def num_open(self) -> int:
        """Handoffs whose fence is still up."""
        return len(self._handoffs)

    @property
    def num_fenced_blocks(self) -> int:
        """Blocks that some peer may still write to."""
        return sum(len(handoff.block_ids) for handoff in self._handoffs.values())

    def is_open(self, key: HandoffKey) -> bool:
        """Whether the handoff's blocks are still behind their fence."""
        return key in self._handoffs

    def is_known(self, key: HandoffKey) -> bool:
        """Whether the handoff was asked for before and so cannot be asked for again."""
        return any(lane.is_known(key) for lane in self._lanes.values())

    def arrived(self, key: HandoffKey) -> tuple[int, ...]:
        """Prompt indices of the granted blocks of an open handoff that already hold the data of
        every source rank."""
        handoff = self._handoffs.get(key)
        return () if handoff is None else self._arrived(key, handoff)

    # -- calls by the decode worker itself -----------------------------------------------

    def ask(
        self, key: HandoffKey, peers: Mapping[int, str], now: float
    ) -> list[ShardedReceiverAction]:
        """Wait until the source ranks that share heads with us, `peers` by rank, have all begun
        with this prompt: Begun or Failed follows."""
        if not peers or len(set(peers.values())) < len(peers):
            raise ValueError(f"the source ranks of {key} must be several processes: {peers}")
        if self.is_known(key):
            raise IllegalMove(f"handoff {key} is asked for twice")
        self._asks[key] = _Ask(frozenset(peers), set(peers))
        actions: list[ShardedReceiverAction] = []
        for source, peer in peers.items():
            if source not in self._lanes:
                self._lanes[source] = self._make_sink()
            actions += self._join(source, self._lanes[source].ask(key, peer, now))
        return actions

    def offer(
        self, key: HandoffKey, first_block: int, block_ids: Sequence[int], now: float
    ) -> list[ShardedReceiverAction]:
        """Grant our blocks to all source ranks, for the prompt blocks from `first_block` on; see
        `HandoffSink.offer`."""
        ask = self._asks.get(key)
        if ask is None or ask.not_begun:
            raise IllegalMove(f"handoff {key} is offered before its sources have begun")
        del self._asks[key]
        sources = set(ask.sources)
        self._handoffs[key] = _Handoff(first_block, tuple(block_ids), sources, set(sources))
        actions: list[ShardedReceiverAction] = []
        for source in sorted(ask.sources):
            offered = self._lanes[source].offer(key, first_block, block_ids, now)
            actions += self._join(source, offered)
        return actions

    def verified(self, key: HandoffKey, source: int, ok: bool) -> list[ShardedReceiverAction]:
        """The answer to VerifyLane."""
        return self._with(source, lambda lane: lane.verified(key, ok))

    def abort(self, key: HandoffKey) -> list[ShardedReceiverAction]:
        """The blocks are no longer wanted; granted ones stay fenced until Unfence."""
        if self._asks.pop(key, None) is not None:
            return self._abort_lanes(key)
        handoff = self._handoffs.get(key)
        if handoff is None:
            self._ignored += 1
            return []
        handoff.is_wanted = False
        return self._abort_lanes(key)

    def sweep(self, now: float) -> list[ShardedReceiverAction]:
        """`HandoffSink.sweep` for every lane."""
        return self._with_all(lambda lane: lane.sweep(now))

    # -- messages of prefill workers -----------------------------------------------------

    def begun(self, source: int, begun: KvBegun) -> list[ShardedReceiverAction]:
        """Source rank `source` holds every block of the prompt."""
        return self._with(source, lambda lane: lane.begun(begun))

    def written(self, source: int, written: KvWritten) -> list[ShardedReceiverAction]:
        """A notification of source rank `source`: its part of these blocks has landed."""
        return self._with(source, lambda lane: lane.written(written))

    def closed(self, source: int, closed: KvClosed, now: float) -> list[ShardedReceiverAction]:
        """Source rank `source` posts no more writes; with an error, one may still land."""
        return self._with(source, lambda lane: lane.closed(closed, now))

    def agent_gone(self, peer: str, now: float) -> list[ShardedReceiverAction]:
        """The process of a source rank is dead, as in `HandoffSink.agent_gone`."""
        return self._with_all(lambda lane: lane.agent_gone(peer, now))

    # -- steps ---------------------------------------------------------------------------

    def _with(
        self, source: int, move: Callable[[HandoffSink], list[SinkAction]]
    ) -> list[ShardedReceiverAction]:
        lane = self._lanes.get(source)
        if lane is None:
            self._ignored += 1
            return []
        return self._join(source, move(lane))

    def _with_all(
        self, move: Callable[[HandoffSink], list[SinkAction]]
    ) -> list[ShardedReceiverAction]:
        actions: list[ShardedReceiverAction] = []
        for source, lane in self._lanes.items():
            actions += self._join(source, move(lane))
        return actions

    def _join(self, source: int, actions: list[SinkAction]) -> list[ShardedReceiverAction]:
        """Turn the actions of one lane into actions of the whole handoff."""
        joined: list[ShardedReceiverAction] = []
        for action in actions:
            match action:
                case Verify():
                    joined.append(VerifyLane(source, action))
                case Begun(key):
                    joined += self._begin(key, source)
                case Complete(key):
                    joined += self._complete(key, source)
                case Failed(key, reason, arrived):
                    joined += self._fail(key, source, reason, arrived)
                case Unfence(key):
                    joined += self._unfence(key, source)
                case SendFetch() | Fetched():
                    raise AssertionError("sharded pools fetch nothing")
                case _:
                    joined.append(action)
        return joined

    def _begin(self, key: HandoffKey, source: int) -> list[ShardedReceiverAction]:
        ask = self._asks[key]
        ask.not_begun.discard(source)
        return [] if ask.not_begun else [Begun(key)]

    def _complete(self, key: HandoffKey, source: int) -> list[ShardedReceiverAction]:
        handoff = self._handoffs[key]
        handoff.incomplete.discard(source)
        return [Complete(key)] if handoff.is_wanted and not handoff.incomplete else []

    def _fail(
        self, key: HandoffKey, source: int, reason: str, arrived: tuple[int, ...]
    ) -> list[ShardedReceiverAction]:
        """The first lane that fails ends the handoff; the others are asked to stop."""
        if self._asks.pop(key, None) is not None:
            return [Failed(key, f"rank {source}: {reason}", ()), *self._abort_lanes(key)]
        handoff = self._handoffs[key]
        handoff.failed_lanes[source] = arrived
        if not handoff.is_wanted:
            return []
        handoff.is_wanted = False
        failed = Failed(key, f"rank {source}: {reason}", self._arrived(key, handoff))
        return [failed, *self._abort_lanes(key)]

    def _abort_lanes(self, key: HandoffKey) -> list[ShardedReceiverAction]:
        actions: list[ShardedReceiverAction] = []
        for source, lane in self._lanes.items():
            if lane.is_open(key) or lane.is_asking(key):
                actions += self._join(source, lane.abort(key))
        return actions

    def _unfence(self, key: HandoffKey, source: int) -> list[ShardedReceiverAction]:
        handoff = self._handoffs[key]
        handoff.fenced.discard(source)
        if handoff.fenced:
            return []
        del self._handoffs[key]
        return [Unfence(key, handoff.block_ids)]

    def _arrived(self, key: HandoffKey, handoff: _Handoff) -> tuple[int, ...]:
        """Prompt indices of the blocks that have arrived on every lane."""
        by_lane = [
            handoff.failed_lanes.get(source, self._lanes[source].arrived(key))
            for source in handoff.incomplete
        ]
        return tuple(sorted(handoff.indices.intersection(*by_lane)))
