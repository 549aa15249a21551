"""Where workers spent their time on an attempt, as they report it to the router.

Times are microseconds since the Unix epoch, by the worker's clock.
"""

from __future__ import annotations

import msgspec


class ChunkSpan(msgspec.Struct, frozen=True, array_like=True):
    """One prefill chunk: when it ran, and how many tokens it computed."""

    start_us: int
    end_us: int
    num_tokens: int


class WriteSpan(msgspec.Struct, frozen=True, array_like=True):
    """One posted write of KV blocks: when it was posted, when it was seen complete.

    `chunk` is the index of the chunk that completed its last block (-1: the blocks were cached).
    """

    post_us: int
    done_us: int
    num_blocks: int
    chunk: int


class PrefillTrace(msgspec.Struct, frozen=True, kw_only=True):
    """Where a prefill worker spent its time on an attempt."""

    worker_id: str
    received_us: int
    scheduled_us: int
    cached_tokens: int
    chunks: tuple[ChunkSpan, ...]
    writes: tuple[WriteSpan, ...] = ()
    transport: str = ""
    blocks_moved: int = 0
    bytes_moved: int = 0


class DecodeTrace(msgspec.Struct, frozen=True, kw_only=True):
    """Where a decode worker spent its time on an attempt; 0 for events that did not happen."""

    worker_id: str
    received_us: int
    admitted_us: int = 0
    granted_blocks: int = 0
    cached_tokens: int = 0
    chunks: tuple[ChunkSpan, ...] = ()
    blocks_arrived_us: int = 0
    first_token_us: int = 0
    first_step_us: int = 0
    finished_us: int = 0
    num_decode_steps: int = 0
    num_preemptions: int = 0
