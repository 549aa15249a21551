"""Events that workers publish for every subscribed router: their load, and cache changes.

Tagged and frozen like all messages; events have no answers.
"""

from __future__ import annotations

import msgspec

from protocol.messages import Message


class WorkerStats(Message, frozen=True, kw_only=True):
    """Load of a worker, published at most every `stats_interval`.

    - `blocks_used`: pinned blocks (running, granted, being read).
    - `blocks_granted`: used blocks that peers are writing for requests that will run.
    - `blocks_fenced`: used blocks of ended requests whose peers may still write.
    - `blocks_serving`: blocks of the cache that other workers read now.
    - `blocks_stuck`: fenced blocks whose peer has fallen silent; they do not come back until the
      peer answers or its process has ended.
    - `blocks_cached`: blocks that are free to reuse but hold a prefix.
    - `blocks_waiting`: blocks that waiting requests will need.
    - `prefill_unreachable`: 1 while a decode worker reaches no prefill worker and computes prompts
      itself.
    - `links`: bytes sent by link, see `worker.link_counters`.
    - `reported_us`: the worker's wall clock, which shows a reader how old the report is.
    - `cache_seq`: the number of the newest `CacheEvents`.
    - `received`: how many Generate and Prefill messages each router's session has sent; this report
      counts them all.

    The step coefficients are those of `scheduling.step_model`. `counters` only grow.
    """

    worker_id: str
    incarnation: str
    num_waiting: int
    num_running: int
    queued_tokens: int
    blocks_total: int
    blocks_used: int
    blocks_cached: int
    blocks_waiting: int = 0
    blocks_stuck: int = 0
    blocks_granted: int = 0
    blocks_fenced: int = 0
    blocks_serving: int = 0
    num_handoffs: int = 0
    prefill_unreachable: int = 0
    reported_us: int = 0
    cache_seq: int = 0
    received: dict[str, int] = msgspec.field(default_factory=dict)
    step_fixed_us: float = 0.0
    step_per_token_us: float = 0.0
    step_per_attended_us: float = 0.0
    links: dict[str, int] = msgspec.field(default_factory=dict)
    counters: dict[str, int] = msgspec.field(default_factory=dict)


class CacheEvents(Message, frozen=True, kw_only=True):
    """Blocks that became usable, or stopped being usable, since the previous event's `seq`."""

    worker_id: str
    incarnation: str
    seq: int
    stored: list[bytes]
    removed: list[bytes]


EventMessage = WorkerStats | CacheEvents
