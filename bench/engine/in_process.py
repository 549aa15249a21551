"""Runs the engine benchmark's works on an engine without a server: ours in this process, or a
peer's in its own.

Ours is fed directly: scheduler, runner and sampler, no network.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import NamedTuple

from bench.engine.peer_process import PeerProcess
from bench.engine.workloads import BATCH_SIZES, DECODE_STEPS, PREFILL_LENGTHS, Work, longest
from engine.engine import Engine
from engine.engine_config import EngineConfig
from engine.loader import LoadedEngine, load_engine
from protocol.errors import BatonError
from protocol.sampling import SamplingParams
from scheduling.scheduler import SchedulerConfig
from scheduling.sequence import Sequence

Bookkeeping = dict[Work, list[float]]
"""Share of a decode step's time that was not spent computing."""


class EngineKind(NamedTuple):
    """The options of an engine, with the names and values of the workers' settings."""

    attention: str = "auto"
    weights: str = "auto"
    activations: str = "auto"
    kv_dtype: str = "auto"
    kv_order: str = "auto"
    block_size: str = "16"

    @property
    def label(self) -> str:
        """The name in the table: the options that are not the default."""
        defaults = EngineKind()
        options = [
            f"{name.replace('_', ' ')} {value}"
            for name, value, default in zip(self._fields, self, defaults, strict=True)
            if value != default
        ]
        return f"baton ({', '.join(options)})" if options else "baton"


class BatonRun:
    """Our engine, fed directly: scheduler, runner and sampler, no network."""

    def __init__(self, loaded: LoadedEngine) -> None:
        self._engine: Engine = loaded.engine
        self._vocab = loaded.config.vocab_size
        self._count = 0
        self.bookkeeping: Bookkeeping = {}
        self.timed: Callable[[], AbstractContextManager[object]] = nullcontext
        """A context that is entered around timed code."""

    def measure(self, work: Work, rng: random.Random) -> float:
        """Tokens per second."""
        if work.kind == "prefill":
            self._add(work.length, 1, rng)
            with self.timed():
                started = time.perf_counter()
                self._drain()
                return work.length / (time.perf_counter() - started)
        for _ in range(work.batch):
            self._add(work.length, DECODE_STEPS + 2 + prompt_steps(work), rng)
        while True:
            batch = self._engine.plan()
            if not batch.chunks:
                break
            self._engine.run(batch)
        self._engine.run(batch)
        if self._engine.scheduler.num_running < work.batch:
            raise BatonError(f"not all of {work.label} run at once")
        computing = 0.0
        with self.timed():
            started = time.perf_counter()
            for _ in range(DECODE_STEPS):
                result = self._engine.run(self._engine.plan())
                computing += result.ended - result.started
            elapsed = time.perf_counter() - started
        self.bookkeeping.setdefault(work, []).append(1 - computing / elapsed)
        self._drain()
        return work.batch * DECODE_STEPS / elapsed

    def _add(self, num_tokens: int, max_tokens: int, rng: random.Random) -> None:
        self._count += 1
        self._engine.scheduler.add(
            Sequence(
                request_id=str(self._count),
                attempt=0,
                tokens=[rng.randrange(self._vocab) for _ in range(num_tokens)],
                num_prompt=num_tokens,
                sampling=SamplingParams(max_tokens=max_tokens, seed=0, temperature=0.0),
                root_hash=b"bench",
                block_size=self._engine.layout.block_size,
                arrival=0.0,
                deadline=float("inf"),
            )
        )

    def _drain(self) -> None:
        while self._engine.scheduler.has_work:
            self._engine.run(self._engine.plan())


def prompt_steps(work: Work) -> int:
    """Number of steps that compute the prompts of a batch, while finished prompts decode."""
    return -(-work.batch * work.length // max(PREFILL_LENGTHS))


class PeerRun:
    """Lets a peer do the same work as `BatonRun`."""

    def __init__(self, process: PeerProcess) -> None:
        self._process = process

    def measure(self, work: Work, rng: random.Random) -> float:
        """Tokens per second."""
        seed = str(rng.random())
        if work.kind == "prefill":
            return work.length / self._process.seconds(1, work.length, 0, seed)
        seconds = self._process.seconds(work.batch, work.length, DECODE_STEPS, seed)
        return work.batch * DECODE_STEPS / seconds


def load_ours(
    folder: Path, options: argparse.Namespace, kind: EngineKind, works: list[Work]
) -> LoadedEngine:
    """An engine whose chunks take a whole prompt and whose pool holds the largest work.

    Raises BatonError if that is impossible.
    """
    size = kind.block_size
    if not size.isdecimal() or not 1 <= int(size) <= max(PREFILL_LENGTHS):
        raise BatonError(
            f"--block-size takes numbers from 1 to {max(PREFILL_LENGTHS)}, not {size!r}"
        )
    config = engine_config(folder, options.dtype, options.device, kind, works)
    loaded = load_engine(config, time.perf_counter)
    needed = longest(works, num_steps(works))
    if loaded.engine.limits.max_context < needed:
        raise BatonError(f"the model's context must hold {needed} tokens")
    return loaded


def engine_config(
    folder: Path, dtype: str, device: str, kind: EngineKind, works: list[Work]
) -> EngineConfig:
    """A configuration in which chunks take a whole prompt and the pool holds the largest work."""
    chunk, block_size = max(PREFILL_LENGTHS), int(kind.block_size)
    scheduler = SchedulerConfig(
        block_size=block_size,
        max_batch_size=max(BATCH_SIZES),
        chunk_min_tokens=chunk,
        chunk_max_tokens=chunk,
        itl_target_s=float("inf"),
    )
    steps = num_steps(works)
    return EngineConfig(
        folder,
        scheduler,
        dtype,
        device,
        max(work.num_tokens(block_size, steps) for work in works) // block_size + 1,
        attention=kind.attention,
        weights=kind.weights,
        activations=kind.activations,
        kv_dtype=kind.kv_dtype,
        kv_order=kind.kv_order,
    )


def num_steps(works: list[Work]) -> int:
    """The most steps of one work: those that compute its prompts, and those that are timed."""
    return DECODE_STEPS + max(map(prompt_steps, works))
