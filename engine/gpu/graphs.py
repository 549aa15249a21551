"""Decode steps as CUDA graphs: one captured pass per padded number of sequences.

A replay launches a whole step at once, where the host would launch some hundred kernels one by
one. Captured kernels read fixed buffers; each step fills the buffers and plans attention before it
replays its graph. All graphs share one memory pool and one logits tensor, since only one graph runs
at a time.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from engine.attention.base import AttentionBackend, Segment
from engine.models.runnable import RunnableModel
from engine.packed_copy import on_device
from engine.sampling.chosen_tokens import LateTokens

logger = logging.getLogger(__name__)

_WARM_UP_PASSES = 2  # these passes compile and tune kernels, which must not happen during capture

GRAPH_BYTES = 4 << 20
"""Approximate size of a graph on a card: some kilobytes for each of its kernels."""


class Replay(Protocol):
    """A captured pass; calling it runs the pass again."""

    def __call__(self) -> None:
        """Queue the pass on the current stream."""


Capture = Callable[[Callable[[], None]], Replay]
"""Captures a pass and returns its replay."""


class DecodeGraphs:
    """One graph for each of `sizes`; owns the buffers of tokens, positions and logits.

    `make_attention(size)` creates the backend that is captured with a graph. Capturing writes to
    the pool's block 0, which must not be in use yet.
    """

    def __init__(
        self,
        model: RunnableModel,
        make_attention: Callable[[int], AttentionBackend],
        sizes: Sequence[int],
        capture: Capture,
    ) -> None:
        self._sizes = sorted(sizes)
        # [2, M] int64: tokens and positions, filled by one copy
        self._inputs = torch.zeros((2, self._sizes[-1]), dtype=torch.int64, device=model.device)
        self._tokens, self._positions = self._inputs
        shape = (self._sizes[-1], model.config.vocab_size)
        self._logits = torch.empty(shape, dtype=torch.float32, device=model.device)
        self._attention: dict[int, AttentionBackend] = {}
        self._graphs: dict[int, Replay] = {}
        started = time.monotonic()
        for done, size in enumerate(reversed(self._sizes), start=1):  # largest first: sizes memory
            attention = self._attention[size] = make_attention(size)
            attention.plan([Segment(1, 1, [0])])
            self._graphs[size] = capture(self._pass(model, size, attention))
            logger.info("captured the decode graph of %d (%d of %d)", size, done, len(sizes))
        logger.info("captured %d graphs in %.1f s", len(sizes), time.monotonic() - started)

    @property
    def max_sequences(self) -> int:
        """The largest batch that has a graph."""
        return self._sizes[-1]

    def padded(self, num_sequences: int) -> int:
        """See CapturedDecodes."""
        return self._sizes[bisect_left(self._sizes, num_sequences)]

    def logits(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        segments: Sequence[Segment],
        late: LateTokens | None = None,
    ) -> torch.Tensor:
        """Logits [B, vocab], fp32, of B decodes; valid until the next call.

        B is 1 to `max_sequences`; the results of padding rows are dropped. `late` tokens replace
        some of `tokens`.
        """
        size = self.padded(len(tokens))
        self._attention[size].plan(segments)
        inputs = np.zeros(tuple(self._inputs.shape), dtype=np.int64)
        inputs[:, : len(tokens)] = tokens, positions
        arrays = {"inputs": inputs} if late is None else {"inputs": inputs, "late": late.index}
        on = on_device(arrays, self._inputs.device)
        self._inputs.copy_(on["inputs"])
        if late is not None:
            late.put(self._tokens, on["late"])
        self._graphs[size]()
        return self._logits[: len(tokens)]

    def _pass(
        self, model: RunnableModel, size: int, attention: AttentionBackend
    ) -> Callable[[], None]:
        tokens, positions = self._tokens[:size], self._positions[:size]
        logits = self._logits[:size]

        def run() -> None:
            model.logits(model.hidden(tokens, positions, attention), logits)

        return run


def graph_sizes(max_sequences: int) -> list[int]:
    """Batch sizes to capture, up to `max_sequences`. Padding is at most 7 rows up to size 64, 15 up
    to 256, and 31 beyond."""
    steps = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_sequences, 32)]
    return [size for size in steps if size < max_sequences] + [max_sequences]


class CudaCapture:
    """`Capture` with CUDA graphs that share one memory pool.

    All graphs are warmed up and captured on one stream: cuBLAS keeps a workspace per stream, and
    graphs share memory only if they use the same workspace. Other threads (a transport's) may use
    the card meanwhile; their work neither enters a graph nor invalidates the capture.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    @torch.inference_mode()
    def __call__(self, run: Callable[[], None]) -> Replay:
        """See Capture."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UP_PASSES):
                run()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            run()
        return graph.replay
