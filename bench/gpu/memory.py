"""The card memory that an engine takes, compared with the fraction that it was given.

The driver reports the memory in use on the whole card. The first reading is taken through NVML,
which needs no CUDA context, before this process has one, so that the context counts as taken.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.gpu.checks import BLOCK_SIZE, Card, Row, attention_of
from engine.device import wait_for
from engine.engine_config import EngineConfig
from engine.gpu.memory import Taken
from engine.loader import load_engine
from scheduling.scheduler import SchedulerConfig


@dataclass(frozen=True)
class CardUse:
    """Bytes of a card: in total, in use before the engine, and in use with the engine."""

    total: int
    before: int
    after: int

    def of_fraction(self, fraction: float) -> float:
        """The engine's use divided by its allowance."""
        return (self.after - self.before) / (fraction * self.total)


def check_memory(card: Card, folder: Path, fraction: float) -> Iterator[Row]:
    """Measure an engine with graphs and a profiled pool, after its largest prompt and decodes."""
    before = _used(card.device)
    config = EngineConfig(
        folder=folder,
        scheduler=SchedulerConfig(BLOCK_SIZE, max_batch_size=64, chunk_max_tokens=2048),
        dtype="bfloat16",
        device=str(card.device),
        memory_fraction=fraction,
        attention=attention_of(str(card.device)),
    )
    started = time.monotonic()
    loaded = load_engine(config, time.monotonic)
    ready_s = time.monotonic() - started
    loaded.engine.warm_up()
    wait_for(card.device)
    total = torch.cuda.get_device_properties(card.device).total_memory
    yield from memory_rows(CardUse(total, before, _used(card.device)), fraction)
    taken, pool = Taken.now(card.device), loaded.pool
    pool_bytes = pool.num_blocks * pool.block_bytes
    note = f"{pool.num_blocks} blocks of {pool.block_bytes / 1e6:.2f} MB"
    yield Row("memory", "KV pool", pool_bytes / 2**30, "GiB", note=note)
    yield Row("memory", "by torch's count, with the pool", taken.on_card / 2**30, "GiB")
    yield Row("memory", "pinned on the host", taken.pinned / 2**20, "MiB")
    yield Row("memory", "from checkpoint to ready", ready_s, "s", note="profile and graphs")


def memory_rows(use: CardUse, fraction: float) -> Iterator[Row]:
    """The memory taken, and whether it is within the fraction."""
    note = f"{(use.after - use.before) / 2**30:.2f} GiB of {use.total / 2**30:.1f} GiB"
    share = 100 * use.of_fraction(fraction)
    name = f"taken, of a fraction of {fraction:g}"
    yield Row("memory", name, share, "% of allowed", "<= 100", note)


def _used(device: torch.device) -> int:
    """Bytes of the card in use by any process, from the driver."""
    import pynvml  # comes with FlashInfer

    pynvml.nvmlInit()
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(device.index or 0)
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
    finally:
        pynvml.nvmlShutdown()
