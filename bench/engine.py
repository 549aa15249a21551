"""Tokens per second of Baton's engine and of transformers, on the same checkpoint in one run.

    python -m bench.engine --model demo_model [--dtype bfloat16] [--threads 2] [--repeat 3]

Prefill of 512 and 2,048 tokens, decode at batch 1, 8 and 32 with 512 tokens of context. Each
figure is the median of the repeats, taken in turn (ours, theirs, ours, ...), so that a machine
whose speed drifts treats both alike. Needs transformers (`pip install baton-serve[test]`);
`--no-peer` leaves it out.
"""

from __future__ import annotations

import argparse
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from engine.engine import Engine
from engine.loader import EngineConfig, LoadedEngine, load_engine
from engine.scheduler import SchedulerConfig
from engine.sequence import Sequence
from protocol.errors import BatonError
from protocol.sampling import SamplingParams

BLOCK_SIZE = 16
DECODE_STEPS = 16
CONTEXT = 512
PREFILL_LENGTHS = (512, 2048)
BATCH_SIZES = (1, 8, 32)


@dataclass(frozen=True)
class Work:
    """What one figure measures: a prompt, or decode steps of a batch at a context."""

    kind: str
    size: int

    @property
    def label(self) -> str:
        """As the table shows it."""
        if self.kind == "prefill":
            return f"prefill {self.size:,}"
        return f"decode {self.size} at context {CONTEXT}"


WORKS = [Work("prefill", n) for n in PREFILL_LENGTHS] + [Work("decode", n) for n in BATCH_SIZES]


class BatonRun:
    """Our engine, fed directly: scheduler, runner and sampler, no network."""

    def __init__(self, loaded: LoadedEngine) -> None:
        self._engine: Engine = loaded.engine
        self._vocab = loaded.config.vocab_size
        self._count = 0

    def measure(self, work: Work, rng: random.Random) -> float:
        """Tokens per second."""
        if work.kind == "prefill":
            self._add(work.size, 1, rng)
            started = time.perf_counter()
            self._drain()
            return work.size / (time.perf_counter() - started)
        for _ in range(work.size):
            self._add(CONTEXT, DECODE_STEPS + 2, rng)
        while True:
            batch = self._engine.plan()
            if not batch.chunks:
                break
            self._engine.run(batch)
        self._engine.run(batch)
        started = time.perf_counter()
        steps = 0
        while self._engine.scheduler.num_running == work.size:
            self._engine.run(self._engine.plan())
            steps += 1
        elapsed = time.perf_counter() - started
        self._drain()
        return work.size * steps / elapsed

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
                block_size=BLOCK_SIZE,
                arrival=0.0,
                deadline=float("inf"),
            )
        )

    def _drain(self) -> None:
        while self._engine.scheduler.has_work:
            self._engine.run(self._engine.plan())


class TransformersRun:
    """The same work by transformers: `forward` with its own cache, greedy choice by argmax."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        self._vocab = self._model.config.vocab_size

    @torch.inference_mode()
    def measure(self, work: Work, rng: random.Random) -> float:
        """Tokens per second."""
        rows, length = (1, work.size) if work.kind == "prefill" else (work.size, CONTEXT)
        prompt = torch.tensor([[rng.randrange(self._vocab) for _ in range(length)]] * rows)
        started = time.perf_counter()
        out = self._model(prompt, use_cache=True, logits_to_keep=1)
        out.logits.argmax(-1)
        if work.kind == "prefill":
            return work.size / (time.perf_counter() - started)
        started = time.perf_counter()
        for _ in range(DECODE_STEPS):
            token = out.logits[:, -1].argmax(-1, keepdim=True)
            out = self._model(token, past_key_values=out.past_key_values, use_cache=True)
        out.logits.argmax(-1)
        return rows * DECODE_STEPS / (time.perf_counter() - started)


def load_ours(folder: Path, dtype: str, device: str) -> LoadedEngine:
    """An engine whose chunks take a whole prompt and whose pool holds the largest batch."""
    longest = max(PREFILL_LENGTHS)
    scheduler = SchedulerConfig(
        block_size=BLOCK_SIZE,
        max_batch_size=max(BATCH_SIZES),
        chunk_min_tokens=longest,
        chunk_max_tokens=longest,
        itl_target_s=float("inf"),
    )
    blocks = max(BATCH_SIZES) * (-(-(CONTEXT + DECODE_STEPS + 2) // BLOCK_SIZE) + 1)
    config = EngineConfig(folder, scheduler, dtype, device, num_blocks=blocks)
    loaded = load_engine(config, time.monotonic)
    if loaded.engine.limits.max_context <= longest:
        raise BatonError(f"the model's context must exceed {longest} tokens")
    return loaded


def measure(runs: Mapping[str, Callable[[Work, random.Random], float]], repeat: int) -> Table:
    """All works, each by every contestant in turn; the medians and their ratio."""
    table = Table("work", *(f"{name} tokens/s" for name in runs), "ratio")
    for work in WORKS:
        figures: dict[str, list[float]] = {name: [] for name in runs}
        for turn in range(repeat + 1):
            for name, run in runs.items():
                figure = run(work, random.Random(turn))
                if turn > 0:  # the first turn warms up
                    figures[name].append(figure)
        medians = [statistics.median(values) for values in figures.values()]
        ratio = f"{medians[0] / medians[1]:.2f}x" if len(medians) > 1 else ""
        table.add_row(work.label, *(f"{median:,.0f}" for median in medians), ratio)
    return table


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.engine", description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("demo_model"), help="checkpoint folder")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (ours only)")
    parser.add_argument("--threads", type=int, help="torch threads (default: torch's choice)")
    parser.add_argument("--repeat", type=int, default=3, help="counted repeats (default: 3)")
    parser.add_argument("--no-peer", action="store_true", help="leave transformers out")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    console = Console()
    try:
        loaded = load_ours(options.model, options.dtype, options.device)
    except BatonError as error:
        print(f"bench.engine: {error}", file=sys.stderr)
        return 2
    dtype = loaded.engine.layout.dtype
    runs = {"baton": BatonRun(loaded).measure}
    if not options.no_peer:
        runs["transformers"] = TransformersRun(options.model, getattr(torch, dtype)).measure
    console.print(
        f"{options.model}, {dtype}, {options.device}, torch {torch.__version__}, "
        f"{torch.get_num_threads()} threads, {platform.machine()}"
    )
    console.print(measure(runs, options.repeat))
    return 0


if __name__ == "__main__":
    sys.exit(main())
