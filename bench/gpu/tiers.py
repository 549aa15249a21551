"""How fast blocks move between a card's pool and pinned host memory, alone and beside computing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from bench.gpu.card import BLOCK_SIZE, Card, Passes, Row, seconds
from bench.gpu.steps import chunk_work
from engine.device import bind_thread
from engine.gpu.pinned_copies import PinnedCopies
from kv_transfer.tiers.copies import BlockCopies, HostCopies
from kv_transfer.transports.interface import PoolMemory


@dataclass
class _Copying:
    """Copies that run in a thread of their own, like those of a tier."""

    copy: Callable[[], None]
    num_bytes: int
    device: torch.device
    num_copies: int = 0
    took_s: float = 0.0

    def run(self, until: threading.Event) -> None:
        """Copy again and again."""
        bind_thread(self.device)
        started = time.perf_counter()
        while not until.is_set():
            self.copy()
            self.num_copies += 1
        self.took_s = time.perf_counter() - started

    @property
    def gb_per_s(self) -> float:
        """The rate of all copies together."""
        return self.num_copies * self.num_bytes / self.took_s / 1e9


def check_tiers(card: Card, passes: Passes, chunk: int) -> Iterator[Row]:
    """Copy a chunk's blocks both ways, alone and while other chunks are computed, and compare them.
    The pool must hold two chunks."""
    pool, number = passes.pool, -(-chunk // BLOCK_SIZE)
    copies = _copies(passes, number)
    blocks, slots = list(range(number, 2 * number)), list(range(number))
    compute = chunk_work(card, passes, chunk)
    compute_s = seconds(compute, card.device)
    num_bytes = number * pool.block_bytes
    before = pool.tensor[number : 2 * number].clone()
    for way, copy in (
        ("to host memory", lambda: copies.save(blocks, slots)),
        ("from host memory", lambda: copies.load(slots, blocks)),
    ):
        what = f"blocks {way}"
        alone = num_bytes / seconds(copy, card.device) / 1e9
        note = f"{num_bytes / 1e6:.0f} MB at once"
        yield Row("tiers", f"{what}, alone", alone, "GB/s", note=note)
        copying, until = _Copying(copy, num_bytes, card.device), threading.Event()
        thread = threading.Thread(target=copying.run, args=(until,))
        thread.start()
        both_s = seconds(compute, card.device)
        until.set()
        thread.join()
        note = f"chunks of {chunk}: {1e3 * compute_s:.2f} ms alone, {1e3 * both_s:.2f} ms beside"
        yield Row("tiers", f"{what}, beside chunks", copying.gb_per_s, "GB/s", note=note)
        slower = 100 * (both_s / compute_s - 1)
        yield Row("tiers", f"chunks beside copies {way}", slower, "% slower")
    after = pool.tensor[number : 2 * number]
    same = torch.equal(before.view(torch.uint8), after.view(torch.uint8))
    yield Row("tiers", "blocks that came back", float(same), "equal" if same else "failed")


def _copies(passes: Passes, num_slots: int) -> BlockCopies:
    pool = passes.pool
    if pool.device.type == "cuda":
        return PinnedCopies(pool, pool.block_bytes, num_slots)
    memory = PoolMemory(pool.base_address, pool.block_bytes, pool.num_blocks, "cpu")
    return HostCopies(memory, num_slots)
