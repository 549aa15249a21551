"""Turns a batch's segments into the flat arrays that paged attention kernels read. Pure numpy.

The arrays are compressed rows (CSR), as FlashInfer expects: `starts` arrays have one entry more
than there are segments. They are built on the host, once per step; all layers share them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from engine.attention.base import Segment

NO_SLOT = -1
"""The slot of a padding token, whose key and value are not stored."""


@dataclass(frozen=True)
class PagedBatch:
    """B segments with N tokens in total; all arrays are contiguous."""

    query_starts: np.ndarray  # [B + 1] int32: where each segment's tokens start in the batch
    block_starts: np.ndarray  # [B + 1] int32: where each segment's blocks start in `blocks`
    blocks: np.ndarray  # [block_starts[-1]] int32: the blocks of the contexts, in order
    last_lens: np.ndarray  # [B] int32: tokens in a context's last block, 1 to block_size
    slots: np.ndarray  # [N] int64: block * block_size + offset, where each token is stored
    firsts: np.ndarray  # [B] int32: leading blocks of each context that `blocks` leaves out

    @property
    def num_segments(self) -> int:
        """B."""
        return len(self.last_lens)

    @property
    def num_tokens(self) -> int:
        """N."""
        return len(self.slots)


def page(segments: Sequence[Segment], block_size: int) -> PagedBatch:
    """The arrays for `segments`, of which there must be at least one."""
    queries = np.array([segment.query_len for segment in segments], dtype=np.int32)
    contexts = np.array([segment.context_len for segment in segments], dtype=np.int32)
    firsts = np.array([segment.first_block for segment in segments], dtype=np.int32)
    counts = -(-contexts // block_size) - firsts
    block_starts = _starts(counts)
    tables = (s.block_table[:count] for s, count in zip(segments, counts.tolist(), strict=True))
    blocks = np.fromiter(chain.from_iterable(tables), dtype=np.int32, count=int(block_starts[-1]))
    query_starts = _starts(queries)
    owner = np.repeat(np.arange(len(segments)), queries)
    in_segment = np.arange(query_starts[-1]) - query_starts[owner]
    positions = (contexts - queries)[owner] + in_segment
    in_table = positions // block_size - firsts[owner]
    slot_blocks = blocks[block_starts[owner] + in_table].astype(np.int64)
    slots = slot_blocks * block_size + positions % block_size
    last_lens = (contexts - 1) % block_size + 1
    return PagedBatch(query_starts, block_starts, blocks, last_lens, slots, firsts)


def pad_decodes(batch: PagedBatch, size: int) -> PagedBatch:
    """`batch`, which has one token per segment, padded to `size` segments.

    Padding rows attend to one existing token, the first of the first segment, and store nothing.
    They can neither fault nor change the result of another row.
    """
    missing = size - batch.num_segments
    assert missing >= 0, (size, batch.num_segments)
    assert batch.num_tokens == batch.num_segments, "only decodes can be padded"
    if missing == 0:
        return batch
    more = np.arange(1, missing + 1, dtype=np.int32)
    return PagedBatch(
        np.arange(size + 1, dtype=np.int32),
        np.concatenate((batch.block_starts, batch.block_starts[-1] + more)),
        np.concatenate((batch.blocks, np.full(missing, batch.blocks[0], np.int32))),
        np.concatenate((batch.last_lens, np.ones(missing, np.int32))),
        np.concatenate((batch.slots, np.full(missing, NO_SLOT, np.int64))),
        np.concatenate((batch.firsts, np.zeros(missing, np.int32))),
    )


def _starts(counts: np.ndarray) -> np.ndarray:
    return np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
