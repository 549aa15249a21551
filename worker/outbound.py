"""The source side of handoffs and fetches in a worker: connects the state machine to transfers
and sockets.

`kv_transfer.handoff.source` decides which blocks to write; the transfer thread writes them. Sinks
ask, grant, renew and abort over the control socket, where they also get first tokens and answers.
The blocks of handoffs belong to a `HandoffOwner`, which reports ready blocks and keeps them pinned
until `on_released`. The blocks of fetches come from the cache, and `ServedFetches` pins them.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Protocol

from engine.fences import PASSED, Fence
from kv_transfer.handoff.actions import (
    Close,
    Lookup,
    PostWrite,
    Release,
    SendBegun,
    SourceAction,
)
from kv_transfer.handoff.key import HandoffKey, key_of
from kv_transfer.handoff.source import HandoffSource
from kv_transfer.transfer_loop import (
    PeerFailed,
    TransferEvent,
    WriteCommand,
    WriteFinished,
)
from process.sockets.control import Peer
from protocol import wire
from protocol.errors import ConfigError, ProtocolError
from protocol.field_bounds import MAX_REASON_CHARS
from protocol.handoff_messages import (
    GroupBlocks,
    HandoffToken,
    KvAsk,
    KvBegun,
    KvClosed,
    KvFetch,
    KvGrant,
    KvRenew,
    PeerDescriptor,
    PoolRefused,
    PoolUnreachable,
)
from protocol.messages import Abort, Role
from protocol.traces import WriteSpan
from worker.counters import Count
from worker.host import WorkerHost
from worker.moved_blocks import bytes_by_group
from worker.served_fetches import ServedFetches

log = logging.getLogger(__name__)

_COMPLETE_WAIT_S = 5.0
_MAX_FAILURES = 2
"""After this many failures without a write in between, reconnecting does not help."""

AboutHandoff = KvAsk | KvGrant | KvFetch | KvRenew | Abort
FromSink = PeerDescriptor | AboutHandoff


class HandoffOwner(Protocol):
    """The owner of the blocks. Its methods report progress and must ignore unknown keys."""

    def on_written(self, key: HandoffKey, span: WriteSpan, num_bytes: int) -> None:
        """A span of the handoff's blocks, `num_bytes` in all, has arrived at the sink."""
        ...

    def on_granted(self, key: HandoffKey) -> None:
        """The sink has granted its blocks: ours wait only for their writes now."""
        ...

    def on_unwanted(self, key: HandoffKey) -> None:
        """The sink gave up the handoff; writes may still be outstanding."""
        ...

    def on_closed(self, key: HandoffKey, error: str) -> str:
        """The handoff ended, and the sink is being told; `error` is "" for success. Returns the
        `code` of the fault if the request itself is at fault, otherwise ""."""
        ...

    def on_released(self, key: HandoffKey) -> None:
        """The handoff is over: its blocks need no longer be pinned."""
        ...


class OutboundHandoffs:
    """All handoffs that this worker sends; belongs to the loop's thread."""

    def __init__(self, host: WorkerHost, source: HandoffSource, owner: HandoffOwner) -> None:
        self._host = host
        self._clock = host.clock
        self._counters = host.counters
        self._source = source
        self._owner = owner
        self._writes: dict[int, PostWrite] = {}
        self.served = ServedFetches(host)
        self._block_bytes = bytes_by_group(host.engine.layout)
        self._refused: dict[Peer, str] = {}  # why we never write to the pools of these sinks
        self._agents: dict[Peer, str] = {}  # agents of sinks; a sink may have several connections
        self._speakers: dict[HandoffKey, Peer] = {}  # last used connection
        self._tokens: dict[HandoffKey, HandoffToken] = {}  # until the sink can get it
        self._fences: dict[HandoffKey, dict[int, Fence]] = {}  # fences of open handoffs, by chunk
        # Failures of the connection to a sink's agent since the last write.
        self._failures: Counter[str] = Counter()

    @property
    def num_sinks(self) -> int:
        """Number of connected decode workers whose pools we can write to."""
        return len({agent for peer, agent in self._agents.items() if peer.role is Role.DECODE})

    def is_asked_for(self, key: HandoffKey) -> bool:
        """Whether a sink has asked for this handoff."""
        return self._source.agent_of(key) is not None

    # -- calls by the owner -----------------------------------------------------------------

    def open(self, key: HandoffKey, num_blocks: int, deadline: float, prompt: bytes) -> None:
        """Expect a handoff of `num_blocks` blocks; its grant must arrive before `deadline`.
        `prompt` is the digest of its tokens."""
        self._carry_out(self._source.open(key, num_blocks, self._clock.now(), deadline, prompt))

    def begin(self, key: HandoffKey) -> None:
        """The owner holds every block of the handoff and keeps them until `on_released`."""
        self._carry_out(self._source.begin(key, self._clock.now()))

    def offer(self, key: HandoffKey, blocks: GroupBlocks, chunk: int, fence: Fence) -> None:
        """Offer blocks of the pool, which are ready once `fence` is passed, as are all blocks
        offered before. `chunk` completed them (-1: they were cached)."""
        if self._source.is_open(key):
            self._fences.setdefault(key, {})[chunk] = fence
        actions = self._source.blocks_ready(
            key, blocks.first_block, blocks.block_ids, chunk, self._clock.now(), blocks.group
        )
        self._carry_out(actions)

    def finish(self, key: HandoffKey, token: HandoffToken) -> None:
        """The last block was offered; `token` follows. The sink gets the token once it has asked.

        If this is the output's last token, the router has the whole output and will not report a
        lost sink, so the grant must arrive within `_COMPLETE_WAIT_S`.
        """
        if self._source.is_open(key):
            self._tokens[key] = token
        self._try_send_token(key)
        now = self._clock.now()
        wait_s = float("inf") if token.finish is None else _COMPLETE_WAIT_S
        self._carry_out(self._source.finish(key, now, now + wait_s))

    def abort_all(self, error: str) -> None:
        """Abort every handoff, including those that were only asked for."""
        for key in self._source.keys:
            self.abort(key, error)

    def abort_served(self, error: str) -> None:
        """Abort the fetches that peers began."""
        for key in self._source.keys:
            if key.part:
                self.abort(key, error)

    def abort(self, key: HandoffKey, error: str) -> None:
        """Post no more writes, and give the sink the reason."""
        self._carry_out(self._source.abort(key, error))

    # -- events -----------------------------------------------------------------------------

    def handle(self, peer: Peer, message: FromSink) -> None:
        """Handle a sink's message; refuse it if we cannot write to the sink's pool."""
        if isinstance(message, PeerDescriptor):
            self._add_sink(peer, message)
            return
        agent = self._agents.get(peer)
        if agent is None:
            self._turn_away(peer, key_of(message))
        else:
            self._handle_handoff(peer, agent, message)

    def lose(self, peer: Peer) -> None:
        """Note a lost connection. If it was a sink's last, the sink's handoffs fail."""
        self._speakers = {key: each for key, each in self._speakers.items() if each != peer}
        self._refused.pop(peer, None)
        agent = self._agents.pop(peer, None)
        if agent is not None and self._connection_of(agent) is None:
            self._forget(agent)
            self._carry_out(self._source.peer_lost(agent))

    def follow(self, event: TransferEvent) -> None:
        """Handle an event of the transfer thread other than an arrival."""
        match event:
            case WriteFinished(key=int(write_id)):
                self._finish_write(write_id, event)
            case PeerFailed():
                log.warning("sink's agent %s: %s", event.agent, event.reason)
                self._host.transfer_peers.note_dropped(event.agent)
                self._carry_out(self._source.pool_lost(event.agent))
                peer = self._connection_of(event.agent)
                if not event.is_mismatch:
                    self._count_failure(event.agent)
                elif peer is not None:
                    self._refuse(peer, event.agent, event.reason)
            case _:
                self._host.follow_common(event)

    def sweep(self) -> None:
        """Act on timeouts; called every turn of the loop."""
        self._carry_out(self._source.sweep(self._clock.now()))

    # -- steps ------------------------------------------------------------------------------

    def _add_sink(self, peer: Peer, message: PeerDescriptor) -> None:
        """Take a sink's introduction of its pool, perhaps under another name than before."""
        former = self._agents.get(peer)
        try:
            self._host.transfer_peers.add(message)
        except (ConfigError, ProtocolError) as refusal:
            self._refuse(peer, message.agent, str(refusal))
            return
        self._refused.pop(peer, None)
        self._agents[peer] = message.agent
        if former in (None, message.agent) or self._connection_of(former) is not None:
            return
        log.info("sink's agent %s is %s from now on", former, message.agent)
        self._forget(former)
        self._carry_out(self._source.pool_lost(former, message.agent))

    def _refuse(self, peer: Peer, agent: str, reason: str) -> None:
        """Tell a sink that we never write to its pool, so that routers pair it with others."""
        self._refused[peer] = reason = reason[:MAX_REASON_CHARS]
        self._host.send(peer, PoolRefused(agent=agent, reason=reason))

    def _forget(self, agent: str) -> None:
        self._failures.pop(agent, None)
        self._host.transfer_peers.remove(agent)

    def _count_failure(self, agent: str) -> None:
        """Count a failure of the connection to a sink's pool. The next grant restores it; if that
        does not help, ask the sink for another end."""
        peer = self._connection_of(agent)
        if peer is None:
            return
        self._failures[agent] += 1
        if self._failures[agent] >= _MAX_FAILURES:
            del self._failures[agent]
            self._host.send(peer, PoolUnreachable(agent=agent))

    def _handle_handoff(self, peer: Peer, agent: str, message: AboutHandoff) -> None:
        """Handle a sink's message about a handoff; `agent` is its transfer agent."""
        now, key = self._clock.now(), key_of(message)
        is_forged = isinstance(message, (KvAsk, KvGrant, KvFetch)) and message.agent != agent
        if is_forged or self._source.agent_of(key) not in (None, agent):
            self._host.answer_common(peer, message)  # not this sink's handoff
            return
        self._speakers[key] = peer
        match message:
            case KvAsk():
                self._carry_out(self._source.ask(message, now))
                self._try_send_token(key)
            case KvGrant():
                self._host.transfer_peers.restore(agent)
                self._owner.on_granted(key)
                self._try_send_token(key)  # before KvClosed, which may be the answer
                self._carry_out(self._source.grant(message, now))
            case KvFetch():
                self._host.transfer_peers.restore(agent)
                self._carry_out(self._source.fetch(message, now))
            case KvRenew():
                self._carry_out(self._source.renew(message, agent, now))
            case Abort():
                self._carry_out(self._source.abort(key, agent=agent))
                if not key.part:
                    self._owner.on_unwanted(key)

    def _turn_away(self, peer: Peer, key: HandoffKey) -> None:
        """Answer a sink whose pool we cannot write to, so that it neither waits for us nor keeps
        its blocks fenced. A handoff that the sink asked for over another connection is aborted and
        closes normally."""
        self._counters.add(Count.STALE_MESSAGES)
        reason = "the pool of the sink is not known here"
        if refusal := self._refused.get(peer):
            reason = f"it refused our pool: {refusal}"[:MAX_REASON_CHARS]
        if self._source.agent_of(key) is not None:
            self._speakers[key] = peer
            self._carry_out(self._source.abort(key, reason))
            return
        if self._source.is_open(key):
            self._carry_out(self._source.abort(key, reason))
        request_id, attempt, part = key
        closed = KvClosed(request_id=request_id, attempt=attempt, part=part, error=reason)
        self._host.send(peer, closed)

    def _try_send_token(self, key: HandoffKey) -> None:
        """Send the first token to the sink, once, when both are known."""
        peer = self._listener(key, self._source.agent_of(key))
        if peer is not None and key in self._tokens:
            self._host.send(peer, self._tokens.pop(key))

    def _finish_write(self, write_id: int, event: WriteFinished) -> None:
        write = self._writes.pop(write_id)
        if event.error is None:
            self._failures.pop(write.agent, None)
        if event.error is None and self._source.is_open(write.key):
            num_blocks = len(write.source_blocks)
            span = WriteSpan(event.posted_us, event.done_us, num_blocks, write.chunk)
            self._counters.add(Count.BLOCKS_SENT, num_blocks)
            if write.key.part:
                self.served.note_written(write.key, span)
            else:
                num_bytes = num_blocks * self._block_bytes[write.group]
                self._owner.on_written(write.key, span, num_bytes)
        self._carry_out(self._source.write_finished(write_id, event.error))

    def _carry_out(self, actions: list[SourceAction]) -> None:
        for action in actions:
            match action:
                case PostWrite():
                    self._post(action)
                case SendBegun():
                    self._send_begun(action)
                case Lookup(fetch):
                    blocks, why = self.served.pin(fetch)
                    self._carry_out(self._source.found(fetch, blocks, why, self._clock.now()))
                case Close():
                    self._close(action)
                case Release() if action.key.part:
                    self.served.release(action.key)
                case Release():
                    self._tokens.pop(action.key, None)
                    self._fences.pop(action.key, None)
                    self._owner.on_released(action.key)

    def _post(self, write: PostWrite) -> None:
        """Queue a write. A card or a pipeline may still be computing the blocks: the transfer
        thread, not this one, waits for the fence of the chunk that completed the last of them,
        unless their digests are wanted."""
        self._writes[write.write_id] = write
        is_fetch = write.key.part > 0
        fence = PASSED if is_fetch else self._fences[write.key][write.chunk]
        digests: list[bytes] = []
        if self._host.transfer_peers.wants_digests(write.agent):
            fence.wait()
            digests = self._host.transfer_peers.digests(write.source_blocks, write.group)
        notification = wire.encode(write.notification(digests))
        command = WriteCommand(
            write.write_id,
            write.agent,
            write.source_blocks,
            write.target_blocks,
            notification,
            write.post_before,
            fence,
            yields=is_fetch,
            group=write.group,
        )
        self._host.transfers.write(command)

    def _send_begun(self, action: SendBegun) -> None:
        peer = self._listener(action.key, action.agent)
        if peer is not None:
            request_id, attempt, _ = action.key
            self._host.send(peer, KvBegun(request_id=request_id, attempt=attempt))

    def _close(self, action: Close) -> None:
        part = action.key.part
        code = "" if part else self._owner.on_closed(action.key, action.error)
        peer = self._listener(action.key, action.agent)
        self._speakers.pop(action.key, None)
        if peer is not None:
            closed = KvClosed(
                request_id=action.key.request_id,
                attempt=action.key.attempt,
                part=part,
                error=action.error[:MAX_REASON_CHARS],
                code=code,
                num_blocks=action.num_blocks,
                why=action.why,
                write_us=self.served.write_us(action.key),
            )
            self._host.send(peer, closed)

    def _listener(self, key: HandoffKey, agent: str | None) -> Peer | None:
        """The connection for answers to `agent` about a handoff: the connection over which the sink
        last mentioned the handoff, if still open, otherwise the sink's newest connection."""
        speaker = self._speakers.get(key)
        return self._connection_of(agent) if speaker is None and agent is not None else speaker

    def _connection_of(self, agent: str) -> Peer | None:
        """The newest connection of a sink."""
        peers = [peer for peer, each in self._agents.items() if each == agent]
        return peers[-1] if peers else None
