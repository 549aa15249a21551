"""Cached blocks that move when a worker drains: its own to others, and those of others to it."""

from __future__ import annotations

from process.sockets.control import Peer
from protocol.handoff_messages import CacheAsk, CacheOffer
from worker.host import WorkerHost
from worker.inbound.handoffs import InboundHandoffs
from worker.inbound.leaving_cache import LeavingCache
from worker.inbound.source_links import SourcePeers
from worker.inbound.taken_caches import TakenCaches


class MovingCaches:
    """Both directions of one worker; belongs to the loop's thread."""

    def __init__(self, host: WorkerHost, inbound: InboundHandoffs, peers: SourcePeers) -> None:
        self.taken = TakenCaches(host, inbound, peers)
        self._leaving = LeavingCache(host, peers)
        inbound.on_prefix = self.taken.take

    @property
    def is_leaving(self) -> bool:
        """Whether others may still want blocks of this worker, which drains."""
        return self._leaving.is_open

    def handle(self, peer: Peer, message: CacheOffer | CacheAsk) -> None:
        """Handle a message of a worker that offers its cache or asks for ours."""
        match message:
            case CacheOffer():
                self.taken.offer(peer.name)
            case CacheAsk():
                self._leaving.ask(peer, message)

    def lose(self, peer: Peer) -> None:
        """Note that a connection is gone."""
        self._leaving.lose(peer)

    def sweep(self, is_busy: bool, is_serving: bool) -> None:
        """Take the next steps; `is_busy`: requests are here; `is_serving`: peers fetch blocks."""
        self._leaving.sweep(is_busy, is_serving)
        self.taken.sweep()
