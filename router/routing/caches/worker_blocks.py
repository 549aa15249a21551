"""What a router knows of the KV blocks of one worker.

Plain data; `router.routing.caches.cache_index` changes it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from protocol.events import CacheEvents
from router.routing.caches.tier_blocks import Tiers

RETRY_S, MAX_RETRY_S = 2.0, 60.0
"""A missing piece of a dump is requested again after this time. The time doubles with each request
until the dump is whole."""


@dataclass(eq=False)
class WorkerBlocks:
    """One worker's blocks; `bit` stands for the worker in the index, `most` is the number of blocks
    beyond which its reports cannot be true.

    While a dump is awaited, `seq` is None and events wait in `buffer`, with `buffered` hashes of
    the pool and `buffered_in_tiers` others; the dump is requested again at `retry_at`. `gathered`
    are the hashes of the dump that have come. `asked` is the number of the dump's last request:
    answers to earlier requests are dropped.

    `coming` is the list that is being indexed; it replaces the blocks when it is whole. `num_jobs`
    jobs change the index for the worker.

    `pending` maps an expected block to its expiry; `routed` has the same by prompt, oldest first.
    """

    incarnation: str
    bit: int
    most: int
    hashes: set[bytes] = field(default_factory=set)
    seq: int | None = None
    buffer: list[CacheEvents] = field(default_factory=list)
    buffered: int = 0
    buffered_in_tiers: int = 0
    gathered: list[bytes] = field(default_factory=list)
    asked: int = 0
    pending: dict[bytes, float] = field(default_factory=dict)
    routed: deque[tuple[float, Sequence[bytes]]] = field(default_factory=deque)
    retry_at: float | None = None
    retry_s: float = RETRY_S
    coming: Listed | None = None
    num_jobs: int = 0
    is_gone: bool = False


@dataclass(eq=False)
class Listed:
    """The part of a dump that is indexed already."""

    pool: set[bytes] = field(default_factory=set)
    tiers: Tiers = field(default_factory=Tiers)
