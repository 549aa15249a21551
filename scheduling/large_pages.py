"""Shares the memory of one pool among groups of layers whose blocks differ in size.

The memory is divided into large pages. A page belongs to one group at a time and holds
`blocks_per_page` blocks of that group: block `b` of the group lies in page `b // blocks_per_page`.
A page is open while one of its blocks is pinned. It is idle if it only holds cached blocks, and
goes back when it holds none. When no page is unowned, the page that has been idle for the longest
time is evicted as a whole. Pure; all operations are O(1) per block of a page.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice

from scheduling.block_manager import BlockManager, ColdBlock
from scheduling.retention import Retention

_COLD = 0
"""The time of blocks and pages that are evicted before all others."""


class LargePages:
    """Owner of the pages `0 .. num_pages - 1` of one pool."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"a pool needs at least one page, not {num_pages}")
        self.num_pages = num_pages
        self.now = _COLD
        """Counts the times that a block became free."""
        self._unowned = deque(range(num_pages))
        self._idle: OrderedDict[int, int] = OrderedDict()  # page: since when
        self._owner: list[GroupBlocks | None] = [None] * num_pages

    @property
    def num_available(self) -> int:
        """Pages that `take` can hand out: the unowned and the idle ones."""
        return len(self._unowned) + len(self._idle)

    @property
    def num_idle(self) -> int:
        """Pages that only hold cached blocks that nobody uses."""
        return len(self._idle)

    @property
    def num_open(self) -> int:
        """Pages with a pinned block."""
        return self.num_pages - self.num_available

    @property
    def idle_since(self) -> int:
        """The time of the page that `take` hands out next; there must be one."""
        return _COLD if self._unowned else next(iter(self._idle.values()))

    def take(self, group: GroupBlocks) -> int:
        """Give `group` a page without contents."""
        if self._unowned:
            page = self._unowned.popleft()
        else:
            page, _ = self._idle.popitem(last=False)
            owner = self._owner[page]
            assert owner is not None
            owner.evict(page)
        self._owner[page] = group
        return page

    def is_idle(self, page: int) -> bool:
        """Whether the page only holds cached blocks that nobody uses."""
        return page in self._idle

    def open(self, page: int) -> None:
        """Note that a block of an idle page is in use again."""
        del self._idle[page]

    def set_idle(self, page: int, since: int) -> None:
        """Note that no block of the page is in use, or renew its age. `since` is the time of the
        last use, or `_COLD` for a page that is to be evicted first."""
        self._idle[page] = since
        self._idle.move_to_end(page, last=since != _COLD)

    def give_back(self, page: int) -> None:
        """Note that a page that is not idle holds nothing."""
        self._owner[page] = None
        self._unowned.append(page)

    def is_owned_by(self, page: int, group: GroupBlocks) -> bool:
        """Whether the page is this group's."""
        return self._owner[page] is group

    def idle_pages(self, group: GroupBlocks) -> Iterator[int]:
        """The idle pages of a group, beginning with the one that is evicted first."""
        return (page for page in self._idle if self._owner[page] is group)

    def check(self) -> None:
        """Raise AssertionError unless every invariant holds; for tests."""
        for page in range(self.num_pages):
            assert (self._owner[page] is None) == (page in self._unowned), f"page {page}"
        assert not set(self._unowned) & set(self._idle)


class GroupBlocks(BlockManager):
    """Owner of one group's block numbers, in the pages that the group has. `_free` holds the free
    blocks of open pages, blank ones included.

    With `exchanges`, a sequence gives blocks back while it runs and takes another block for each.
    It must find one even if another sequence still uses the block that it gave back. So one block
    is put aside for each further use of a pinned block.
    """

    def __init__(
        self,
        pages: LargePages,
        blocks_per_page: int,
        on_allocate: Callable[[list[int]], None] = lambda _: None,
        exchanges: bool = False,
    ) -> None:
        super().__init__(pages.num_pages * blocks_per_page, on_allocate)
        self.retention = Retention(0)  # whole pages are evicted, whatever hints say
        self._exchanges = exchanges
        self._aside: list[int] = []
        self._blank.clear()
        self.pages = pages
        self.blocks_per_page = blocks_per_page
        self.on_evict: Callable[[bytes], None] = lambda _: None
        """Called with the hash of each block that is evicted."""
        self._freed_at = [_COLD] * self.num_blocks
        self._num_pinned_in: dict[int, int] = {}  # of open pages
        self._num_pinned = 0

    @property
    def num_free(self) -> int:
        """See BlockManager."""
        return len(self._free) + self.pages.num_available * self.blocks_per_page

    @property
    def num_pinned(self) -> int:
        """See BlockManager."""
        return self._num_pinned

    def pin(self, blocks: Iterable[int]) -> None:
        """See BlockManager. Raises ValueError, and pins nothing, if there is no block to put
        aside."""
        blocks = list(blocks)
        if self.num_free_after_pinning(blocks) < 0:
            raise ValueError(f"no room to share {len(blocks)} blocks")
        self._aside += self.allocate(self.share(blocks))

    def share(self, blocks: Sequence[int]) -> int:
        """Pin blocks. Returns the number of blocks that the caller must put aside for that."""
        num_shared = self._num_shared(blocks)
        for block in blocks:
            if self._pins[block] == 0:
                self._open_page_of(block)
                self._note_pinned(block)
        super().pin(blocks)
        return num_shared

    def put_aside(self, blocks: list[int]) -> None:
        """Keep blocks that were allocated because of `share`."""
        self._aside += blocks

    def allocate(self, count: int, most_pages: int | None = None) -> list[int]:
        """See BlockManager. Takes at most `most_pages` pages (None: any number): first free, empty
        blocks of open pages, then the least recently used blocks or pages."""
        if count > self.num_free:
            raise ValueError(f"{count} blocks wanted, {self.num_free} free")
        self.num_moves += 1
        self.num_changes += count
        left = self.pages.num_available if most_pages is None else most_pages
        blocks: list[int] = []
        while len(blocks) < count:
            if not self._next_is_open(left):
                self._take_page()
                left -= 1
            block, _ = self._free.popitem(last=False)
            self._evict_block(block)
            self._pins[block] = 1
            self._num_uses[block] += 1
            self._note_pinned(block)
            blocks.append(block)
        self._on_allocate(blocks)
        return blocks

    def reuse(self, count: int) -> list[int]:
        """Like `allocate`, but takes no page while an open one has a free block."""
        from_open = min(count, len(self._free))
        return self.allocate(from_open, 0) + self.allocate(count - from_open)

    def release(self, blocks: Sequence[int], is_cold: bool = False) -> None:
        """See BlockManager. With `is_cold`, blocks that become free are evicted before others."""
        super().release(blocks)
        num_shared = 0
        for block in reversed(blocks):
            if self._pins[block] == 0:
                self._note_free(block, is_cold)
            else:
                num_shared += 1
        if num_shared and self._exchanges:
            spared = [self._aside.pop() for _ in range(num_shared)]
            self.release(spared)

    def cool(self, hashes: Iterable[bytes]) -> None:
        """Evict the free ones of these cached blocks before others."""
        for block in self._free_ones(hashes):
            self._freed_at[block] = _COLD
            if block in self._free:
                self._free.move_to_end(block, last=False)
            elif self._last_use(block // self.blocks_per_page) == _COLD:
                self.pages.set_idle(block // self.blocks_per_page, _COLD)

    def touch(self, hashes: Iterable[bytes]) -> None:
        """Evict the free ones of these cached blocks as if they had been used now."""
        for block in self._free_ones(hashes):
            self.pages.now += 1
            self._freed_at[block] = self.pages.now
            if block in self._free:
                self._free.move_to_end(block)
            else:
                self.pages.set_idle(block // self.blocks_per_page, self.pages.now)

    def free_after_pinning(self, cached: Sequence[int]) -> tuple[int, int]:
        """What pinning `cached` would leave. The first number is that of free blocks in open pages;
        if it is negative, further pages must provide so many blocks. The second is the number of
        idle pages that would be open."""
        size = self.blocks_per_page
        fresh = [block for block in cached if self._pins[block] == 0]
        opened = {block // size for block in fresh if self.pages.is_idle(block // size)}
        taken = len(fresh) + self._num_shared(cached)
        return len(self._free) + len(opened) * size - taken, len(opened)

    def num_free_after_pinning(self, blocks: Iterable[int]) -> int:
        """See BlockManager."""
        free, num_opened = self.free_after_pinning(list(blocks))
        return free + (self.pages.num_available - num_opened) * self.blocks_per_page

    def coldest(
        self, count: int, is_kept: Callable[[bytes], bool] = lambda digest: False
    ) -> list[ColdBlock]:
        """See BlockManager. Leaves out blocks that were marked to be evicted first. Examines
        `count` blocks, or as many as there are pages if that is more."""
        idle = (block for page in self.pages.idle_pages(self) for block in self._blocks_of(page))
        found = (
            ColdBlock(block, digest, self._num_uses[block])
            for block in islice(chain(self._free, idle), max(count, self.pages.num_pages))
            if (digest := self._hash_of[block]) is not None
            and self._freed_at[block] != _COLD
            and block not in self._stays_here
        )
        return [each for each in islice(found, count) if not is_kept(each.digest)]

    def evict(self, page: int) -> None:
        """Forget the contents of a page that was idle."""
        for block in self._blocks_of(page):
            self._evict_block(block)

    def clear_cache(self) -> None:
        """See BlockManager."""
        super().clear_cache()
        for page in list(self.pages.idle_pages(self)):
            self.pages.open(page)
            self.pages.give_back(page)

    def check(self) -> None:
        """See BlockManager."""
        self.pages.check()
        for block in range(self.num_blocks):
            page = block // self.blocks_per_page
            is_open = page in self._num_pinned_in
            assert (block in self._free) == (is_open and self._pins[block] == 0), f"block {block}"
            assert is_open or self._pins[block] == 0, f"block {block}"
        for page, count in self._num_pinned_in.items():
            assert count == sum(self._pins[block] > 0 for block in self._blocks_of(page)) > 0
            assert self.pages.is_owned_by(page, self)
        assert self._num_pinned == sum(self._num_pinned_in.values())
        num_shared = sum(count - 1 for count in self._pins if count > 1)
        assert len(self._aside) == (num_shared if self._exchanges else 0)
        for digest, block in self._block_of.items():
            assert self._hash_of[block] == digest
            assert self.pages.is_owned_by(block // self.blocks_per_page, self)
        assert self._num_cached_free == sum(
            self._pins[block] == 0 for block in self._block_of.values()
        )

    def _add_blank(self, blocks: list[int]) -> None:
        """See BlockManager."""
        for block in blocks:
            self._free[block] = None
            self._free.move_to_end(block, last=False)

    def _latest_first(self) -> Iterator[int]:
        idle = (block for page in self.pages.idle_pages(self) for block in self._blocks_of(page))
        ordered = sorted(chain(self._free, idle), key=self._freed_at.__getitem__, reverse=True)
        return iter(ordered)

    def _num_shared(self, blocks: Iterable[int]) -> int:
        if not self._exchanges:
            return 0
        return sum(self._pins[block] > 0 for block in blocks)

    def _next_is_open(self, pages_left: int) -> bool:
        """Whether the next block to hand out is the first free one of the open pages."""
        if not self._free or not pages_left:
            return bool(self._free)
        first = next(iter(self._free))
        if self._hash_of[first] is None:
            return True
        return self._freed_at[first] <= self.pages.idle_since

    def _take_page(self) -> None:
        page = self.pages.take(self)
        self._num_pinned_in[page] = 0
        for block in reversed(self._blocks_of(page)):
            self._free[block] = None
            self._free.move_to_end(block, last=False)

    def _open_page_of(self, block: int) -> None:
        page = block // self.blocks_per_page
        if page in self._num_pinned_in:
            return
        self.pages.open(page)
        self._num_pinned_in[page] = 0
        for each in self._blocks_of(page):
            self._free[each] = None
            if self._hash_of[each] is None or self._freed_at[each] == _COLD:
                self._free.move_to_end(each, last=False)

    def _note_pinned(self, block: int) -> None:
        self._num_pinned_in[block // self.blocks_per_page] += 1
        self._num_pinned += 1

    def _note_free(self, block: int, is_cold: bool) -> None:
        page = block // self.blocks_per_page
        self._num_pinned -= 1
        self._num_pinned_in[page] -= 1
        self.pages.now += 1
        if self._hash_of[block] is not None:
            self._freed_at[block] = _COLD if is_cold else self.pages.now
            if is_cold:
                self._free.move_to_end(block, last=False)
        if self._num_pinned_in[page] == 0:
            del self._num_pinned_in[page]
            for each in self._blocks_of(page):
                del self._free[each]
            since = self._last_use(page)
            if since is None:
                self.pages.give_back(page)
            else:
                self.pages.set_idle(page, since)

    def _last_use(self, page: int) -> int | None:
        """When a cached block of the page became free last; None if there is none."""
        cached = [each for each in self._blocks_of(page) if self._hash_of[each] is not None]
        return max((self._freed_at[each] for each in cached), default=None)

    def _evict_block(self, block: int) -> None:
        digest = self._hash_of[block]
        if digest is not None:
            self._forget(block)
            self.on_evict(digest)

    def _free_ones(self, hashes: Iterable[bytes]) -> Iterator[int]:
        for digest in hashes:
            block = self._block_of.get(digest)
            if block is not None and self._pins[block] == 0:
                yield block

    def _blocks_of(self, page: int) -> range:
        return range(page * self.blocks_per_page, (page + 1) * self.blocks_per_page)
