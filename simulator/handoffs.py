"""Handoffs of one simulated worker: the real state machines, with messages as events.

`kv_transfer.handoff` decides; messages to peers take the network's latency, writes its bandwidth.
Nothing is ever lost here, so nothing has to be repeated: leases never expire.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kv_transfer.handoff.actions import (
    Begun,
    Close,
    Complete,
    PostWrite,
    Release,
    SendAbort,
    SendAsk,
    SendBegun,
    SendGrant,
    SinkAction,
    SourceAction,
    Unfence,
)
from kv_transfer.handoff.key import HandoffKey, key_of
from kv_transfer.handoff.sink import HandoffSink
from kv_transfer.handoff.source import HandoffSource
from protocol.handoff_messages import GroupBlocks, KvAsk, KvBegun, KvClosed, KvGrant, KvWritten
from simulator.event_queue import Action, EventQueue
from simulator.network import Network

FOREVER_S = 1e6


class HandoffOwner(Protocol):
    """The worker whose handoffs these are."""

    name: str
    number: int
    bytes_by_group: Sequence[float]
    windows: Sequence[int | None]

    def deliver(self, handler: Action, *arguments: object) -> None:
        """Handle a message now, or after the step under way."""

    def on_begun(self, key: HandoffKey) -> None:
        """The source holds the whole prompt."""

    def on_complete(self, key: HandoffKey) -> None:
        """Every granted block has arrived."""

    def on_first_token(self, key: HandoffKey) -> None:
        """The source has sent the first token."""

    def on_granted(self, key: HandoffKey, num_bytes: float) -> None:
        """The sink has granted blocks of `num_bytes` in all."""

    def on_written(self, key: HandoffKey, num_blocks: int, began: float, ended: float) -> None:
        """Blocks were written to the sink."""

    def on_released(self, key: HandoffKey) -> None:
        """The handoff is over at its source."""


class Handoffs:
    """The handoffs that a worker sends and receives; `peers` has every worker's by its name."""

    def __init__(
        self, owner: HandoffOwner, queue: EventQueue, network: Network, message_s: float
    ) -> None:
        self.peers: dict[str, Handoffs] = {}
        self.owner = owner
        self._source = HandoffSource(margin_s=0.0, windows=owner.windows)
        self._sink = HandoffSink(owner.name, ttl_s=FOREVER_S, landing_s=0.0)
        self._queue = queue
        self._network = network
        self._message_s = message_s
        self._tokens: set[HandoffKey] = set()  # handoffs whose first token waits for the sink's ask

    @property
    def num_open(self) -> int:
        """Handoffs that are not over, in either direction."""
        return self._source.num_open + self._sink.num_open

    # -- the sink's side --------------------------------------------------------------------

    def ask(self, key: HandoffKey, source: str) -> None:
        """Ask a worker for the prompt that it will compute."""
        self._act(self._sink.ask(key, source, self._queue.now))

    def offer(self, key: HandoffKey, blocks: Sequence[GroupBlocks]) -> None:
        """Grant blocks of every group to the source, which has begun."""
        first, *others = blocks
        now = self._queue.now
        self._act(self._sink.offer(key, first.first_block, first.block_ids, now, others))

    def abort(self, key: HandoffKey) -> None:
        """Tell the source that no blocks are needed."""
        self._act(self._sink.abort(key))

    def hear_begun(self, message: KvBegun) -> None:
        self._act(self._sink.begun(message))

    def hear_written(self, message: KvWritten) -> None:
        self._act(self._sink.written(message))

    def hear_closed(self, message: KvClosed) -> None:
        self._act(self._sink.closed(message, self._queue.now))

    # -- the source's side ------------------------------------------------------------------

    def open(self, key: HandoffKey, num_blocks: int) -> None:
        """Expect to send a prompt of `num_blocks`."""
        self._carry_out(self._source.open(key, num_blocks, self._queue.now, FOREVER_S))

    def begin(self, key: HandoffKey) -> None:
        """This worker holds blocks for the whole prompt."""
        self._carry_out(self._source.begin(key, self._queue.now))

    def ready(self, key: HandoffKey, blocks: GroupBlocks, chunk: int) -> None:
        """These blocks are computed."""
        first, ids, now = blocks.first_block, blocks.block_ids, self._queue.now
        self._carry_out(self._source.blocks_ready(key, first, ids, chunk, now, blocks.group))

    def finish(self, key: HandoffKey) -> None:
        """The prompt is computed, and its first token known."""
        if self._source.is_open(key):
            self._tokens.add(key)
        self._try_send_token(key)
        self._carry_out(self._source.finish(key, self._queue.now, FOREVER_S))

    def hear_ask(self, message: KvAsk) -> None:
        self._carry_out(self._source.ask(message, self._queue.now))
        self._try_send_token(key_of(message))

    def hear_grant(self, message: KvGrant) -> None:
        key = key_of(message)
        sizes = zip(message.groups, self.owner.bytes_by_group, strict=True)
        self.owner.on_granted(key, sum(len(each.block_ids) * size for each, size in sizes))
        self._carry_out(self._source.grant(message, self._queue.now))

    def hear_abort(self, key: HandoffKey, agent: str) -> None:
        self._carry_out(self._source.abort(key, agent=agent))

    def end_write(self, write: PostWrite, began: float, ended: float) -> None:
        self.owner.on_written(write.key, len(write.source_blocks), began, ended)
        self._carry_out(self._source.write_finished(write.write_id, None))

    # -- steps ------------------------------------------------------------------------------

    def _try_send_token(self, key: HandoffKey) -> None:
        agent = self._source.agent_of(key)
        if agent is not None and key in self._tokens:
            self._tokens.discard(key)
            self._send(agent, self.peers[agent].owner.on_first_token, key)

    def _send(self, peer: str, handler: Action, *arguments: object) -> None:
        time = self._queue.now + self._message_s
        self._queue.at(time, self.peers[peer].owner.deliver, handler, *arguments)

    def _act(self, actions: list[SinkAction]) -> None:
        for action in actions:
            match action:
                case SendAsk(peer, ask):
                    self._send(peer, self.peers[peer].hear_ask, ask)
                case SendGrant(peer, grant):
                    self._send(peer, self.peers[peer].hear_grant, grant)
                case SendAbort(key, peer):
                    self._send(peer, self.peers[peer].hear_abort, key, self.owner.name)
                case Begun(key):
                    self.owner.on_begun(key)
                case Complete(key):
                    self.owner.on_complete(key)
                case Unfence():
                    pass  # the blocks belong to a sequence that continues
                case _:
                    raise AssertionError(f"nothing fails here: {action}")

    def _carry_out(self, actions: list[SourceAction]) -> None:
        for action in actions:
            match action:
                case PostWrite():
                    self._post(action)
                case SendBegun(key, agent):
                    begun = KvBegun(request_id=key.request_id, attempt=key.attempt)
                    self._send(agent, self.peers[agent].hear_begun, begun)
                case Close(key, agent):
                    closed = KvClosed(request_id=key.request_id, attempt=key.attempt)
                    self._send(agent, self.peers[agent].hear_closed, closed)
                case Release(key):
                    self._tokens.discard(key)
                    self.owner.on_released(key)
                case _:
                    raise AssertionError(f"nobody fetches here: {action}")

    def _post(self, write: PostWrite) -> None:
        sink, ours = self.peers[write.agent], self.owner
        notification, began = write.notification(), self._queue.now

        def landed() -> None:
            sink.owner.deliver(sink.hear_written, notification)
            ours.deliver(self.end_write, write, began, self._queue.now)

        num_bytes = len(write.source_blocks) * ours.bytes_by_group[write.group]
        self._network.send(ours.number, sink.owner.number, num_bytes, landed)
