"""The hands of a worker on one host: their processes, the memory that they share, and their ends.

Starts hands, gives them memory, and reports how a hand has ended. Knows nothing of the steps that
go over the links. Belongs to the thread that creates it. That thread has to outlive it, because the
hands end with the thread.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from typing import Protocol

from engine.checkpoint.shard import Shard
from engine.engine_config import EngineConfig
from engine.host_memory import oom_kills
from engine.parallel.shared_memory import RankSizes
from kv_transfer.transports.memory_file import SharedMemory
from worker.ranks.link import Orders, Place, send

log = logging.getLogger(__name__)

_END_S = 5.0


@dataclass(frozen=True)
class HandSettings:
    """What hands need of their worker's settings: the model runs on `num_stages` stages of `size`
    ranks, on `num_hosts`. With several hosts, ranks reach this one's at `address`."""

    config: EngineConfig
    size: int
    threads: int
    log_level: str
    log_format: str
    worker: str
    num_stages: int = 1
    devices: tuple[str, ...] = ()
    """Of all ranks, by their numbers, if each has a card."""
    num_hosts: int = 1
    address: str = ""
    transport: str = ""
    """Of KV blocks, for ranks that each have a pool of their own; "" if they exchange none."""


class SharedByRanks(Protocol):
    """What the ranks of this host share: a file, and where in it their memory lies, if any."""

    file: int
    place: Place
    sizes: RankSizes

    def stop(self) -> None:
        """End all waits of all ranks."""

    def close(self) -> None:
        """Release what they share."""


class HandProcesses:
    """Some of a worker's hands. `links` carry orders, and `steps` the head's announcements, both in
    the order of the hands."""

    def __init__(
        self,
        settings: HandSettings,
        shared: SharedByRanks,
        numbers: range,
        limit_s: float,
        loading_s: float,
    ) -> None:
        """Start the hands of these numbers, which load their shards at once. A step waits `limit_s`
        for a rank, and the reader of a link whose hand is loading, `loading_s`. The object owns
        `shared` from now on."""
        self.links: list[socket.socket] = []
        self.steps: list[socket.socket] = []
        self.numbers = numbers
        self._shared = shared
        self._processes: list[subprocess.Popen[bytes]] = []
        self._settings = settings
        self._limit_s = limit_s
        self._loading_s = loading_s
        self._oom_kills = oom_kills()
        for number in numbers:
            self._start(Shard.numbered(number, settings.size, settings.num_stages))

    def give(self, memory: SharedMemory) -> None:
        """Give each hand the memory of the pools of all ranks on this host. Raises RankLost."""
        for link in self.links:
            send(link, Place.of(memory), memory.file)

    def how_ended(self, index: int) -> str:
        """How a hand has ended whose link has closed."""
        process = self._processes[index]
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            return "its connection"
        code = process.returncode
        if code == -signal.SIGKILL and oom_kills() > self._oom_kills:
            return f"by signal {-code}: memory ran out"
        return f"by signal {-code}" if code < 0 else f"with status {code}"

    def ended(self) -> dict[int, str]:
        """How those hands have ended whose links have closed, by number."""
        poll = select.poll()
        for each in self.steps:
            poll.register(each, select.POLLRDHUP)
        closed = {file for file, _ in poll.poll(0)}
        return {
            number: self.how_ended(index)
            for index, number in enumerate(self.numbers)
            if self.steps[index].fileno() in closed
        }

    def close(self) -> None:
        """Wait for the processes, which have been told to end, and kill those that do not."""
        self._shared.stop()
        for link in (*self.links, *self.steps):
            link.close()
        for process in self._processes:
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                log.warning("rank process %d does not end: it is killed", process.pid)
                process.kill()
                process.wait()
        self._shared.close()

    def _start(self, shard: Shard) -> None:
        link, its_link = socket.socketpair()
        steps, its_steps = socket.socketpair()
        self.links.append(link)
        self.steps.append(steps)
        settings = self._settings
        with its_link, its_steps:
            self._processes.append(start_hand(its_link))
            orders = Orders(
                shard,
                self._shared.sizes,
                settings.config,
                settings.threads,
                self._shared.place,
                self._limit_s,
                settings.log_level,
                settings.log_format,
                settings.worker,
                settings.devices,
                settings.address,
                is_away=0 not in self._shared.sizes.local(shard.number),
                transport=settings.transport,
            )
            link.settimeout(self._loading_s)
            steps.settimeout(self._loading_s)
            send(link, orders, self._shared.file, its_steps.fileno())


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
