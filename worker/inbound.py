"""The sink side of handoffs in a worker: connects the state machine to links and transfers.

`kv_transfer.handoff.sink` decides what to grant and when to lift a fence. Asks, grants, renewals
and aborts go to the sources over their control links; the transport reports landed blocks. The
blocks belong to a `GrantOwner`, which learns when a source has begun, which blocks have arrived and
when no peer can write to them any more. The counterpart of `worker.outbound`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from typing import Protocol

from kv_transfer.handoff.actions import (
    Begun,
    Complete,
    Failed,
    SendAbort,
    SendAsk,
    SendGrant,
    SendRenew,
    SinkAction,
    Unfence,
    Verify,
)
from kv_transfer.handoff.key import HandoffKey
from kv_transfer.handoff.sink import HandoffSink
from kv_transfer.transfer_loop import NotificationArrived
from protocol import wire
from protocol.errors import ProtocolError
from protocol.messages import Abort, KvBegun, KvClosed, KvPeer
from worker.counters import Count
from worker.host import WorkerHost
from worker.peers import SourcePeers

log = logging.getLogger(__name__)


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

    def on_unfenced(self, key: HandoffKey) -> None:
        """No peer can write to the handoff's blocks any more."""
        ...


class InboundHandoffs:
    """All handoffs that this worker receives; belongs to the loop's thread."""

    def __init__(
        self, host: WorkerHost, sink: HandoffSink, peers: SourcePeers, owner: GrantOwner
    ) -> None:
        self._host = host
        self._clock = host.clock
        self._counters = host.counters
        self._sink = sink
        self._peers = peers
        self._owner = owner

    # -- calls by the owner -----------------------------------------------------------------

    def ask(self, key: HandoffKey, peer: KvPeer) -> None:
        """Wait until a peer has begun with this prompt."""
        self._peers.connect(peer)
        self._carry_out(self._sink.ask(key, peer.incarnation, self._clock.now()))

    def offer(self, key: HandoffKey, first_block: int, blocks: Seq[int]) -> None:
        """Grant our blocks to the peer that has begun, for the prompt blocks from `first_block` on;
        `blocks` may be empty."""
        self._carry_out(self._sink.offer(key, first_block, blocks, self._clock.now()))

    def abort(self, key: HandoffKey) -> None:
        """The blocks are no longer wanted; granted ones stay fenced until `on_unfenced`."""
        self._carry_out(self._sink.abort(key))

    # -- events -----------------------------------------------------------------------------

    def begin(self, begun: KvBegun) -> None:
        """The peer holds every block of the prompt."""
        self._carry_out(self._sink.begun(begun))

    def close(self, closed: KvClosed) -> None:
        """The peer posts no more writes."""
        self._carry_out(self._sink.closed(closed, self._clock.now()))

    def lose(self, incarnation: str) -> None:
        """The peer is gone."""
        self._carry_out(self._sink.agent_gone(incarnation, self._clock.now()))

    def follow(self, event: NotificationArrived) -> None:
        """Note landed blocks. Undecodable notifications are counted and dropped."""
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

    # -- decisions of the sink ----------------------------------------------------------------

    def _carry_out(self, actions: list[SinkAction]) -> None:
        for action in actions:
            match action:
                case SendAsk(peer, ask):
                    self._peers.send(peer, ask)
                case Begun(key):
                    self._owner.on_begun(key)
                case SendGrant(peer, grant):
                    self._peers.send(peer, grant)
                case SendRenew(peer, renew):
                    self._peers.send(peer, renew)
                case SendAbort((request_id, attempt), peer):
                    self._peers.send(peer, Abort(request_id=request_id, attempt=attempt))
                case Verify(key, blocks, digests):
                    intact = self._host.transfer_peers.digests(blocks) == list(digests)
                    self._carry_out(self._sink.verified(key, intact))
                case Complete(key):
                    self._owner.on_complete(key)
                case Failed(key, reason, arrived):
                    self._owner.on_failed(key, reason, arrived)
                case Unfence(key):
                    self._owner.on_unfenced(key)
