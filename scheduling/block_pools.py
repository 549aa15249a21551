"""All blocks of one pool: one block manager for each group of layers, and the operations on all
groups together.

A pool with one group without a window has one plain `BlockManager`. Any other pool consists of
large pages (`scheduling.large_pages`). Knows nothing of sequences. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from protocol.hashing import end_of
from protocol.layout import KvLayout
from scheduling.block_manager import BlockManager, CacheDelta
from scheduling.group_rule import GroupRule
from scheduling.large_pages import GroupBlocks, LargePages
from scheduling.prefix_ends import PrefixEnds
from scheduling.states.rule import StateRule

CHECKPOINT_SHARE = 8
"""The blocks that windowed layers keep for the checkpoints within a prompt take about one part in
this many of the memory of the layers without a window."""


class Prefix(NamedTuple):
    """A cached prefix of `num_blocks` blocks. `blocks` has, for each group, those blocks of the
    prefix that the group needs to continue after it (see `GroupRule.covers_from`). In the groups
    without a window, `num_full` blocks are cached, perhaps more than `num_blocks`."""

    num_blocks: int
    blocks: tuple[list[int], ...]
    num_full: int = 0


OnAllocate = Callable[[list[int]], None]
Has = Callable[[int, bytes], bool]
"""Whether the block of this group with this hash exists."""


class BlockPools:
    """Owner of the managers of all groups, in the order of `KvLayout.groups`.

    `num_pages` counts the units that the groups share: large pages, or blocks if there is one group
    without a window. `checkpoint_blocks` is the distance of the boundaries for which windowed
    groups keep what they need to go on there.
    """

    def __init__(
        self,
        managers: Sequence[BlockManager],
        rules: Sequence[GroupRule],
        pages: LargePages | None = None,
        checkpoint_blocks: int = 1,
    ) -> None:
        self.managers = tuple(managers)
        self.rules = tuple(rules)
        self.checkpoint_blocks = checkpoint_blocks
        self._pages = pages
        self.is_plain = pages is None
        """Whether there is one group, without a window, whose blocks are the pages."""
        self.has_shared_pages = any(rule.blocks_per_page > 1 for rule in rules)
        """Whether a page holds several blocks, so that a few blocks in use may occupy many
        pages."""
        groups = list(zip(self.managers, self.rules, strict=True))
        self._full = [manager for manager, rule in groups if rule.window is None]
        self._windowed = [
            (group, manager, rule)
            for group, (manager, rule) in enumerate(groups)
            if rule.window is not None and isinstance(manager, GroupBlocks)
        ]
        self.has_windows = bool(self._windowed)
        """Whether a group has a window."""
        self._ends = PrefixEnds([rule.cover for _, _, rule in self._windowed])
        self.is_kept_below: Callable[[bytes], bool] = lambda _: False
        """Whether a block of the groups without a window, by its hash, is in a tier."""
        first = self.managers[0]
        if pages is not None and self._full and isinstance(first, GroupBlocks):
            first.on_evict = self._cool_windows

    @classmethod
    def of_one(cls, manager: BlockManager, block_size: int) -> BlockPools:
        """The pool of a model with one group, without a window."""
        return cls([manager], [GroupRule(block_size)])

    @classmethod
    def of(
        cls,
        layout: KvLayout,
        num_pages: int,
        on_allocate: Sequence[OnAllocate] | None = None,
    ) -> BlockPools:
        """The pool of this layout. `on_allocate`, by group, is called with newly allocated blocks,
        whose old contents are invalid."""
        groups = layout.groups
        heard: Sequence[OnAllocate] = on_allocate or [lambda _: None] * len(groups)
        if not layout.grouping:
            return cls.of_one(BlockManager(num_pages, heard[0]), layout.block_size)
        pages = LargePages(num_pages)
        counts = [layout.blocks_per_page(index) for index in range(len(groups))]
        rules = [
            GroupRule(layout.block_size, group.window, count)
            if group.state_numbers is None
            else StateRule(layout.block_size)
            for group, count in zip(groups, counts, strict=True)
        ]
        managers = [
            GroupBlocks(pages, rule.blocks_per_page, each, exchanges=rule.window is not None)
            for rule, each in zip(rules, heard, strict=True)
        ]
        return cls(managers, rules, pages, _checkpoint_blocks(rules))

    @property
    def num_pages(self) -> int:
        """See the class."""
        return self.managers[0].num_blocks if self._pages is None else self._pages.num_pages

    @property
    def num_used(self) -> int:
        """Pages with a pinned block."""
        return self.managers[0].num_pinned if self._pages is None else self._pages.num_open

    @property
    def num_cached_free(self) -> int:
        """The number of blocks of the first group that fit into the memory of cached, unused
        blocks."""
        if self._pages is None:
            return self.managers[0].num_cached_free
        return self.in_blocks(self._pages.num_idle)

    def in_blocks(self, num_pages: int) -> int:
        """The number of blocks of the first group that fit into the pages. Workers report their
        load in this unit."""
        return num_pages * self.rules[0].blocks_per_page

    @property
    def nothing(self) -> Prefix:
        """The empty prefix."""
        return Prefix(0, tuple([] for _ in self.managers))

    def match(self, hashes: Sequence[bytes]) -> Prefix:
        """The longest cached prefix of the chain `hashes` at whose end all groups can go on: the
        groups without a window hold all of it, and each windowed one what it covers. Pins
        nothing."""
        if self._pages is None:
            blocks = self.managers[0].match(hashes)
            return Prefix(len(blocks), (blocks,))
        end = len(hashes)
        for manager in self._full:
            end = len(manager.match(hashes[:end]))
        num_full, end = end, self._last_end(hashes, 0, end, self._is_cached)
        return Prefix(
            end,
            tuple(
                manager.match(hashes[rule.covers_from(end) : end])
                for manager, rule in zip(self.managers, self.rules, strict=True)
            ),
            num_full,
        )

    def reach(self, hashes: Sequence[bytes], first: int, has: Has) -> int:
        """The length, at least `first`, of the longest prefix of the chain `hashes` after which all
        groups can continue. They have its first `first` blocks, and the blocks for which `has` is
        true."""
        end = len(hashes)
        for group, rule in enumerate(self.rules):
            if rule.window is None:
                end = next((i for i in range(first, end) if not has(group, hashes[i])), end)
        return self._last_end(hashes, first, end, has)

    def needed(self, first: int, end: int) -> list[tuple[int, range]]:
        """By group, the blocks from `first` on that the group needs to continue after `end`
        blocks."""
        return [
            (group, range(max(first, rule.covers_from(end)), end))
            for group, rule in enumerate(self.rules)
        ]

    def run_bytes(self, num_blocks: int, block_bytes: Sequence[int]) -> tuple[int, int]:
        """The bytes that a run of `num_blocks` blocks takes, given the bytes of a block of each
        group. The first number is for each block, in the groups without a window. The second is for
        all the blocks that windows see at the run's end."""
        of_block = of_windows = 0
        for rule, size in zip(self.rules, block_bytes, strict=True):
            if rule.window is None:
                of_block += size
            else:
                of_windows += min(rule.cover, num_blocks) * size
        return of_block, of_windows

    def fits(self, prefix: Prefix, wanted: Sequence[int], headroom: int = 0) -> bool:
        """Whether there is room for `wanted` more blocks by group, and `headroom` more of the
        first group, once the prefix is pinned."""
        if self._pages is None:
            free = self.managers[0].num_free_after_pinning(prefix.blocks[0])
            return free >= wanted[0] + headroom
        needed, available = self._pages_needed(prefix, [wanted[0] + headroom, *wanted[1:]])
        return sum(needed) <= available

    def take(self, prefix: Prefix, wanted: Sequence[int]) -> list[list[int]]:
        """Pin the prefix, and allocate `wanted` more blocks by group; they must fit."""
        if self._pages is None:
            self.managers[0].pin(prefix.blocks[0])
            return [self.managers[0].allocate(wanted[0])]
        needed, available = self._pages_needed(prefix, wanted)
        spare = available - sum(needed)
        managers = [each for each in self.managers if isinstance(each, GroupBlocks)]
        groups = zip(managers, prefix.blocks, strict=True)
        shared = [manager.share(blocks) for manager, blocks in groups]
        taken = []
        for manager, count, aside, least in zip(managers, wanted, shared, needed, strict=True):
            before = self._pages.num_available
            blocks = manager.allocate(count + aside, least + spare)
            spare -= max(0, before - self._pages.num_available - least)
            manager.put_aside(blocks[count:])
            taken.append(blocks[:count])
        return taken

    def pages_for(self, counts: Iterable[int]) -> int:
        """Number of pages that hold `counts` blocks by group."""
        return sum([rule.pages(count) for rule, count in zip(self.rules, counts, strict=True)])

    def drain_events(self) -> CacheDelta:
        """The changes to the cache since the last call: blocks of the first group and, if there are
        windows, ends of usable prefixes (`protocol.hashing.end_of`)."""
        first = self.managers[0].drain_events()
        if not self._windowed:
            return first
        for index, (_, manager, _) in enumerate(self._windowed):
            delta = first if manager is self.managers[0] else manager.drain_events()
            stored = [(digest, manager.parent_of(digest)) for digest in delta.stored]
            self._ends.change(index, stored, delta.removed)
        new, gone = self._ends.drain()
        return CacheDelta(
            first.stored + [end_of(each) for each in new],
            first.removed + [end_of(each) for each in gone],
        )

    def hashes(self) -> list[bytes]:
        """Every hash that the events have named and that is still cached."""
        return self.managers[0].hashes() + [end_of(each) for each in self._ends.all()]

    def clear_cache(self) -> None:
        """Forget every hash."""
        for manager in self.managers:
            manager.clear_cache()
        self.drain_events()

    def check(self) -> None:
        """Raise AssertionError unless every invariant holds; for tests."""
        for manager in self.managers:
            manager.check()

    def _is_cached(self, group: int, digest: bytes) -> bool:
        return self.managers[group].is_cached(digest)

    def _last_end(self, hashes: Sequence[bytes], first: int, end: int, has: Has) -> int:
        """The last boundary from `first` to `end` at which all windowed groups can go on, if they
        can at `first`."""
        known = [end] * len(self._windowed)  # each group holds the blocks from here to the end
        while end > first:
            gap = None
            for index, (group, _, rule) in enumerate(self._windowed):
                start = max(first, rule.covers_from(end))
                while gap is None and (block := min(known[index], end) - 1) >= start:
                    if has(group, hashes[block]):
                        known[index] = block
                    else:
                        gap = block
            if gap is None:
                return end
            end = gap
        return first

    def _pages_needed(self, prefix: Prefix, wanted: Sequence[int]) -> tuple[list[int], int]:
        """By group, the fewest pages to take for `wanted` more blocks once the prefix is pinned;
        and how many pages can be taken then."""
        assert self._pages is not None
        available = self._pages.num_available
        needed = []
        groups = zip(self.managers, self.rules, prefix.blocks, wanted, strict=True)
        for manager, rule, blocks, count in groups:
            assert isinstance(manager, GroupBlocks)
            free, num_opened = manager.free_after_pinning(blocks)
            available -= num_opened
            needed.append(rule.pages(max(0, count - free)))
        return needed, available

    def _cool_windows(self, digest: bytes) -> None:
        """Evict windowed blocks early after a group without a window has lost the block with this
        hash: no windowed group can continue there, unless a tier has the block."""
        if not self.is_kept_below(digest):
            for _, manager, _ in self._windowed:
                manager.cool([digest])


def _checkpoint_blocks(rules: Sequence[GroupRule]) -> int:
    """See `BlockPools`. Sizes of blocks follow from how many a page holds."""
    sizes = [1 / rule.blocks_per_page for rule in rules]
    full = [size for rule, size in zip(rules, sizes, strict=True) if rule.window is None]
    windowed = [
        (rule.cover, size)
        for rule, size in zip(rules, sizes, strict=True)
        if rule.window is not None
    ]
    covers = sum(cover * size for cover, size in windowed)
    per_block = sum(full) or sum(size for _, size in windowed) or 1.0
    return max(1, round(CHECKPOINT_SHARE * covers / per_block))
