"""The fetches of peers that this worker serves from its cache. Owns the pins around their blocks.

Serving takes no memory and waits for nothing but its own writes: blocks that the cache lacks when
the message arrives, or that may not be served, are left out.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kv_transfer.handoff.key import HandoffKey, key_of
from kv_transfer.handoff.outgoing import GroupedBlocks
from protocol.handoff_messages import FetchShortfall, KvFetch
from protocol.traces import WriteSpan
from scheduling.block_pools import Prefix
from worker.counters import Count
from worker.host import WorkerHost
from worker.moved_blocks import bytes_by_group

SERVE_SHARE = 1 / 8
"""The part of the pool that may be pinned for peers alone."""


@dataclass
class _Served:
    blocks: GroupedBlocks
    num_alone: float  # blocks pinned only for peers, counted as blocks of the first group
    spans: list[WriteSpan] = field(default_factory=list)


class ServedFetches:
    """The fetches that this worker serves now, by key; `len` is their number."""

    def __init__(self, host: WorkerHost) -> None:
        self._host = host
        self._counters = host.counters
        self._scheduler = host.engine.scheduler
        block_bytes = bytes_by_group(host.engine.layout)
        self._sizes = [each / block_bytes[0] for each in block_bytes]
        self._served: dict[HandoffKey, _Served] = {}

    def __len__(self) -> int:
        return len(self._served)

    @property
    def blocks(self) -> list[list[int]]:
        """The blocks of each group that peers read now. A block that several peers read is listed
        for each."""
        found: list[list[int]] = [[] for _ in self._sizes]
        for each in self._served.values():
            for blocks, served in zip(found, each.blocks, strict=True):
                blocks += served
        return found

    @property
    def num_blocks(self) -> int:
        """The number of these blocks."""
        return sum(map(len, self.blocks))

    def pin(self, fetch: KvFetch) -> tuple[GroupedBlocks, FetchShortfall | None]:
        """Pin the longest run of cached blocks for these hashes that may be served. For the slots,
        also pin the blocks of windows before the run's end. Returns the blocks by group, and the
        reason if some hashes have no block."""
        if self._host.lifecycle.has_lapsed:
            return [[] for _ in self._sizes], FetchShortfall.STOPPING
        managers = self._scheduler.pools.managers
        run = self._complete(managers[0].match(fetch.hashes), 0)
        why = FetchShortfall.EVICTED if len(run) < len(fetch.hashes) else None
        slots = [len(each.block_ids) for each in fetch.others]
        of_slots = sum(size * count for size, count in zip(self._sizes[1:], slots, strict=True))
        least = max([1, *slots])  # otherwise no end would ever be served
        room = max(least, int(SERVE_SHARE * managers[0].num_blocks) - of_slots)
        room -= sum(each.num_alone for each in self._served.values())
        num_alone = 0
        for index, block in enumerate(run):
            is_alone = not managers[0].is_pinned(block)
            if is_alone and num_alone >= room:
                run, why = run[:index], FetchShortfall.BUSY
                break
            num_alone += is_alone
        found = self._with_windows(fetch, run, slots)
        if len(found[0]) < len(run):
            why = why or FetchShortfall.EVICTED
        if found[0] and len(managers) > 1 and not self._fits(found):
            found, why = [[] for _ in managers], FetchShortfall.BUSY
        if found[0]:
            for manager, blocks in zip(managers, found, strict=True):
                manager.pin(blocks)
            self._served[key_of(fetch)] = _Served(found, num_alone + of_slots)
        self._counters.add(Count.SERVED_BLOCKS, len(found[0]))
        self._counters.add(Count.UNSERVED_BLOCKS, len(fetch.hashes) - len(found[0]))
        return found, why

    def note_written(self, key: HandoffKey, span: WriteSpan) -> None:
        """Note that blocks have arrived at the sink."""
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
        blocks = self._served.pop(key).blocks
        for manager, each in zip(self._scheduler.pools.managers, blocks, strict=True):
            manager.release(each)

    def _fits(self, found: list[list[int]]) -> bool:
        """Whether there is memory to pin these blocks: in groups with windows, each further user of
        a block reserves memory."""
        pools = self._scheduler.pools
        return pools.fits(Prefix(len(found[0]), tuple(found)), [0] * len(found))

    def _with_windows(self, fetch: KvFetch, run: list[int], slots: list[int]) -> list[list[int]]:
        """The longest part of a run of the first group at whose end all windows are whole, as far
        back as the slots reach; and the blocks of these windows."""
        end, managers = len(run), self._scheduler.pools.managers
        while end:
            windows, last_gap = [], end
            for group, count in enumerate(slots, 1):
                first = end - min(count, end)
                blocks = self._complete(managers[group].match(fetch.hashes[first:end]), group)
                if first + len(blocks) < end:
                    last_gap = min(last_gap, first + len(blocks))
                windows.append(blocks)
            if last_gap == end:
                return [run[:end], *windows]
            end = last_gap
        return [[] for _ in self._sizes]

    def _complete(self, found: list[int], group: int) -> list[int]:
        """The blocks before the first one that a step under way may still be computing."""
        unsure = self._scheduler.blocks_under_way(group)
        if not unsure:
            return found
        first = next((i for i, block in enumerate(found) if block in unsure), len(found))
        return found[:first]
