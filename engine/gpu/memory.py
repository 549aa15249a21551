"""Sizes the KV pool on a card: the rest of this process's memory fraction after a profile run.

The profile runs the scheduler's largest step once, over a minimal pool; its peak memory stays
reserved for steps. `memory_fraction` is a fraction of the whole card and covers everything that
this process holds there, so two processes with 0.45 each can share one card.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.attention.base import AttentionBackend, Segment
from engine.gpu.graphs import GRAPH_BYTES
from engine.kv_pool import KvPool, blocks_for_memory
from engine.models.runnable import RunnableModel
from engine.sampling.sample_row import SampleRow
from engine.sampling.sampler import Sampler
from protocol.layout import KvLayout
from protocol.sampling import SamplingParams
from scheduling.pool_sizes import blocks_with

logger = logging.getLogger(__name__)

CONTEXT_BYTES = 768 << 20
"""Memory of CUDA, its libraries and loaded kernels, which torch does not count."""
_WRAPPER_BYTES = 8 << 20  # for the indices of each FlashInfer wrapper, on the card and pinned
_CUBLAS_BYTES = 32 << 20  # cuBLAS's workspace for the stream that captures graphs


@dataclass(frozen=True)
class LargestStep:
    """The size of the largest step: its tokens (chunks and decodes) and its sampled sequences."""

    num_tokens: int
    num_sequences: int


@dataclass(frozen=True)
class Graphs:
    """The number of graphs still to be captured, and of window sizes in each."""

    num_graphs: int
    num_windows: int

    def num_bytes(self, logits_bytes: int) -> int:
        """Memory that the graphs will take, if the largest step's logits take `logits_bytes`."""
        if self.num_graphs == 0:
            return 0
        each = GRAPH_BYTES + self.num_windows * _WRAPPER_BYTES
        return self.num_graphs * each + logits_bytes + _CUBLAS_BYTES


NO_GRAPHS = Graphs(0, 0)


@dataclass(frozen=True)
class CardMemory:
    """Bytes on a card, measured by a profile run."""

    total: int
    free: int
    held: int  # held by this process without the pool: weights, workspaces, attention's memory
    step: int  # additional memory at the peak of the largest step
    graphs: int  # for the graphs still to be captured

    def for_pool(self, fraction: float) -> int:
        """The pool's size if this process may hold `fraction` of the card; at least 0."""
        planned = self.step + self.graphs
        of_fraction = int(self.total * fraction) - self.held - planned - CONTEXT_BYTES
        return max(0, min(of_fraction, self.free - planned))


def blocks_for_card(layout: KvLayout, memory: CardMemory, fraction: float) -> int:
    """How many blocks fit; ConfigError if none does. Logs how the memory is divided."""
    num_blocks = blocks_for_memory(layout, memory.for_pool(fraction))
    logger.info(
        "of %.1f GiB on the card this process takes %d %%: %.1f GiB held, %.2f GiB for a step, "
        "%.2f GiB for graphs, %.1f GiB for up to %d KV blocks",
        memory.total / 2**30,
        round(100 * fraction),
        memory.held / 2**30,
        memory.step / 2**30,
        memory.graphs / 2**30,
        num_blocks * layout.block_bytes / 2**30,
        num_blocks,
    )
    return num_blocks


@torch.inference_mode()
def profile(
    model: RunnableModel,
    layout: KvLayout,
    make_attention: Callable[[KvPool], AttentionBackend],
    largest: LargestStep,
    sampler: Sampler,
    graphs: Graphs = NO_GRAPHS,
) -> CardMemory:
    """Run the largest step once, which also compiles kernels. Frees all memory it allocates."""
    device = model.device
    num_blocks = -(-largest.num_tokens // layout.block_size)
    pool = KvPool(layout, blocks_with(layout, num_blocks), device)
    before = torch.cuda.memory_allocated(device)
    attention = make_attention(pool)
    attention_bytes = torch.cuda.memory_allocated(device) - before
    attention.plan([Segment(largest.num_tokens, largest.num_tokens, range(num_blocks))])
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    tokens = torch.zeros(largest.num_tokens, dtype=torch.int64, device=device)
    sampled = min(largest.num_sequences, largest.num_tokens)
    rows = torch.arange(sampled, device=device)
    hidden = model.hidden(tokens, torch.arange(largest.num_tokens, device=device), attention)
    logits = model.logits(hidden.index_select(0, rows))
    params = SamplingParams(max_tokens=1, seed=0, temperature=1.0, top_p=0.9)
    sampler.sample(logits, [SampleRow(params, 0)] * sampled)
    torch.cuda.synchronize(device)
    step = torch.cuda.max_memory_allocated(device) - before
    logits_bytes = largest.num_sequences * model.config.vocab_size * (4 + model.dtype.itemsize)
    del pool, attention, hidden, logits
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return CardMemory(
        total=total,
        free=free,
        held=torch.cuda.memory_reserved(device) + attention_bytes,
        step=step,
        graphs=graphs.num_bytes(logits_bytes),
    )


@dataclass(frozen=True)
class Taken:
    """Bytes that torch holds for this process: on a card, and pinned in host memory."""

    on_card: int
    pinned: int

    @classmethod
    def now(cls, device: torch.device) -> Taken:
        """The current numbers, without CUDA and its libraries (about `CONTEXT_BYTES`)."""
        pinned = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
        return cls(torch.cuda.memory_reserved(device), pinned)


def report_taken(device: torch.device, pool: KvPool) -> None:
    """Log how much memory a ready engine has taken."""
    taken = Taken.now(device)
    logger.info(
        "took %.1f GiB on the card, of which %.1f GiB for %d KV blocks, and %.0f MiB pinned",
        taken.on_card / 2**30,
        pool.num_blocks * pool.block_bytes / 2**30,
        pool.num_blocks,
        taken.pinned / 2**20,
    )
