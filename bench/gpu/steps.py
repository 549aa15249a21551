"""Where the time of a step on a card goes.

- The host's share, with and without running one step ahead: of decodes, and of prompts that are one
  chunk each. Whole steps of the engine are measured: planning, launching, sampling, committing. A
  profiler trace of some steps shows how long the card was idle; it is kept for Perfetto.
- Whether the copy of one chunk's blocks is hidden behind the computation of the next: one stream
  computes a chunk while another copies as many blocks as a chunk fills, as a write over CUDA IPC
  does on one card. Part `split` measures the same between two processes.
- Attention alone, by FlashInfer's kernels: decodes beside a chunk, by one call and by two; chunks,
  by fa3 and by fa2.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from bench.gpu.card import BLOCK_SIZE, Card, Passes, Row, seconds
from engine.attention.base import Segment
from engine.attention.flashinfer_attention import FlashInferAttention
from engine.attention.pool_layers import PoolLayers
from engine.device import wait_for
from engine.engine import Engine, EngineLimits
from engine.gpu.tuning import MixedStep, measure_mixed, time_attention
from engine.model_runner import ModelRunner
from engine.sampling.grammar import Grammars
from engine.sampling.sampler import Sampler
from protocol.sampling import SamplingParams
from scheduling.block_manager import BlockManager
from scheduling.scheduler import Scheduler, SchedulerConfig
from scheduling.sequence import Sequence as EngineSequence
from scheduling.sequence import SequenceState
from scheduling.step_model import StepModel

SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "top-p": {"temperature": 0.8, "top_p": 0.95},
}
_ON_CARD = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of a trace's events
_WARM_UP_STEPS = 5
MIXED_STEPS = (
    MixedStep(16, 1024, 512),
    MixedStep(32, 1024, 2048),
    MixedStep(128, 1024, 512),
    MixedStep(32, 8192, 2048),
)
CHUNKS = ((512, 512), (512, 8192), (2048, 2048), (8192, 8192))
"""Tokens of a chunk and of its context."""


@dataclass(frozen=True)
class Decodes:
    """Sequences that decode together, the context of each, and the steps to measure."""

    batch: int = 32
    context: int = 1024
    num_steps: int = 50
    num_traced: int = 10


@dataclass(frozen=True)
class Prefills:
    """Prompts of `length` tokens that wait for a prefill worker, one to a step."""

    length: int = 512
    num_prompts: int = 50
    num_traced: int = 10


def check_ahead(card: Card, passes: Passes, load: Decodes, folder: Path) -> Iterator[Row]:
    """Time of a step both ways and, on a card, the share of the step for which the card is idle.

    Traces go to `folder`.
    """
    for sampling in SAMPLING:
        what = f"batch {load.batch} at {load.context}, {sampling}"
        step_s = {}
        for ahead in (False, True):
            how = "one ahead" if ahead else "one by one"
            engine = _engine(passes, load)
            engine.run_ahead(int(ahead))
            _begin(engine, load, sampling)
            step_s[ahead] = _step_s(engine, load, card.device)
            note = f"{1e3 * step_s[ahead]:.3f} ms a step"
            if card.device.type == "cuda":
                file = folder / f"trace-{sampling}-{how.replace(' ', '-')}.json"
                idle = _traced_idle(partial(_run, engine, load.num_traced), card.device, file)
                goal = "< 5" if ahead else ""
                yield Row("ahead", f"{what}: card idle, {how}", 100 * idle, "% of step", goal, note)
            _end(engine)
        yield Row("ahead", f"{what}: step, over one by one", step_s[True] / step_s[False], "x")


def check_prefill_ahead(card: Card, passes: Passes, load: Prefills, folder: Path) -> Iterator[Row]:
    """Like `check_ahead`, for steps that each give a prompt its first token, as on a prefill
    worker."""
    what = f"prompts of {load.length}, one a step"
    step_s = {}
    for ahead in (False, True):
        how = "one ahead" if ahead else "one by one"
        engine = _engine(passes, Decodes(batch=1, context=load.length))
        engine.run_ahead(int(ahead))
        _prefill(engine, load, 2)  # makes everything that is made at first use
        started = time.perf_counter()
        _prefill(engine, load, load.num_prompts)
        step_s[ahead] = (time.perf_counter() - started) / load.num_prompts
        if card.device.type == "cuda":
            file = folder / f"trace-prompts-{load.length}-{how.replace(' ', '-')}.json"
            idle = _traced_idle(partial(_prefill, engine, load, load.num_traced), card.device, file)
            note = f"{1e3 * step_s[ahead]:.3f} ms a step"
            yield Row("ahead", f"{what}: card idle, {how}", 100 * idle, "% of step", "", note)
    yield Row("ahead", f"{what}: step, over one by one", step_s[True] / step_s[False], "x")


def idle_share(events: Iterable[dict[str, Any]]) -> float:
    """Share of the time from the first to the last event on the card in which the card is idle;
    `events` are a trace's, times in microseconds. Raises ValueError if none is on a card."""
    spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") in _ON_CARD)
    if not spans:
        raise ValueError("the trace has no event on a card")
    first, until = spans[0][0], spans[0][0]
    busy = 0.0
    for start, end in spans:
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return 1 - busy / (until - first)


def _engine(passes: Passes, load: Decodes) -> Engine:
    model, pool = passes.model, passes.pool
    vocab_size = model.config.vocab_size
    grammars = Grammars(Path("none"), vocab_size, ())
    runner = ModelRunner(model, passes.attention, Sampler(vocab_size), grammars, passes.graphs)
    config = SchedulerConfig(
        BLOCK_SIZE,
        max_batch_size=load.batch,
        chunk_min_tokens=load.context,
        chunk_max_tokens=load.context,
    )
    scheduler = Scheduler(config, BlockManager(pool.num_blocks), StepModel())
    limits = EngineLimits(vocab_size, 2 * load.context)
    return Engine(scheduler, runner, pool.layout, limits, time.monotonic)


def _begin(engine: Engine, load: Decodes, sampling: str) -> None:
    """Prefill all sequences and run warm-up steps that only decode."""
    num_tokens = 2 * _WARM_UP_STEPS + load.batch + load.num_steps + load.num_traced
    for number in range(load.batch):
        sequence = EngineSequence(
            request_id=f"bench-{number}",
            attempt=0,
            tokens=[number + 10] * load.context,
            num_prompt=load.context,
            sampling=SamplingParams(max_tokens=2 * num_tokens, seed=number, **SAMPLING[sampling]),
            root_hash=b"bench",
            block_size=BLOCK_SIZE,
            arrival=time.monotonic(),
            deadline=float("inf"),
        )
        engine.scheduler.add(sequence)
    while any(s.state is not SequenceState.RUNNING for s in engine.scheduler.sequences):
        engine.run(engine.plan())
    _run(engine, _WARM_UP_STEPS)


def _step_s(engine: Engine, load: Decodes, device: torch.device) -> float:
    started = time.perf_counter()
    _run(engine, load.num_steps)
    seconds = time.perf_counter() - started
    wait_for(device)
    return seconds / load.num_steps


def _prefill(engine: Engine, load: Prefills, num_prompts: int) -> None:
    """Prompts that share no blocks, each until it has its first token."""
    scheduler = engine.scheduler
    scheduler.blocks.clear_cache()
    for number in range(num_prompts):
        sequence = EngineSequence(
            request_id=f"prompt-{number}",
            attempt=0,
            tokens=[number + 10] * load.length,
            num_prompt=load.length,
            sampling=SamplingParams(max_tokens=2, seed=number, temperature=0.0),
            root_hash=b"bench",
            block_size=BLOCK_SIZE,
            arrival=time.monotonic(),
            deadline=float("inf"),
            prefill_only=True,
        )
        scheduler.add(sequence)
    while scheduler.has_work or engine.is_ahead:
        for produced in engine.run(engine.plan()).produced:
            scheduler.release_blocks(produced.sequence)


def _traced_idle(steps: Callable[[], None], device: torch.device, file: Path) -> float:
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        steps()
        wait_for(device)
    profiler.export_chrome_trace(str(file))
    return idle_share(json.loads(file.read_text())["traceEvents"])


def _run(engine: Engine, num_steps: int) -> None:
    for _ in range(num_steps):
        engine.run(engine.plan())


def _end(engine: Engine) -> None:
    for sequence in engine.scheduler.sequences:
        engine.scheduler.finish(sequence)
    engine.run(engine.plan())


def check_overlap(card: Card, passes: Passes, chunk: int) -> Iterator[Row]:
    """Measure a chunk alone, its blocks' copy alone and both at once. The pool must hold two
    chunks."""
    num_blocks = -(-chunk // BLOCK_SIZE)
    compute = chunk_work(card, passes, chunk)
    source = passes.pool.tensor[num_blocks : 2 * num_blocks]
    target = torch.empty_like(source)
    beside = _stream_beside(card.device)

    def copy() -> None:
        with beside():
            target.copy_(source, non_blocking=True)

    def both() -> None:
        with beside():
            target.copy_(source, non_blocking=True)
        compute()

    compute_s, copy_s, both_s = (seconds(work, card.device) for work in (compute, copy, both))
    hidden = (compute_s + copy_s - both_s) / copy_s
    note = (
        f"{1e3 * compute_s:.2f} ms computing, {1e3 * copy_s:.2f} ms copying "
        f"{source.nbytes / 1e6:.0f} MB, {1e3 * both_s:.2f} ms both"
    )
    yield Row("overlap", f"chunk of {chunk}: copy hidden", 100 * hidden, "% of copy", note=note)
    slower = 100 * (both_s / compute_s - 1)
    yield Row("overlap", f"chunk of {chunk}: slower beside a copy", slower, "% of chunk")


def _stream_beside(device: torch.device) -> Callable[[], AbstractContextManager[object]]:
    """Contexts whose work starts after the current stream's earlier work and runs beside its later
    work; `seconds` waits for both."""
    if device.type != "cuda":
        return nullcontext
    stream = torch.cuda.Stream(device)

    @contextmanager
    def beside() -> Iterator[None]:
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            yield

    return beside


def chunk_work(card: Card, passes: Passes, chunk: int) -> Callable[[], None]:
    """The computing of a prompt's first chunk, in the first blocks of the pool."""
    segment = Segment(chunk, chunk, range(-(-chunk // BLOCK_SIZE)))
    tokens = torch.ones(chunk, dtype=torch.int64, device=card.device)
    positions = torch.arange(chunk, device=card.device)
    no_rows = torch.empty(0, dtype=torch.int64, device=card.device)

    def compute() -> None:
        passes.attention.plan([segment])
        passes.model.forward(tokens, positions, passes.attention, no_rows)

    return compute


def check_kernels(
    attention: FlashInferAttention,
    other: FlashInferAttention,
    layers: PoolLayers,
    chunks: Sequence[tuple[int, int]] = CHUNKS,
) -> Iterator[Row]:
    """Time of chunks with the other kernel, divided by that with the chosen one."""
    for chunk, context in chunks:
        num_blocks = -(-context // layers.block_size)
        segment = Segment(chunk, context, range(num_blocks))
        spent_s = [time_attention(each, layers, [segment]) for each in (attention, other)]
        yield Row(
            "mixed",
            f"chunk of {chunk} in {context}: the other kernel's time over the chosen one's",
            spent_s[1] / spent_s[0],
            "x",
            note=f"{1e3 * spent_s[1]:.3f} against {1e3 * spent_s[0]:.3f} ms",
        )


def check_mixed(
    attention: FlashInferAttention, layers: PoolLayers, steps: Sequence[MixedStep]
) -> Iterator[Row]:
    """Time of two calls divided by that of one: above 1, one call is faster."""
    for step in steps:
        times = measure_mixed(attention, layers, step)
        yield Row(
            "mixed",
            f"{step.num_decodes} decodes of {step.context} beside a chunk of {step.chunk}: "
            "two calls over one",
            times.two_calls / times.one_call,
            "x",
            note=f"{1e3 * times.two_calls:.3f} against {1e3 * times.one_call:.3f} ms, "
            f"{len(layers.caches)} layers, plans included",
        )
