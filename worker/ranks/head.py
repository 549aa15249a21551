"""The head's side of a worker's ranks: starts a process for each other rank, and ends the worker
when one of them ends.

The head is rank 0: it schedules, samples and moves blocks. Its hands compute the steps that it
announces, each on its shard of weights and KV blocks. They share three things with it: a socket
each, the memory through which sums and hidden states go, and the KV pool, which the head allocates
for all. The group lives and dies as one: a hand that ends takes the worker with it at once, and a
hand that stands still fails the step that waits for it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.checkpoint.config import load_model_config
from engine.checkpoint.shard import Shard
from engine.engine_config import EngineConfig
from engine.native.library import KernelsUnavailable, load_library
from engine.parallel.link_watch import LinkWatch
from engine.parallel.ranks import Ranks
from engine.parallel.shared_memory import RankMemory, RankSizes
from engine.parallel.sums import RankLost
from kv_transfer.transports.memory_file import SharedMemory
from protocol.errors import ConfigError
from worker.ranks.cards import CardRanks
from worker.ranks.link import Orders, Place, send

log = logging.getLogger(__name__)

SILENCE_S = 30.0
"""How long a step waits for a rank by default; workers have their own value."""
LOADING_S = 900.0
"""How much longer than the head a rank may take to load its weights."""
_END_S = 5.0
_WIDEST_BYTES = 4  # the most bytes of one number in a hidden state


@dataclass(frozen=True)
class HandSettings:
    """The part of a worker's settings that its hands need. The model runs on `num_stages` stages of
    `size` ranks."""

    config: EngineConfig
    size: int
    threads: int
    log_level: str
    log_format: str
    worker: str
    num_stages: int = 1
    devices: tuple[str, ...] = ()
    """Of all ranks, by their numbers, if each has a card."""


class HostRanks:
    """What the ranks of a host's CPUs share: memory for sums and hidden states."""

    def __init__(self, settings: HandSettings, limit_s: float) -> None:
        """Raises ConfigError without our kernels."""
        try:
            kernels = load_library(prebuilt=settings.config.kernels_dir)
        except KernelsUnavailable as error:
            raise ConfigError(f"several ranks on a CPU need our own kernels: {error}") from error
        self.sizes = sizes = _sizes(settings)
        self._memory = SharedMemory(sizes.num_bytes)
        self._shared = RankMemory(kernels, memoryview(self._memory.view), sizes)
        self._limit_s = limit_s
        self.place, self.file = Place.of(self._memory), self._memory.file

    def ranks(
        self, own: Shard, links: Sequence[socket.socket], on_loaded: Callable[[], None]
    ) -> Ranks:
        """The ranks, seen from the head."""
        return self._shared.ranks(own, links, self._limit_s)

    def stop(self) -> None:
        """End all waits of all ranks."""
        self._shared.stop()

    def close(self) -> None:
        """Release the memory."""
        self._memory.close()


class Hands:
    """The other ranks of a worker; the head talks to them through `ranks`. Belongs to the thread
    that creates it, which has to outlive it, because the hands end when this thread ends."""

    def __init__(
        self,
        settings: HandSettings,
        lost: Callable[[str], None],
        silence_s: float = SILENCE_S,
        loading_s: float = LOADING_S,
    ) -> None:
        """Start the hands, which load their shards at once. A step waits `silence_s` for a hand.
        `lost` is called from another thread, with the reason, when a hand ends after `allocate`.
        When a hand ends earlier, its link closes, and calls of `ranks` raise RankLost. Raises
        ConfigError without our kernels."""
        self._lost = lost
        self._processes: list[subprocess.Popen[bytes]] = []
        self._links: list[socket.socket] = []
        self._pool: SharedMemory | None = None
        self._watch: LinkWatch | None = None
        self._has_cards = bool(settings.devices)
        self._shared: HostRanks | CardRanks
        if settings.devices:
            wanted = settings.config.card_sums
            self._shared = CardRanks(settings.devices, wanted, lost, silence_s)
        else:
            self._shared = HostRanks(settings, silence_s)
        self._is_closed = False
        self._silence_s = silence_s
        self._loading_s = loading_s
        own = Shard.numbered(0, settings.size, settings.num_stages)
        for number in range(1, own.num_ranks):
            shard = Shard.numbered(number, settings.size, settings.num_stages)
            self._start(shard, settings)
        self.ranks = self._shared.ranks(own, self._links, self._watch_links)

    def allocate(
        self, num_bytes: int, by_transport: Callable[[int], SharedMemory | None]
    ) -> memoryview | None:
        """Allocate the memory of all ranks' pools, and send it to each hand. It is the transport's
        memory, or our own if the transport accepts any memory; None if each rank has a pool on its
        card. Raises ConfigError and RankLost."""
        memory = None
        if not self._has_cards:
            memory = by_transport(num_bytes)
            if memory is None:
                memory = self._pool = SharedMemory(num_bytes)
        for link in self._links:
            if memory is not None:
                send(link, Place.of(memory), memory.file)
            link.settimeout(self._silence_s)  # a hand that stands still reads no more steps
        self._watch_links()
        return None if memory is None else memoryview(memory.view)

    def close(self) -> None:
        """Tell the hands to end, wait for their processes, and kill those that do not end. A second
        call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._watch is not None:
            self._watch.close()
        with contextlib.suppress(RankLost):
            self.ranks.announce(None)
        self._shared.stop()
        for link in self._links:
            link.close()
        for process in self._processes:
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                log.warning("rank process %d does not end: it is killed", process.pid)
                process.kill()
                process.wait()
        self._shared.close()
        if self._pool is not None:
            self._pool.close()

    def _watch_links(self) -> None:
        """From now on, report a hand that ends: the head may not wait for it on a link, but on its
        card."""
        if self._watch is None:
            self._watch = LinkWatch(self._links, self._end_group)

    def _start(self, shard: Shard, settings: HandSettings) -> None:
        ours, theirs = socket.socketpair()
        self._links.append(ours)
        with theirs:
            self._processes.append(start_hand(theirs))
        orders = Orders(
            shard,
            self._shared.sizes,
            settings.config,
            settings.threads,
            self._shared.place,
            self._silence_s,
            settings.log_level,
            settings.log_format,
            settings.worker,
            settings.devices,
        )
        ours.settimeout(self._loading_s)
        send(ours, orders, self._shared.file)

    def _end_group(self, rank: int) -> None:
        """End all waits for a hand that has ended, and report the hand to the worker."""
        self._shared.stop()
        process = self._processes[rank - 1]
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
        how = f"with status {process.returncode}"
        if process.returncode is None:
            how = "its connection"
        elif process.returncode < 0:
            how = f"by signal {-process.returncode}"
        self._lost(f"rank {rank} of {self.ranks.shard.num_ranks} has ended {how}")


def start_hand(link: socket.socket) -> subprocess.Popen[bytes]:
    """Start the process of a hand, which gets its orders on `link`."""
    command = [sys.executable, "-P", "-m", "worker.ranks.hand", str(link.fileno())]
    return subprocess.Popen(
        [*command, str(os.getpid())],
        pass_fds=[link.fileno()],
        env=environment_of_hands(),
        stdin=subprocess.DEVNULL,
    )


def environment_of_hands() -> dict[str, str]:
    """This process's environment with the path to our packages, without Baton's secrets and
    settings."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
    return {**kept, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def _sizes(settings: HandSettings) -> RankSizes:
    """The shared memory's sizes. Raises ModelLoadError."""
    limits = settings.config.scheduler
    num_tokens = limits.chunk_max_tokens + limits.max_batch_size
    hidden_size = load_model_config(settings.config.folder).hidden_size
    return RankSizes(settings.size, settings.num_stages, num_tokens * hidden_size * _WIDEST_BYTES)
