"""Events that workers publish for every subscribed router: their load, and cache changes.

Tagged and frozen like all messages; events have no answers.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from protocol.field_bounds import Count, Counts, Dimension, Duration, Hashes, Reason, Text
from protocol.message_base import Message
from protocol.messages import TierName


class WorkerStats(Message, frozen=True, kw_only=True):
    """Load of a worker, published at most every `stats_interval`.

    - `blocks_used`: pinned blocks (running, granted, being read).
    - `blocks_granted`: used blocks that peers are writing for requests that will run.
    - `blocks_fenced`: used blocks of ended requests whose peers may still write.
    - `blocks_serving`: blocks of the cache that other workers read now.
    - `blocks_stuck`: fenced blocks whose peer has fallen silent; they do not come back until the
      peer answers or its process has ended.
    - `host_tier_bytes`, `disk_tier_bytes`: the sizes of the tiers below the pool;
      `host_tier_used_bytes` and `disk_tier_used_bytes` of these are used. `host_tier_block_us` and
      `disk_tier_block_us` are the measured times to load a block; 0: there is no such tier.
    - `blocks_cached`: blocks that are free to reuse but hold a prefix.
    - `blocks_retained`: blocks that clients' hints protect from eviction. Blocks of a hint that is
      over count until the next hint comes.
    - `blocks_waiting`: blocks that waiting requests will need.
    - `prefill_unreachable`: 1 while a decode worker reaches no prefill worker and computes prompts
      itself.
    - `refused_by`: the workers that refuse to write to its pool, by incarnation, and why.
    - `rank_busy_us`, `rank_wait_us`: for how long each rank has computed layers, and waited for
      others meanwhile, by the numbers of ranks (stage by stage from the last); empty with one rank.
    - `links`: bytes sent by link, see `worker.link_counters`.
    - `reported_us`: the worker's wall clock, which shows a reader how old the report is.
    - `cache_seq`: the number of the newest `CacheEvents`.
    - `received`: how many Generate and Prefill messages each router's session has sent; this report
      counts them all.

    The step coefficients are those of `scheduling.step_model`. `counters` only grow.
    """

    worker_id: Text
    incarnation: Text
    num_waiting: Count
    num_running: Count
    queued_tokens: Count
    blocks_total: Count
    blocks_used: Count
    blocks_cached: Count
    blocks_retained: Count = 0
    blocks_waiting: Count = 0
    blocks_stuck: Count = 0
    blocks_granted: Count = 0
    blocks_fenced: Count = 0
    blocks_serving: Count = 0
    host_tier_block_us: Count = 0
    disk_tier_block_us: Count = 0
    host_tier_bytes: Count = 0
    host_tier_used_bytes: Count = 0
    disk_tier_bytes: Count = 0
    disk_tier_used_bytes: Count = 0
    num_handoffs: Count = 0
    prefill_unreachable: Dimension = 0
    refused_by: Annotated[dict[Text, Reason], Meta(max_length=4096)] = msgspec.field(
        default_factory=dict
    )
    reported_us: Count = 0
    cache_seq: Count = 0
    received: Counts = msgspec.field(default_factory=dict)
    step_fixed_us: Duration = 0.0
    step_per_token_us: Duration = 0.0
    step_per_attended_us: Duration = 0.0
    rank_busy_us: Annotated[tuple[Count, ...], Meta(max_length=4096)] = ()
    rank_wait_us: Annotated[tuple[Count, ...], Meta(max_length=4096)] = ()
    links: Counts = msgspec.field(default_factory=dict)
    counters: Counts = msgspec.field(default_factory=dict)


class TierChange(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks that came into a tier of the worker's own, or left it."""

    tier: TierName
    stored: Hashes = msgspec.field(default_factory=list)
    removed: Hashes = msgspec.field(default_factory=list)


class CacheEvents(Message, frozen=True, kw_only=True):
    """Blocks that became usable, or stopped being usable, since the previous event's `seq`. A
    worker that `has_windows` lists the ends of usable prefixes, too (`protocol.hashing.end_of`).
    `tiers` has some changes of the tiers below the pool; the next events have the others."""

    worker_id: Text
    incarnation: Text
    seq: Count
    stored: Hashes
    removed: Hashes
    tiers: Annotated[list[TierChange], Meta(max_length=len(TierName))] = msgspec.field(
        default_factory=list
    )


EventMessage = WorkerStats | CacheEvents
