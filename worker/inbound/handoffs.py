"""The sink side of handoffs and fetches in a worker: connects the state machine to links and
transfers.

`kv_transfer.handoff.sink` decides what to grant and when to lift a fence. Asks, grants, renewals
and aborts go to the sources over their control links; the transport reports landed blocks. The
blocks of handoffs belong to a `GrantOwner`, which learns when a source has begun and which blocks
have arrived. The blocks of fetches belong to a `FetchOwner`. This module owns blocks that are no
longer wanted, but that a peer may still write to. The counterpart of `worker.outbound`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from math import inf
from typing import Protocol

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
from kv_transfer.handoff.grants import WantedBlocks
from kv_transfer.handoff.incoming import FetchLimits
from kv_transfer.handoff.key import HandoffKey, key_of
from kv_transfer.handoff.sink import HandoffSink
from kv_transfer.transfer_loop import OfPeers, TargetRenewed
from protocol import wire
from protocol.control_message import ControlMessage
from protocol.errors import ProtocolError
from protocol.handoff_messages import (
    CachedPrefix,
    GroupBlocks,
    KvBegun,
    KvClosed,
    PoolRefused,
    PoolUnreachable,
)
from protocol.messages import Abort, KvPeer
from scheduling.sequence import Sequence, SequenceState
from worker.counters import Count
from worker.host import WorkerHost
from worker.inbound.fenced_blocks import FencedBlocks
from worker.inbound.pool_ends import PoolEnds
from worker.inbound.source_links import SourcePeers

log = logging.getLogger(__name__)

NO_ROOM = "its blocks do not fit beside those that a silent worker may still write to"
"""Why a stranded request fails."""


class GrantOwner(Protocol):
    """The owner of the granted blocks. Its methods must ignore unknown keys."""

    def on_begun(self, key: HandoffKey) -> None:
        """The source holds every block of the prompt: blocks may be reserved for it."""
        ...

    def on_complete(self, key: HandoffKey) -> None:
        """Every granted block holds its data."""
        ...

    def on_failed(self, key: HandoffKey, reason: str, arrived: tuple[int, ...]) -> None:
        """The attempt failed; `arrived` has the indices of the prompt blocks that arrived."""
        ...


class FetchOwner(Protocol):
    """The owner of fetches. Its methods must ignore unknown keys."""

    def on_closed(self, key: HandoffKey, closed: KvClosed) -> None:
        """The holder writes no more. The fetch may be over already; if not, it is soon."""
        ...

    def on_fetched(self, key: HandoffKey, num_blocks: int) -> None:
        """The fetch is over: the first `num_blocks` granted blocks hold their data."""
        ...

    def on_failed(self, key: HandoffKey, reason: str, arrived: tuple[int, ...]) -> None:
        """The fetch failed, and the holder may still write. `arrived` as in `GrantOwner`."""
        ...


class InboundHandoffs:
    """All handoffs that this worker receives; belongs to the loop's thread.

    `silent` are the incarnations of sources that have fallen silent, `stuck` the blocks that these
    may still write to, by group.
    """

    def __init__(
        self, host: WorkerHost, sink: HandoffSink, peers: SourcePeers, owner: GrantOwner | None
    ) -> None:
        """`owner` is None on a worker that only fetches."""
        num_groups = len(host.engine.layout.groups)
        self.fenced = FencedBlocks(num_groups)
        self.fetch_owners: list[FetchOwner] = []
        self.on_prefix: Callable[[str, CachedPrefix], None] = host.note_unexpected
        self.silent: list[str] = []
        self.stuck: list[set[int]] = [set() for _ in range(num_groups)]
        self._host = host
        self._clock = host.clock
        self._counters = host.counters
        self._sink = sink
        self._scheduler = host.engine.scheduler
        self._peers = peers
        self._ends = PoolEnds(host, peers)
        self._owner = owner
        self._is_cutting = False  # connections of lost sources are still being broken

    # -- calls by the owner -----------------------------------------------------------------

    def ask(self, key: HandoffKey, peer: KvPeer, prompt: bytes) -> None:
        """Wait until a peer has begun with the prompt that has this digest."""
        self._peers.connect(peer)
        self._carry_out(self._sink.ask(key, peer.incarnation, self._clock.now(), prompt))

    def offer(self, key: HandoffKey, blocks: Seq[GroupBlocks]) -> None:
        """Grant our blocks of every group to the peer that has begun; there may be none."""
        first, *others = blocks
        now = self._clock.now()
        self._carry_out(self._sink.offer(key, first.first_block, first.block_ids, now, others))

    def fetch(self, key: HandoffKey, peer: str, wanted: WantedBlocks, limits: FetchLimits) -> None:
        """Grant blocks to a holder that has accepted us; see `HandoffSink.fetch`."""
        self._carry_out(self._sink.fetch(key, peer, wanted, limits, self._clock.now()))

    def abort(self, key: HandoffKey) -> None:
        """Abort a handoff whose blocks are no longer needed. The caller has moved granted blocks to
        `fenced`."""
        self._carry_out(self._sink.abort(key))

    def arrived(self, key: HandoffKey) -> tuple[int, ...]:
        """See `HandoffSink.arrived`."""
        return self._sink.arrived(key)

    # -- peers ------------------------------------------------------------------------------

    def receive(self) -> list[tuple[str, ControlMessage]]:
        """Read from the sources. Returns the messages that are about neither fetches nor caches,
        each with the incarnation of its source."""
        others: list[tuple[str, ControlMessage]] = []
        for incarnation, message in self._peers.receive():
            if isinstance(message, KvClosed) and message.part:
                self.close(incarnation, message)
            elif isinstance(message, CachedPrefix):
                self.on_prefix(incarnation, message)
            elif isinstance(message, PoolRefused):
                self._peers.note_refusal(incarnation, message)
            elif isinstance(message, PoolUnreachable):
                self._ends.on_unreachable(incarnation, message)
            else:
                others.append((incarnation, message))
        return others

    def take_lost(self) -> list[str]:
        """Drop the sources that are gone, and return their incarnations."""
        now = self._clock.now()
        lost = self._peers.take_lost(now)
        for incarnation in lost:
            self._stop_writes_of(incarnation)
        if lost or self._is_cutting:
            was_cutting, self._is_cutting = self._is_cutting, self._host.transfers.is_disconnecting
            for incarnation in lost:
                gone_at = inf if self._is_cutting else now
                self._carry_out(self._sink.agent_gone(incarnation, gone_at))
            if was_cutting and not self._is_cutting:
                self._sink.cut(now)
        if lost:
            self._ends.retire_unused()
        return lost

    def _stop_writes_of(self, incarnation: str) -> None:
        """A peer on another machine that counts as gone may only be stopped, in the middle of a
        write. Its connections, also those to other processes of ours, must not deliver the rest
        after the fence is lifted."""
        neighbours = self._peers.neighbours_of_lapsed(incarnation)
        if neighbours is not None and self._sink.fenced_by([incarnation]):
            number = self._host.transfers.disconnect(neighbours)
            log.info("%d connections of KV blocks are closed: %s is gone", number, incarnation)

    def update_silent(self) -> None:
        """Bring `silent` and `stuck` up to date. Call it after `receive`."""
        self.silent = self._peers.silent(self._clock.now())
        self.stuck = self.fenced.blocks_of(self._sink.fenced_by(self.silent))

    @property
    def num_stuck(self) -> int:
        """Number of stuck blocks."""
        return sum(map(len, self.stuck))

    def is_stranded(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence fits only once blocks return that a silent worker may still
        write to. Nobody knows when that will be."""
        is_waiting = sequence.state is SequenceState.WAITING
        return is_waiting and not self._scheduler.fits_beside(sequence, *self.stuck)

    # -- events -----------------------------------------------------------------------------

    def begin(self, incarnation: str, begun: KvBegun) -> None:
        """Note that the peer holds every block of the prompt."""
        if self._is_peer_of(incarnation, begun):
            self._carry_out(self._sink.begun(begun))

    def close(self, incarnation: str, closed: KvClosed) -> None:
        """Note that the peer posts no more writes."""
        if not self._is_peer_of(incarnation, closed):
            return
        for owner in self.fetch_owners if closed.part else ():
            owner.on_closed(key_of(closed), closed)
        self._carry_out(self._sink.closed(closed, self._clock.now()))

    def follow(self, event: OfPeers) -> None:
        """Note landed blocks, or another end for peers to write to. Undecodable notifications are
        counted and dropped."""
        if isinstance(event, TargetRenewed):
            self._ends.on_renewed(event)
            return
        try:
            written = wire.decode_notification(event.payload)
        except ProtocolError as error:
            self._counters.add(Count.FRAMES_REFUSED)
            log.warning("notification of agent %s: %s", event.agent, error)
            return
        self._carry_out(self._sink.written(written))

    def sweep(self) -> None:
        """Act on timeouts; called every turn of the loop."""
        self._carry_out(self._sink.sweep(self._clock.now()))
        self._host.transfers.expect(self._sink.num_open > 0)

    def count(self) -> None:
        """Bring the worker's counters up to date."""
        self._counters.add_up_to(Count.BLOCKS_RECEIVED, "sink", self._sink.blocks_received)
        self._counters.add_up_to(Count.FETCHES_STOPPED, "fetches", self._sink.num_stopped)
        self._counters.add_up_to(Count.FRAMES_REFUSED, "peers", self._peers.refused)

    def _is_peer_of(self, incarnation: str, message: KvBegun | KvClosed) -> bool:
        """Whether a message comes from the source of the handoff that it names: no other worker
        may lift that handoff's fence."""
        peer = self._sink.peer_of(key_of(message))
        if peer in (None, incarnation):
            return True
        self._host.note_unexpected(incarnation, message)
        return False

    # -- decisions of the sink ----------------------------------------------------------------

    def _carry_out(self, actions: list[SinkAction]) -> None:
        for action in actions:
            match action:
                case SendAsk(peer, ask):
                    self._peers.send(peer, self._ends.named(peer, ask))
                case SendGrant(peer, grant):
                    self._peers.send(peer, self._ends.named(peer, grant))
                case SendFetch(peer, fetch):
                    self._peers.send(peer, self._ends.named(peer, fetch))
                case SendRenew(peer, renew):
                    self._peers.send(peer, renew)
                case SendAbort((request_id, attempt, part), peer):
                    abort = Abort(request_id=request_id, attempt=attempt, part=part)
                    self._peers.send(peer, abort)
                case Verify(key, blocks, digests, group):
                    num_intact = self._num_intact(blocks, digests, group)
                    ok = num_intact == len(blocks)
                    self._carry_out(self._sink.verified(key, ok, num_intact))
                case Unfence(key):
                    for group, freed in enumerate(self.fenced.take(key)):
                        self._scheduler.pools.managers[group].release(freed)
                case _:
                    self._report(action)

    def _report(self, action: Begun | Complete | Fetched | Failed) -> None:
        """Tell the owner of the blocks."""
        match action:
            case Begun(key) if self._owner is not None:
                self._owner.on_begun(key)
            case Complete(key) if self._owner is not None:
                self._owner.on_complete(key)
            case Fetched(key, num_blocks):
                for owner in self.fetch_owners:
                    owner.on_fetched(key, num_blocks)
            case Failed(key, reason, arrived) if key.part:
                for owner in self.fetch_owners:
                    owner.on_failed(key, reason, arrived)
            case Failed(key, reason, arrived) if self._owner is not None:
                self._owner.on_failed(key, reason, arrived)

    def _num_intact(self, blocks: Seq[int], digests: Seq[bytes], group: int) -> int:
        """The number of leading blocks of a group that have the right digests."""
        found = self._host.transfer_peers.digests(blocks, group)
        pairs = enumerate(zip(found, digests, strict=True))
        return next((i for i, (ours, theirs) in pairs if ours != theirs), len(blocks))
