"""Events that workers publish for every subscribed router: their load, and cache changes.

Tagged and frozen like all messages; events have no answers.
"""

from __future__ import annotations

import msgspec

from protocol.messages import Message


class WorkerStats(Message, frozen=True, kw_only=True):
    """Load of a worker, published at most every `stats_interval`.

    `blocks_used` are pinned (running, granted, being read); `blocks_cached` are free to reuse but
    hold a prefix. The step coefficients are those of `scheduling.step_model`. `counters` only grow.
    `reported_us` is the worker's wall clock, which shows a reader how old the report is.
    """

    worker_id: str
    incarnation: str
    num_waiting: int
    num_running: int
    queued_tokens: int
    blocks_total: int
    blocks_used: int
    blocks_cached: int
    num_handoffs: int = 0
    reported_us: int = 0
    step_fixed_us: float = 0.0
    step_per_token_us: float = 0.0
    step_per_attended_us: float = 0.0
    counters: dict[str, int] = msgspec.field(default_factory=dict)


class CacheEvents(Message, frozen=True, kw_only=True):
    """Blocks that became usable, or ceased to be, since the previous event's `seq`."""

    worker_id: str
    incarnation: str
    seq: int
    stored: list[bytes]
    removed: list[bytes]


EventMessage = WorkerStats | CacheEvents
