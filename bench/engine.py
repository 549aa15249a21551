"""Tokens per second of Baton's engine and of its peers, on the same checkpoint in one run.

    python -m bench.engine --model M1|M2|FOLDER [--peers llama.cpp,vllm,transformers,openvino]
        [--peer-python vllm=PYTHON] [--threads 2] [--repeat 3] [--sweep]

Prefill of 512 and 2,048 tokens, decode at batch 1, 8 and 32 with 512 tokens of context; with
`--sweep` decode at batch 8 as the context grows to 8,192. Each figure is the median of the
repeats, with their spread, taken in turn (ours, theirs, the machine's limits, ours, ...), so that a
machine whose speed drifts treats all alike. M1 and M2 are made on first use (see
bench.checkpoints). Installs nothing: a peer that is not there is named, with how to get it; each
runs in a process of its own (see bench.peer_process). `--attention kernel,torch` compares our own
backends.
"""

from __future__ import annotations

import argparse
import contextlib
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

from bench.checkpoints import SHAPES, benchmark_checkpoint
from bench.engine_plot import plot_side_by_side, plot_sweep
from bench.limits import MachineLimits, StepNeeds, step_needs
from bench.peer_process import PEERS, PeerProcess, interpreters, is_installed
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
SWEEP_BATCH = 8
SWEEP_CONTEXTS = (512, 1024, 2048, 4096, 8192)


@dataclass(frozen=True)
class Work:
    """What one figure measures: a prompt of `length` tokens, or decode steps of `batch` sequences
    that have `length` tokens each."""

    kind: str
    batch: int
    length: int

    @property
    def label(self) -> str:
        """As the table shows it."""
        if self.kind == "prefill":
            return f"prefill {self.length:,}"
        return f"decode {self.batch} at {self.length:,}"

    @property
    def num_tokens(self) -> int:
        """That the engine's pool has to hold."""
        return self.batch * (self.length + DECODE_STEPS + 2 + BLOCK_SIZE)


WORKS = [Work("prefill", 1, n) for n in PREFILL_LENGTHS]
WORKS += [Work("decode", n, CONTEXT) for n in BATCH_SIZES]
SWEEP = [Work("decode", SWEEP_BATCH, context) for context in SWEEP_CONTEXTS]


class BatonRun:
    """Our engine, fed directly: scheduler, runner and sampler, no network."""

    def __init__(self, loaded: LoadedEngine) -> None:
        self._engine: Engine = loaded.engine
        self._vocab = loaded.config.vocab_size
        self._count = 0
        self.bookkeeping: dict[Work, list[float]] = {}

    def measure(self, work: Work, rng: random.Random) -> float:
        """Tokens per second."""
        if work.kind == "prefill":
            self._add(work.length, 1, rng)
            started = time.perf_counter()
            self._drain()
            return work.length / (time.perf_counter() - started)
        for _ in range(work.batch):
            self._add(work.length, DECODE_STEPS + 2, rng)
        while True:
            batch = self._engine.plan()
            if not batch.chunks:
                break
            self._engine.run(batch)
        self._engine.run(batch)
        started = time.perf_counter()
        steps, computing = 0, 0.0
        while self._engine.scheduler.num_running == work.batch:
            result = self._engine.run(self._engine.plan())
            computing += result.ended - result.started
            steps += 1
        elapsed = time.perf_counter() - started
        self.bookkeeping.setdefault(work, []).append(1 - computing / elapsed)
        self._drain()
        return work.batch * steps / elapsed

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


class PeerRun:
    """The same work by a peer."""

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
    folder: Path, options: argparse.Namespace, attention: str, weights: str, works: list[Work]
) -> LoadedEngine:
    """An engine whose chunks take a whole prompt and whose pool holds the largest work."""
    chunk = max(PREFILL_LENGTHS)
    scheduler = SchedulerConfig(
        block_size=BLOCK_SIZE,
        max_batch_size=max(BATCH_SIZES),
        chunk_min_tokens=chunk,
        chunk_max_tokens=chunk,
        itl_target_s=float("inf"),
    )
    blocks = max(work.num_tokens for work in works) // BLOCK_SIZE + 1
    config = EngineConfig(
        folder,
        scheduler,
        options.dtype,
        options.device,
        blocks,
        attention=attention,
        weights=weights,
    )
    loaded = load_engine(config, time.perf_counter)
    if loaded.engine.limits.max_context < _longest(works):
        raise BatonError(f"the model's context must hold {_longest(works)} tokens")
    return loaded


def _longest(works: list[Work]) -> int:
    """Tokens of one sequence, at most."""
    return max(work.length for work in works) + DECODE_STEPS + 2


Run = Callable[[Work, random.Random], float]
Figures = dict[Work, dict[str, list[float]]]


def measure(
    works: list[Work], runs: Mapping[str, Run], repeat: int, limits: MachineLimits | None
) -> Figures:
    """All works, each by every contestant in turn, tokens/s; the limits once per turn."""
    figures: Figures = {work: {name: [] for name in runs} for work in works}
    for work in works:
        for turn in range(repeat + 1):
            for name, run in runs.items():
                # Seeds of its own: a prompt that began like another would be found in the cache
                figure = run(work, random.Random(f"{work.label}, {turn}"))
                if turn > 0:  # the first turn warms up
                    figures[work][name].append(figure)
            if limits is not None:
                limits.measure()
    return figures


def report(
    figures: Figures, needs: StepNeeds, limits: MachineLimits | None, ours: BatonRun
) -> Table:
    """Medians with the least and the most; our ratio to each other; our share of the limit."""
    first, *others = next(iter(figures.values()))
    columns = [f"{name} tokens/s" for name in (first, *others)] + [f"over {n}" for n in others]
    table = Table("work", *columns, "share of limit", "bookkeeping")
    for work, by_name in figures.items():
        medians = {name: statistics.median(values) for name, values in by_name.items()}
        cells = [
            f"{medians[name]:,.0f} ({min(values):,.0f}-{max(values):,.0f})"
            for name, values in by_name.items()
        ]
        cells += [f"{medians[first] / medians[name]:.2f}x" for name in others]
        cells.append("" if limits is None else _share(work, medians[first], needs, limits))
        kept = ours.bookkeeping.get(work)
        cells.append(f"{statistics.median(kept):.1%}" if kept else "")
        table.add_row(work.label, *cells)
    return table


def _share(work: Work, tokens_per_s: float, needs: StepNeeds, limits: MachineLimits) -> str:
    """Prefill of the arithmetic limit; decode of the bandwidth."""
    if work.kind == "prefill":
        flops = needs.prefill_flops(work.length) * tokens_per_s / work.length
        return f"{flops / limits.flops_per_s:.0%} of FLOP/s"
    streamed = needs.decode_bytes(work.batch, work.length) * tokens_per_s / work.batch
    return f"{streamed / limits.bytes_per_s:.0%} of bytes/s"


def installed_peers(names: str, pythons: dict[str, str]) -> tuple[list[str], list[str]]:
    """Of the peers named, comma-separated: those that are there, and what to say of the others."""
    there, missing = [], []
    for name in filter(None, names.split(",")):
        if name not in PEERS:
            raise BatonError(f"peer {name!r} is not known; known are {', '.join(PEERS)}")
        if is_installed(PEERS[name], pythons[name]):
            there.append(name)
        else:
            missing.append(f"{name} is not installed: {PEERS[name].how}")
    return there, missing


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.engine", description=__doc__)
    parser.add_argument("--model", default="demo_model", help="M1, M2 or a checkpoint's folder")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (ours only)")
    parser.add_argument("--attention", default="auto", help="auto, kernel, torch, or several")
    parser.add_argument("--weights", default="auto", help="auto, int8, int4, or several")
    parser.add_argument("--threads", type=int, help="torch threads (default: torch's choice)")
    parser.add_argument("--repeat", type=int, default=3, help="counted repeats (default: 3)")
    parser.add_argument("--peers", default="transformers", help="comma-separated; '' for none")
    parser.add_argument("--peer-python", action="append", default=[], help="NAME=PYTHON")
    parser.add_argument("--plot", type=Path, help="write a picture here")
    parser.add_argument("--sweep", action="store_true", help="decode as the context grows")
    return parser.parse_args()


def _compare(options: argparse.Namespace, console: Console) -> None:
    works = SWEEP if options.sweep else WORKS
    pythons = interpreters(options.peer_python)
    peers, missing = installed_peers(options.peers, pythons)
    for line in missing:
        console.print(line, soft_wrap=True, markup=False)
    folder = benchmark_checkpoint(options.model) if options.model in SHAPES else Path(options.model)
    loaded = {
        f"baton ({attention}, {weights})": load_ours(folder, options, attention, weights, works)
        for attention in options.attention.split(",")
        for weights in options.weights.split(",")
    }
    ours = {name: BatonRun(engine) for name, engine in loaded.items()}
    runs: dict[str, Run] = {name: run.measure for name, run in ours.items()}
    first = next(iter(loaded.values()))
    dtype = first.engine.layout.dtype
    limits = MachineLimits() if options.device == "cpu" and dtype == "bfloat16" else None
    versions = [f"torch {torch.__version__}"]
    with contextlib.ExitStack() as stack:
        for name in peers:
            threads, context = torch.get_num_threads(), _longest(works)
            started = PeerProcess(name, pythons[name], folder, dtype, threads, context)
            process = stack.enter_context(started)
            versions.append(process.version)
            runs[name] = PeerRun(process).measure
        figures = measure(works, runs, options.repeat, limits)
    console.print(
        f"{options.model}, {dtype}, {options.device}, {torch.get_num_threads()} threads, "
        f"{platform.machine()}; {'; '.join(versions)}",
        soft_wrap=True,
    )
    needs = step_needs(first.config)
    console.print(report(figures, needs, limits, next(iter(ours.values()))))
    if limits is not None:
        console.print(
            f"limits in this run: {limits.bytes_per_s / 1e9:.1f} GB/s by a prepacked "
            f"matrix-vector product, {limits.flops_per_s / 1e12:.2f} TFLOP/s by a large product"
        )
    if options.plot is not None:
        _plot(options, figures, needs, limits)


def _plot(
    options: argparse.Namespace, figures: Figures, needs: StepNeeds, limits: MachineLimits | None
) -> None:
    by_label = {work.label: by_name for work, by_name in figures.items()}
    if not options.sweep:
        plot_side_by_side(options.model, by_label, options.plot)
    elif limits is None:
        raise BatonError("--plot of a sweep needs the machine's limits: bfloat16 on a CPU")
    else:
        sizes = [needs.decode_bytes(work.batch, work.length) for work in figures]
        title = f"{options.model}: decode at batch {SWEEP_BATCH} as the context grows"
        plot_sweep(title, by_label, SWEEP_BATCH, sizes, limits.bytes_per_s, options.plot)


def main() -> int:
    """The command line."""
    options = _parse()
    if options.threads:
        torch.set_num_threads(options.threads)
    try:
        _compare(options, Console(width=max(Console().width, 120)))
    except BatonError as error:
        print(f"bench.engine: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
