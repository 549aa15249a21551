"""The fetches of peers that this worker serves from its cache. Owns the pins around their blocks.

Serving takes no memory and waits for nothing but its own writes: what the cache lacks when the
message arrives, or may not be served, is left out.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kv_transfer.handoff.key import HandoffKey, key_of
from protocol.handoff_messages import FetchShortfall, KvFetch
from protocol.traces import WriteSpan
from worker.counters import Count
from worker.host import WorkerHost

SERVE_SHARE = 1 / 8
"""The part of the pool that may be pinned for peers alone."""


@dataclass
class _Served:
    blocks: list[int]
    num_alone: int  # blocks that nobody else had pinned
    spans: list[WriteSpan] = field(default_factory=list)


class ServedFetches:
    """The fetches that this worker serves now, by key; `len` is their number."""

    def __init__(self, host: WorkerHost) -> None:
        self._host = host
        self._counters = host.counters
        self._scheduler = host.engine.scheduler
        self._served: dict[HandoffKey, _Served] = {}

    def __len__(self) -> int:
        return len(self._served)

    @property
    def blocks(self) -> list[int]:
        """The blocks that peers read now. A block that several peers read is listed for each."""
        return [block for each in self._served.values() for block in each.blocks]

    def pin(self, fetch: KvFetch) -> tuple[list[list[int]], FetchShortfall | None]:
        """Pin the longest run of cached blocks for these hashes that may be served. Returns the
        blocks by group, and the reason if some hashes have none."""
        if self._host.lifecycle.has_lapsed:
            return [[]], FetchShortfall.STOPPING
        blocks = self._scheduler.blocks
        found = self._complete(blocks.match(fetch.hashes))
        why = FetchShortfall.EVICTED if len(found) < len(fetch.hashes) else None
        room = max(1, int(SERVE_SHARE * blocks.num_blocks))
        room -= sum(each.num_alone for each in self._served.values())
        num_alone = 0
        for index, block in enumerate(found):
            is_alone = not blocks.is_pinned(block)
            if is_alone and num_alone >= room:
                found, why = found[:index], FetchShortfall.BUSY
                break
            num_alone += is_alone
        if found:
            blocks.pin(found)
            self._served[key_of(fetch)] = _Served(found, num_alone)
        self._counters.add(Count.SERVED_BLOCKS, len(found))
        self._counters.add(Count.UNSERVED_BLOCKS, len(fetch.hashes) - len(found))
        return [found], why

    def note_written(self, key: HandoffKey, span: WriteSpan) -> None:
        """Blocks have arrived at the sink."""
        self._served[key].spans.append(span)

    def write_us(self, key: HandoffKey) -> int:
        """The time from the posting of the first write to the end of the last; 0 without writes."""
        served = self._served.get(key)
        if served is None or not served.spans:
            return 0
        spans = served.spans
        return max(each.done_us for each in spans) - min(each.post_us for each in spans)

    def release(self, key: HandoffKey) -> None:
        """Unpin the blocks: all writes are over."""
        self._scheduler.blocks.release(self._served.pop(key).blocks)

    def _complete(self, found: list[int]) -> list[int]:
        """The blocks before the first one that a step under way may still be computing."""
        unsure = self._scheduler.blocks_under_way()
        if not unsure:
            return found
        first = next((i for i, block in enumerate(found) if block in unsure), len(found))
        return found[:first]
