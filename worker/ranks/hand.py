"""The process of one rank of a worker that is not its head: `python -m worker.ranks.hand FD PID`.

Gets its orders on the socket FD, loads its shard of the weights, maps its part of the KV pool, and
computes the steps that the head announces. A rank on a card has a pool of its own, and moves its
blocks when the head says so. A hand schedules nothing, and takes orders from nobody but the head
and, on other hosts, their node. It ends with the process PID that started it, the head
or another host's node: by the head's word, when the socket closes, or by the kernel's signal when
PID is killed. Where the head is on another host, it also ends when its node falls silent. Signals
to the worker's group are PID's to answer.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

import torch

from engine.loader import load_follower
from engine.native.library import load_library
from engine.parallel.grouped_ranks import grouped_ranks
from engine.parallel.shared_memory import RankMemory
from engine.parallel.sums import RankLost
from process.allocator import spare_the_collector
from process.bound_command import bind_to
from process.logs import setup_logs
from protocol.error_line import one_line
from protocol.errors import ConfigError, ModelLoadError
from worker.ranks.cards import groups_of
from worker.ranks.end_thread import serve_ends
from worker.ranks.link import Orders, OwnPool, Place, Wanted, mapped, mesh_of, receive, send

log = logging.getLogger(__name__)

_BEATS = 64


def main(argv: Sequence[str]) -> int:
    """Run until the head ends it; returns the exit status."""
    link, head = socket.socket(fileno=int(argv[0])), int(argv[1])
    if not bind_to(head, signal.SIGKILL):
        return 1
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    orders, (memory, steps) = receive(link)
    assert isinstance(orders, Orders)
    try:
        name = f"{orders.worker} rank {orders.shard.number}"
        setup_logs(orders.log_level, orders.log_format, name)
        torch.set_num_threads(orders.threads)
        steps_link = socket.socket(fileno=steps)
        if orders.devices:
            _work_on_card(orders, link, steps_link, memory)
        else:
            _work(orders, link, steps_link, mapped(memory, orders.memory))
    except (ConfigError, ModelLoadError) as error:
        print(f"rank {orders.shard.number}: {one_line(error)}", file=sys.stderr)
        return 2
    except RankLost as error:
        log.info("ends: %s", error)
        return 1
    except torch.OutOfMemoryError as error:
        advice = "use more ranks, a smaller memory_fraction or a card that nobody else uses"
        print(f"rank {orders.shard.number}: {one_line(error)}: {advice}", file=sys.stderr)
        return 1
    return 0


def _work(orders: Orders, link: socket.socket, steps: socket.socket, shared: memoryview) -> None:
    kernels = load_library(prebuilt=orders.config.kernels_dir)
    memory = RankMemory(kernels, shared, orders.sizes)
    mesh = mesh_of(orders.address, orders.shard, orders.sizes, [steps], orders.limit_s)
    ranks = memory.ranks(orders.shard, [steps], orders.limit_s, mesh)
    base_address = 0

    def allocate(num_bytes: int) -> memoryview:
        nonlocal base_address
        if orders.is_away:
            send(link, Wanted(num_bytes))
        place, (file,) = receive(link)
        assert isinstance(place, Place)
        assert place.num_bytes == num_bytes
        view = mapped(file, place)
        base_address = ctypes.addressof(ctypes.c_char.from_buffer(view))
        return view

    follower, pool = load_follower(orders.config, ranks, allocate)
    if orders.is_away:
        groups = tuple((each.block_bytes, each.num_blocks) for each in pool.groups)
        send(link, OwnPool(pool.base_address - base_address, groups, pool.layout))
        _end_in_silence(link, orders.limit_s)
    spare_the_collector()
    follower.run()


def _work_on_card(orders: Orders, link: socket.socket, steps: socket.socket, file: int) -> None:
    """Like `_work`, with a pool of this rank's own, among ranks that reach each other by process
    groups that meet in `file`."""
    config = replace(orders.config, device=orders.devices[orders.shard.number])
    groups = groups_of(orders.shard, orders.devices, file, config.card_sums)
    with ExitStack() as stack:
        stack.callback(groups.close)
        follower, pool = load_follower(config, grouped_ranks(groups, [steps]))
        if orders.transport:
            assert follower.under_way is not None
            ends = serve_ends(link, orders.transport, pool, follower.under_way)
            stack.callback(ends.close)
        spare_the_collector()
        follower.run()


def _end_in_silence(link: socket.socket, limit_s: float) -> None:
    """End this process when nothing comes on the link for so long: the node that passes on the
    head's word, or the head, is gone."""

    def listen() -> None:
        link.settimeout(limit_s)
        why = "its node is gone"
        try:
            while link.recv(_BEATS):
                pass
        except TimeoutError:
            why = f"the head has sent nothing for {limit_s:g} s"
        except OSError as error:
            why = f"its node is gone: {error}"
        log.warning("ends: %s", why)
        logging.shutdown()
        os._exit(1)

    threading.Thread(target=listen, name="head-beats", daemon=True).start()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
