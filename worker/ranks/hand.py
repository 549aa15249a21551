"""The process of one rank of a worker that is not its head: `python -m worker.ranks.hand FD PID`.

Loads its shard of the weights, maps its part of the KV pool, and computes the steps that the head
announces on the socket FD. It schedules nothing and talks to nobody else. It ends with the head,
whose process id is PID: when the head says so, when the socket closes, or by the kernel's signal
when the head is killed. It ignores signals to the worker's group, which the head answers.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace

import torch

from engine.loader import load_follower
from engine.native.library import load_library
from engine.parallel.grouped_ranks import grouped_ranks
from engine.parallel.shared_memory import RankMemory
from engine.parallel.sums import RankLost
from process.allocator import spare_the_collector
from process.logs import setup_logs
from protocol.error_line import one_line
from protocol.errors import ConfigError, ModelLoadError
from worker.ranks.cards import groups_of
from worker.ranks.link import Orders, Place, mapped, receive

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1


def main(argv: Sequence[str]) -> int:
    """Run until the head ends it; returns the exit status."""
    link, head = socket.socket(fileno=int(argv[0])), int(argv[1])
    _end_with(head)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    orders, file = receive(link)
    assert isinstance(orders, Orders)
    try:
        name = f"{orders.worker} rank {orders.shard.number}"
        setup_logs(orders.log_level, orders.log_format, name)
        torch.set_num_threads(orders.threads)
        if orders.devices:
            _work_on_card(orders, link, file)
        else:
            _work(orders, link, mapped(file, orders.memory))
    except (ConfigError, ModelLoadError) as error:
        print(f"rank {orders.shard.number}: {one_line(error)}", file=sys.stderr)
        return 2
    except RankLost as error:
        log.info("ends: %s", error)
        return 1
    except RuntimeError as error:  # of a card: its memory, its kernels, its graphs
        log.debug("the rank has failed", exc_info=True)
        print(f"rank {orders.shard.number}: {one_line(error)}", file=sys.stderr)
        return 1
    return 0


def _work(orders: Orders, link: socket.socket, shared: memoryview) -> None:
    kernels = load_library(prebuilt=orders.config.kernels_dir)
    memory = RankMemory(kernels, shared, orders.sizes)
    ranks = memory.ranks(orders.shard, [link], orders.limit_s)

    def allocate(num_bytes: int) -> memoryview:
        place, file = receive(link)
        assert isinstance(place, Place)
        assert place.num_bytes == num_bytes
        return mapped(file, place)

    follower, _ = load_follower(orders.config, ranks, allocate)
    spare_the_collector()
    follower.run()


def _work_on_card(orders: Orders, link: socket.socket, file: int) -> None:
    """Like `_work`, with a pool of this rank's own, among ranks that reach each other by process
    groups that meet in `file`."""
    config = replace(orders.config, device=orders.devices[orders.shard.number])
    groups = groups_of(orders.shard, orders.devices, file, config.card_sums)
    try:
        follower, _ = load_follower(config, grouped_ranks(groups, [link]))
        spare_the_collector()
        follower.run()
    finally:
        groups.close()


def _end_with(head: int) -> None:
    """Let the kernel kill this process when the head ends, however it ends."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != head:
        sys.exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
