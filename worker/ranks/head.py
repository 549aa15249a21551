"""The head's side of a worker's ranks: starts a process for each other rank, and ends the worker
when one of them ends.

The head is rank 0: it schedules, samples and moves blocks. Its hands compute the steps that it
announces, each on its shard of weights and KV blocks. Those on its host share three things with it:
a socket each, the memory through which sums and hidden states go, and the KV pool, which the head
allocates for all. On cards each has a pool of its own, whose blocks it moves when the head says so
(`end_links`). Those on other hosts are started by their nodes (`other_nodes`). The group lives
and dies as one: a hand that ends takes the worker with it at once, and a hand that stands still
fails the step that waits for it.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Sequence

from engine.checkpoint.shard import Shard
from engine.parallel.link_watch import LinkWatch
from engine.parallel.sums import RankLost
from kv_transfer.transports.distant_end import DistantHost
from kv_transfer.transports.memory_file import SharedMemory
from worker.ranks.cards import CardRanks
from worker.ranks.end_links import EndLinks
from worker.ranks.host_ranks import HostRanks
from worker.ranks.other_nodes import OtherNodes
from worker.ranks.processes import HandProcesses, HandSettings

LOADING_S = 900.0
"""How much longer than the head a rank may take to load its weights."""


class Hands:
    """The other ranks of a worker; the head talks to them through `ranks`. Belongs to the thread
    that creates it, as its `HandProcesses` do."""

    def __init__(
        self,
        settings: HandSettings,
        lost: Callable[[str], None],
        silence_s: float,
        loading_s: float = LOADING_S,
        nodes: OtherNodes | None = None,
    ) -> None:
        """Start the hands of this host, which load their shards at once, and wait for those of the
        other `nodes`, if there are any. A step waits `silence_s` for a hand. `lost` is called from
        another thread, with the reason, when a hand ends after `allocate`. When a hand ends
        earlier, its link closes, and calls of `ranks` raise RankLost. Raises ConfigError if our
        kernels are missing, and RankLost."""
        self._lost = lost
        self._has_cards = bool(settings.devices)
        self._exchanges = self._has_cards and bool(settings.transport)
        self._pool: SharedMemory | None = None
        self._is_closed = False
        self._silence_s = silence_s
        self._nodes = nodes
        self._watch: LinkWatch | None = None
        self._ends: EndLinks | None = None
        self._shared: HostRanks | CardRanks
        if settings.devices:
            wanted = settings.config.card_sums
            self._shared = CardRanks(settings.devices, wanted, lost, silence_s)
        else:
            self._shared = HostRanks(settings, silence_s)
        own = Shard.numbered(0, settings.size, settings.num_stages)
        self._num_ranks = own.num_ranks
        num_local = own.num_ranks // settings.num_hosts
        numbers = range(1, num_local)
        self._own = HandProcesses(settings, self._shared, numbers, silence_s, loading_s)
        self._links = list(self._own.steps)
        try:
            self._links += self._of_nodes(loading_s)
            self.ranks = self._shared.ranks(own, self._links, self._watch_links)
        except RankLost as error:
            explained = self.explained(error)
            self._own.close()
            raise explained from error
        except BaseException:
            self._own.close()
            raise
        if nodes is not None:
            nodes.note_times = self.ranks.times.note

    def allocate(
        self, num_bytes: int, by_transport: Callable[[int], SharedMemory | None]
    ) -> memoryview | None:
        """Allocate the memory of the pools of this host's ranks, and send it to each hand. It is
        the transport's memory, or our own if the transport accepts any memory; None if each rank
        has a pool on its card. Raises ConfigError and RankLost."""
        memory = None
        if not self._has_cards:
            memory = by_transport(num_bytes)
            if memory is None:
                memory = self._pool = SharedMemory(num_bytes)
            self._own.give(memory)
        for link in self._links:
            link.settimeout(self._silence_s)  # a hand that stands still reads no more steps
        self._watch_links()
        if self._exchanges:
            self._ends = EndLinks(self._own.links, self._silence_s, self._lost)
        return None if memory is None else memoryview(memory.view)

    def explained(self, error: RankLost) -> RankLost:
        """The error with how a hand of this host has ended, if one has."""
        for rank, how in self._own.ended().items():
            return RankLost(f"rank {rank} of {self._num_ranks} has ended {how}")
        return error

    @property
    def hosts(self) -> Sequence[DistantHost]:
        """Those who have parts of the pool that the head does not reach, once that is allocated:
        other nodes, or hands with pools of their own."""
        if self._ends is not None:
            return self._ends.hosts
        return () if self._nodes is None else self._nodes.hosts

    def close(self) -> None:
        """Tell the hands to end, wait for their processes, and kill those that do not end. A second
        call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._watch is not None:
            self._watch.close()
        if self._ends is not None:
            self._ends.close()
        with contextlib.suppress(RankLost):
            self.ranks.announce(None)
        self._own.close()
        if self._pool is not None:
            self._pool.close()

    def _watch_links(self) -> None:
        """From now on, report a hand that ends. Without this, a head that waits for its card would
        not notice a closed link."""
        if self._watch is None:
            self._watch = LinkWatch(self._links, self._end_group)

    def _of_nodes(self, loading_s: float) -> list[socket.socket]:
        links = [] if self._nodes is None else self._nodes.links()
        for link in links:
            link.settimeout(loading_s)
        return links

    def _end_group(self, rank: int) -> None:
        """End all waits for a hand that has ended, and report the hand to the worker."""
        self._shared.stop()
        if rank <= len(self._own.links):
            how = f"has ended {self._own.how_ended(rank - 1)}"
        else:
            assert self._nodes is not None
            how = f"is lost: {self._nodes.reason}"
        self._lost(f"rank {rank} of {self._num_ranks} {how}")
