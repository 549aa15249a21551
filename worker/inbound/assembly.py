"""The parts of a worker that move KV, from its settings: both roles are source and sink."""

from __future__ import annotations

from kv_transfer.handoff.sink import HandoffSink
from kv_transfer.handoff.source import HandoffSource
from worker.host import Surroundings, WorkerHost
from worker.inbound.source_links import SourcePeers

FETCH_WRITE_BYTES = 4 << 20
"""The most bytes that one write of a fetch copies, because a handoff may have to wait for it."""


def make_source(host: WorkerHost) -> HandoffSource:
    """The handoffs and fetches that this worker sends."""
    settings, layout = host.settings, host.engine.layout
    return HandoffSource(
        margin_s=settings.grant_margin_ms / 1e3,
        unasked_s=settings.peer_silence_s,
        max_fetch_blocks=max(1, FETCH_WRITE_BYTES // layout.worker_block_bytes),
        windows=[each.window for each in layout.groups],
    )


def make_sink(host: WorkerHost, agent: str) -> HandoffSink:
    """The handoffs and fetches that this worker receives."""
    settings = host.settings
    return HandoffSink(
        agent,
        ttl_s=settings.grant_ttl_ms / 1e3,
        landing_s=settings.landing_ms / 1e3,
        checksum=settings.kv_checksum,
    )


def make_peers(host: WorkerHost, around: Surroundings) -> SourcePeers:
    """The links to workers from which blocks come."""
    peers = SourcePeers(around, host.poller, host.settings.peer_silence_s)
    around.stack.callback(peers.close)
    host.watch_refusals(lambda: peers.refusals)
    return peers
