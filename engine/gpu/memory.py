"""How many KV blocks a card has room for: what a profile run leaves of this process's fraction.

The largest step the scheduler can make is run once over a pool just large enough, and the memory
at its peak is kept free. `memory_fraction` is of the whole card and counts everything that this
process holds there, so that two processes of 0.45 share one card.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.attention.base import AttentionBackend, Segment
from engine.kv_pool import KvPool, blocks_for_memory
from engine.model import DecoderModel
from engine.sampler import Sampler, SampleRow
from protocol.layout import KvLayout
from protocol.sampling import SamplingParams

logger = logging.getLogger(__name__)

CONTEXT_BYTES = 768 << 20
"""What CUDA, its libraries and loaded kernels take outside of torch's account."""


@dataclass(frozen=True)
class LargestStep:
    """The most that one step has: tokens of chunks and decodes, and sequences that are sampled."""

    num_tokens: int
    num_sequences: int


@dataclass(frozen=True)
class CardMemory:
    """Bytes on a card, as a profile run found them."""

    total: int
    free: int
    held: int  # by this process before the pool: weights, workspaces
    step: int  # more at the peak of the largest step
    graphs: int  # for the graphs that are still to be captured

    def for_pool(self, fraction: float) -> int:
        """What the pool may take if this process is to hold `fraction` of the card; 0 at least."""
        planned = self.step + self.graphs
        of_fraction = int(self.total * fraction) - self.held - planned - CONTEXT_BYTES
        return max(0, min(of_fraction, self.free - planned))


def blocks_for_card(layout: KvLayout, memory: CardMemory, fraction: float) -> int:
    """How many blocks fit; ConfigError if not even one. Says what goes where."""
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
    model: DecoderModel,
    layout: KvLayout,
    make_attention: Callable[[KvPool], AttentionBackend],
    largest: LargestStep,
    with_graphs: bool,
) -> CardMemory:
    """Run the largest step once; compiles kernels on the way. Leaves nothing behind."""
    device = model.device
    num_blocks = -(-largest.num_tokens // layout.block_size)
    pool = KvPool(layout, num_blocks, device)
    attention = make_attention(pool)
    attention.plan([Segment(largest.num_tokens, largest.num_tokens, range(num_blocks))])
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    tokens = torch.zeros(largest.num_tokens, dtype=torch.int64, device=device)
    sampled = min(largest.num_sequences, largest.num_tokens)
    rows = torch.arange(sampled, device=device)
    logits = model.forward(tokens, torch.arange(largest.num_tokens, device=device), attention, rows)
    params = SamplingParams(max_tokens=1, seed=0, temperature=1.0, top_p=0.9)
    Sampler(model.config.vocab_size).sample(logits, [SampleRow(params, 0)] * sampled)
    torch.cuda.synchronize(device)
    step = torch.cuda.max_memory_allocated(device) - before
    logits_bytes = largest.num_sequences * model.config.vocab_size * (4 + model.dtype.itemsize)
    del pool, attention, logits
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return CardMemory(
        total=total,
        free=free,
        held=torch.cuda.memory_reserved(device),
        step=step,
        graphs=2 * logits_bytes if with_graphs else 0,
    )
