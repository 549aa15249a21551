"""Whether the copy of one chunk's blocks is hidden behind the computation of the next.

In one process, one stream computes a chunk while another copies as many blocks as a chunk fills,
as a write over CUDA IPC does on one card. Part `split` measures the same between two processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from bench.gpu.checks import BLOCK_SIZE, Card, Passes, Row, seconds
from engine.attention.base import Segment


def check_overlap(card: Card, passes: Passes, chunk: int) -> Iterator[Row]:
    """Measure a chunk alone, its blocks' copy alone and both at once. The pool must hold two
    chunks."""
    num_blocks = -(-chunk // BLOCK_SIZE)
    compute = _chunk(card, passes, chunk)
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


def _chunk(card: Card, passes: Passes, chunk: int) -> Callable[[], None]:
    segment = Segment(chunk, chunk, range(-(-chunk // BLOCK_SIZE)))
    tokens = torch.ones(chunk, dtype=torch.int64, device=card.device)
    positions = torch.arange(chunk, device=card.device)
    no_rows = torch.empty(0, dtype=torch.int64, device=card.device)

    def compute() -> None:
        passes.attention.plan([segment])
        passes.model.forward(tokens, positions, passes.attention, no_rows)

    return compute
