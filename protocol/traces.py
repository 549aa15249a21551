"""Where workers spent their time on an attempt, as they report it to the router.

Times are microseconds since the Unix epoch, by the worker's clock.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from protocol.field_bounds import Blob, Count, Signed, Text

MAX_SPANS = 65_536
GAP_US = 5_000
"""Longer gaps in an attempt's work are reported with their reason."""
MAX_STEP_SPANS = 4_096
"""The most decode steps that a trace lists one by one; of more steps, neighbours are merged."""

_STEP = struct.Struct("<IIHHI")
_DURATION = slice(4, 8)  # the bytes of a packed step's duration
_MAX_U16, _MAX_U32 = 2**16 - 1, 2**32 - 1


class ChunkSpan(msgspec.Struct, frozen=True, array_like=True):
    """One prefill chunk: its time, and the number of tokens it computed."""

    start_us: Count
    end_us: Count
    num_tokens: Count


class WriteSpan(msgspec.Struct, frozen=True, array_like=True):
    """One posted write of KV blocks: the times of posting and of its known completion.

    `chunk` is the index of the chunk that completed its last block (-1: the blocks were cached).
    """

    post_us: Count
    done_us: Count
    num_blocks: Count
    chunk: Signed


class StepSpan(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One decode step, or `num_steps` neighbours: the number of sequences that decoded in it (at
    most), and of prompt tokens computed beside them."""

    start_us: int
    end_us: int
    batch: int
    num_steps: int = 1
    chunk_tokens: int = 0


class GapSpan(msgspec.Struct, frozen=True, array_like=True):
    """A time of more than `GAP_US` without progress on an attempt, and the reason."""

    start_us: Count
    end_us: Count
    reason: Text


class FetchSpan(msgspec.Struct, frozen=True, array_like=True):
    """A fetch of leading blocks from a worker that had them in its cache, or from one of the
    worker's own tiers. In the second case `tier` names the tier, and there is no `holder`.

    Of `asked` blocks from `first_block` on, `found` arrived. `outcome` says why blocks are missing;
    "" if none is. `fetch_us` and `compute_us` were expected for fetching and for computing them.
    """

    holder: Text
    first_block: Count
    asked: Count
    found: Count
    sent_us: Count
    done_us: Count
    outcome: Text
    fetch_us: Signed
    compute_us: Signed
    tier: Text = ""


class PrefillTrace(msgspec.Struct, frozen=True, kw_only=True):
    """Where a prefill worker spent its time on an attempt. `waits` are gaps between chunks.

    Of the prompt, `cached_tokens` were in the worker's own cache and `fetched_tokens` came from
    others' or from a tier.
    """

    worker_id: Text
    received_us: Count
    scheduled_us: Count
    cached_tokens: Count
    chunks: Annotated[tuple[ChunkSpan, ...], Meta(max_length=MAX_SPANS)]
    fetched_tokens: Count = 0
    fetches: Annotated[tuple[FetchSpan, ...], Meta(max_length=MAX_SPANS)] = ()
    waits: Annotated[tuple[GapSpan, ...], Meta(max_length=MAX_SPANS)] = ()
    writes: Annotated[tuple[WriteSpan, ...], Meta(max_length=MAX_SPANS)] = ()
    transport: Text = ""
    blocks_moved: Count = 0
    bytes_moved: Count = 0

    @property
    def not_computed(self) -> int:
        """Tokens of the prompt that the worker had, or fetched."""
        return self.cached_tokens + self.fetched_tokens


class DecodeTrace(msgspec.Struct, frozen=True, kw_only=True):
    """Where a decode worker spent its time on an attempt; 0 for events that did not happen.

    `steps` are packed by `pack_steps`; the first one begins at or after `steps_since_us`. `stalls`
    are gaps between them. `cached_tokens` were cached when the attempt was admitted, and
    `fetched_tokens` came from other workers' caches or from a tier.
    """

    worker_id: Text
    received_us: Count
    admitted_us: Count = 0
    granted_blocks: Count = 0
    cached_tokens: Count = 0
    fetched_tokens: Count = 0
    fetches: Annotated[tuple[FetchSpan, ...], Meta(max_length=MAX_SPANS)] = ()
    chunks: Annotated[tuple[ChunkSpan, ...], Meta(max_length=MAX_SPANS)] = ()
    blocks_arrived_us: Count = 0
    first_token_us: Count = 0
    first_step_us: Count = 0
    finished_us: Count = 0
    num_decode_steps: Count = 0
    num_preemptions: Count = 0
    steps_since_us: Count = 0
    steps: Blob = b""
    stalls: Annotated[tuple[GapSpan, ...], Meta(max_length=MAX_SPANS)] = ()

    def __post_init__(self) -> None:
        """Raises ValueError for steps that `pack_steps` did not make."""
        if len(self.steps) % _STEP.size:
            raise ValueError(f"{len(self.steps)} bytes are not a whole number of steps")

    @property
    def first_step_ms(self) -> float | None:
        """The time of the first step; None without one."""
        if len(self.steps) < _STEP.size:
            return None
        return int.from_bytes(self.steps[_DURATION], "little") / 1000

    @property
    def step_spans(self) -> list[StepSpan]:
        """The steps, in order."""
        return unpack_steps(self.steps_since_us, self.steps)


def pack_steps(since_us: int, steps: Iterable[StepSpan]) -> bytes:
    """Steps in order, 16 bytes each: the time since the former one's end (the first one: since
    `since_us`), the duration, the batch, the number of steps, the prompt tokens. Steps that would
    overlap are moved behind each other."""
    parts = []
    end = since_us
    for each in thinned(list(steps)):
        gap = min(max(0, each.start_us - end), _MAX_U32)
        start = end + gap
        duration = min(max(0, each.end_us - start), _MAX_U32)
        end = start + duration
        batch, number = min(each.batch, _MAX_U16), min(each.num_steps, _MAX_U16)
        parts.append(_STEP.pack(gap, duration, batch, number, min(each.chunk_tokens, _MAX_U32)))
    return b"".join(parts)


def unpack_steps(since_us: int, packed: bytes) -> list[StepSpan]:
    """The steps of `pack_steps`. Raises ValueError for bytes that it did not make."""
    if len(packed) % _STEP.size:
        raise ValueError(f"{len(packed)} bytes are not a whole number of steps")
    spans, end = [], since_us
    for gap, duration, batch, number, tokens in _STEP.iter_unpack(packed):
        start = end + gap
        end = start + duration
        spans.append(StepSpan(start, end, batch, number, tokens))
    return spans


def thinned(steps: Sequence[StepSpan], limit: int = MAX_STEP_SPANS) -> Sequence[StepSpan]:
    """About `limit` steps at most. Neighbours are merged, but never across a gap of `GAP_US`."""
    if len(steps) <= limit:
        return steps
    most = -(-len(steps) // limit)
    merged: list[StepSpan] = []
    in_last = 0
    for each in steps:
        if merged and in_last < most and each.start_us - merged[-1].end_us <= GAP_US:
            merged[-1] = _merge(merged[-1], each)
            in_last += 1
        else:
            merged.append(each)
            in_last = 1
    return merged


def _merge(first: StepSpan, second: StepSpan) -> StepSpan:
    return StepSpan(
        first.start_us,
        second.end_us,
        max(first.batch, second.batch),
        first.num_steps + second.num_steps,
        first.chunk_tokens + second.chunk_tokens,
    )
