"""Events that workers publish for every subscribed router: their load, and cache changes.

Tagged and frozen like all messages; events have no answers.
"""

from __future__ import annotations

import msgspec

from protocol.messages import Message


class WorkerStats(Message, frozen=True, kw_only=True):
    """Load of a worker, published at most every `stats_interval`.

    `blocks_used` are pinned (running, granted, being read); `blocks_cached` are free to reuse but
    hold a prefix. `blocks_waiting` is what waiting requests will need. Of the used ones,
    `blocks_granted` are being written by peers for requests that will run, `blocks_fenced` belong
    to ended requests whose peers may still write, and `blocks_stuck` of these to a peer that has
    fallen silent: they do not come back until it answers or its process has ended.
    `prefill_unreachable` is 1 while a decode worker reaches no prefill worker and computes prompts
    itself. The step coefficients are those of `scheduling.step_model`. `links` are bytes sent by
    link, see `worker.link_counters`. `counters` only grow. `reported_us` is the worker's wall
    clock, which shows a reader how old the report is. `cache_seq` is the number of the newest
    `CacheEvents`. `received` says how many Generate and Prefill messages each router's session has
    brought so far; this report counts them all.
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
    """Blocks that became usable, or ceased to be, since the previous event's `seq`."""

    worker_id: str
    incarnation: str
    seq: int
    stored: list[bytes]
    removed: list[bytes]


EventMessage = WorkerStats | CacheEvents
