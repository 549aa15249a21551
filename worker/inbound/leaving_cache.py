"""The cached blocks of a worker that drains, which others may take over before it ends.

The draining worker shares out its prefixes: it offers its cache to the workers that can use it, and
names each idle prefix to only one of them, most recently used prefixes first. The takers decide how
many blocks they have room for and when they fetch them (`worker.inbound.taken_caches`). Takes no
memory. The worker waits for takers as long as they keep asking, and never beyond its grace period.
"""

from __future__ import annotations

import logging

from process.sockets.control import Peer
from protocol.handoff_messages import CacheAsk, CachedPrefix, CacheOffer
from protocol.layout import KvLayout
from worker.host import WorkerHost
from worker.inbound.source_links import SourcePeers

log = logging.getLogger(__name__)

QUIET_S = 2.0
"""The worker stops waiting for a taker that has neither asked nor fetched for this long."""
_LOOK_S = 0.25
"""The time between two checks of the fleet, and between two searches for prefixes while requests
run."""


class LeavingCache:
    """The offer of one drain; belongs to the loop's thread."""

    def __init__(self, host: WorkerHost, peers: SourcePeers) -> None:
        self._host = host
        self._peers = peers
        self._blocks = host.engine.scheduler.blocks
        self._pools = host.engine.scheduler.pools
        self._begun = False
        self._can_offer = True
        self._has_settled = False  # the fleet knows of the drain, and we know the possible takers
        self._offered: set[str] = set()  # incarnations
        self._takers: set[str] = set()  # workers that were offered the cache and have not finished
        self._asking: dict[Peer, int] = {}  # takers that await an answer, with their room
        self._prefixes: list[list[bytes]] = []  # prefixes to name; the last one is named next
        self._named: set[bytes] = set()  # the last hash of each named prefix
        self._look_at = self._quiet_at = 0.0
        self._next_search = 0.0

    @property
    def is_open(self) -> bool:
        """Whether takers may still ask: the worker should not end."""
        is_over = self._has_settled and not self._takers
        return self._host.lifecycle.is_draining and not is_over

    def ask(self, peer: Peer, ask: CacheAsk) -> None:
        """Note that a taker has room for blocks, or wants no more."""
        if peer.name not in self._takers:
            self._host.send(peer, CachedPrefix(hashes=[]))
            return
        self._quiet_at = self._host.clock.now() + QUIET_S
        if ask.num_blocks:
            self._asking[peer] = ask.num_blocks
        else:
            self._finish(peer)

    def lose(self, peer: Peer) -> None:
        """Note that a connection is gone, and with it a taker's question."""
        self._asking.pop(peer, None)

    def sweep(self, is_busy: bool, is_serving: bool) -> None:
        """Begin with the drain, answer takers, and stop waiting for quiet takers. No taker counts
        as quiet while the worker `is_serving` fetches. While it `is_busy` with requests, more
        prefixes may come."""
        if not self._host.lifecycle.is_draining:
            if self._begun:
                self._start_over()
            return
        now = self._host.clock.now()
        if not self._begun:
            self._begin(now, is_busy)
        self._find_takers(now, is_busy)
        for peer, num_blocks in list(self._asking.items()):
            self._answer(peer, num_blocks, is_busy)
        if is_busy or is_serving or self._asking:
            self._quiet_at = now + QUIET_S
        elif now >= self._quiet_at:
            self._has_settled = True
            self._takers.clear()

    # -- steps ------------------------------------------------------------------------------

    def _begin(self, now: float, is_busy: bool) -> None:
        self._begun, self._quiet_at = True, now + QUIET_S
        reason = why_nothing_moves(self._host.engine.layout)
        self._can_offer = reason is None
        if reason and (is_busy or self._blocks.num_cached > 0):
            log.info("no worker is offered the cached blocks: %s", reason)

    def _find_takers(self, now: float, is_busy: bool) -> None:
        """Offer the cache to workers that have not been offered it, and forget those that have left
        the fleet."""
        if now < self._look_at:
            return
        self._has_settled = self._has_settled or self._peers.is_seen_to_drain
        self._look_at = now + _LOOK_S if self._has_settled else now
        has_some = is_busy or self._blocks.num_cached > 0
        found = self._peers.takers() if has_some and self._can_offer else []
        self._takers &= {each.worker_id for each in found}
        for taker in found:
            if taker.incarnation not in self._offered:
                self._offered.add(taker.incarnation)
                self._takers.add(taker.worker_id)
                self._peers.connect(taker)
                self._peers.send(taker.incarnation, CacheOffer())
                log.info("the cached blocks are offered to %s", taker.worker_id)
        if self._takers and self._has_settled:
            # Do not wait for takers that drain themselves or have ended. The announcement of our
            # drain has read the fleet before.
            self._peers.look_again()

    def _answer(self, peer: Peer, num_blocks: int, is_busy: bool) -> None:
        """Name the next prefix, or as much of it as the taker has room for, up to an end at which
        all groups of layers can continue."""
        prefix = self._next_prefix(is_busy)
        while prefix is not None and self._pools.has_windows:
            end = self._pools.match(prefix[:num_blocks]).num_blocks
            if end:
                prefix = prefix[:end]
                break
            prefix = self._next_prefix(is_busy)
        if prefix is not None:
            del self._asking[peer]
            stays = self._blocks.stay_here(prefix)
            answer = CachedPrefix(hashes=prefix[:num_blocks], stays_in_pool=stays)
            self._host.send(peer, answer)
        elif not is_busy:
            self._host.send(peer, CachedPrefix(hashes=[]))
            self._finish(peer)

    def _next_prefix(self, is_busy: bool) -> list[bytes] | None:
        """The next prefix that was not offered yet. Requests that have ended add some."""
        now = self._host.clock.now()
        if not self._prefixes and (now >= self._next_search or not is_busy):
            self._next_search = now + _LOOK_S
            found = self._blocks.idle_prefixes()
            self._prefixes = [each for each in found if each[-1] not in self._named][::-1]
        if not self._prefixes:
            return None
        prefix = self._prefixes.pop()
        self._named.add(prefix[-1])
        return prefix

    def _finish(self, peer: Peer) -> None:
        self._takers.discard(peer.name)
        self._asking.pop(peer, None)

    def _start_over(self) -> None:
        """Start over, because the drain was taken back."""
        for peer in list(self._asking):
            self._host.send(peer, CachedPrefix(hashes=[]))
        self._asking.clear()
        self._takers.clear()
        self._prefixes.clear()
        self._named.clear()
        self._offered.clear()
        self._begun = self._has_settled = False


def why_nothing_moves(layout: KvLayout) -> str | None:
    """Why blocks with such a layout stay with a worker that drains; None if others may have them:
    a taker goes by prefixes of layers without a window."""
    if layout.groups[0].window is not None:
        return "all layers keep windows"
    return None
