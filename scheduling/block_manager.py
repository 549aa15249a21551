"""Tracks which KV blocks are in use and which free blocks still hold a usable prefix.

Pure bookkeeping over block numbers; torch-free. Every block is either pinned (count > 0) or in the
free list, never both, never neither. The free list is ordered: blocks without a hash first, then
cached ones, least recently used first. All operations are O(1) per block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from scheduling.retention import Retention


class CacheDelta(msgspec.Struct, frozen=True):
    """Hashes that were added to the cache or removed from it since the last `drain_events`."""

    stored: list[bytes]
    removed: list[bytes]


class ColdBlock(NamedTuple):
    """A cached block as it is now. `num_uses` counts how often it was allocated until now."""

    block: int
    digest: bytes
    num_uses: int


class BlockManager:
    """Owner of the block numbers `0 .. num_blocks - 1`. Calls `on_allocate` with newly allocated
    blocks, whose old contents are invalid, and `on_withdraw` with the hashes of blocks whose
    contents turned out to be wrong."""

    def __init__(
        self, num_blocks: int, on_allocate: Callable[[list[int]], None] = lambda _: None
    ) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least one block, not {num_blocks}")
        self.num_blocks = num_blocks
        self._on_allocate = on_allocate
        self.on_withdraw: Callable[[list[bytes]], None] = lambda _: None
        self.retention = Retention(num_blocks)
        self._blank = list(range(num_blocks - 1, -1, -1))
        """Free blocks without contents, which are handed out first; the next one is the last."""
        self._free: OrderedDict[int, None] = OrderedDict()
        """The other free blocks, in the order of their eviction."""
        self._pins = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._parent_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._num_uses = [0] * num_blocks
        self._released_use = [0] * num_blocks  # what `_num_uses` was at a block's last release
        self._stays_here: set[int] = set()  # cached blocks that `coldest` leaves out
        self._stored: dict[bytes, None] = {}
        self._removed: dict[bytes, None] = {}
        self._num_cached_free = 0
        self.num_moves = 0
        """Calls so far that pinned or unpinned blocks."""
        self.num_changes = 0
        """Times so far that a block was allocated, or became free with new contents."""

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out, cached ones included."""
        return len(self._blank) + len(self._free)

    @property
    def num_pinned(self) -> int:
        """Blocks in use."""
        return self.num_blocks - len(self._blank) - len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks with a hash that `match` can find, pinned or free."""
        return len(self._block_of)

    @property
    def num_cached_free(self) -> int:
        """Unpinned blocks with a hash: `match` can find them, and `allocate` can evict them."""
        return self._num_cached_free

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """Blocks that hold the longest cached prefix of the chain `hashes`; pins nothing."""
        blocks: list[int] = []
        for digest in hashes:
            block = self._block_of.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def is_cached(self, digest: bytes) -> bool:
        """Whether a block has this hash."""
        return digest in self._block_of

    def num_free_after_pinning(self, blocks: Iterable[int]) -> int:
        """Number of free blocks that would be left if `blocks` were pinned."""
        return self.num_free - sum(1 for block in blocks if self._pins[block] == 0)

    def is_pinned(self, block: int) -> bool:
        """Whether the block is in use."""
        return self._pins[block] > 0

    def is_shared(self, block: int) -> bool:
        """Whether the block is pinned more than once."""
        return self._pins[block] > 1

    def is_hashed(self, block: int) -> bool:
        """Whether the block is cached under a hash."""
        return self._hash_of[block] is not None

    def pin(self, blocks: Iterable[int]) -> None:
        """Pin blocks found by `match` (once more, if they are pinned already)."""
        self.num_moves += 1
        for block in blocks:
            if self._pins[block] == 0:
                del self._free[block]
                self._num_cached_free -= self._hash_of[block] is not None
            self._pins[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Pin `count` blocks, evicting the least recently used prefixes, those that `retention`
        protects last. Raises ValueError, and takes no block, if fewer are free."""
        if count > self.num_free:
            raise ValueError(f"{count} blocks wanted, {self.num_free} free")
        self.num_moves += 1
        self.num_changes += count
        first_blank = max(0, len(self._blank) - count)
        blocks = self._blank[first_blank:][::-1]
        del self._blank[first_blank:]
        if len(blocks) < count:
            blocks += self.retention.take(self._free, count - len(blocks))
        pins, uses, hash_of = self._pins, self._num_uses, self._hash_of
        for block in blocks:
            if hash_of[block] is not None:
                self._forget(block)
            pins[block] = 1
            uses[block] += 1
        self._on_allocate(blocks)
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Unpin blocks, given in chain order; the tail of the chain is evicted first."""
        self.num_moves += 1
        pins, free, hash_of = self._pins, self._free, self._hash_of
        uses, released = self._num_uses, self._released_use
        blank = []
        for block in reversed(blocks):
            num_pins = pins[block]
            assert num_pins > 0, f"block {block} released twice"
            pins[block] = num_pins - 1
            if num_pins == 1:
                if released[block] != uses[block]:
                    released[block] = uses[block]
                    self.num_changes += 1
                if hash_of[block] is None:
                    blank.append(block)
                else:
                    free[block] = None
                    self._num_cached_free += 1
        self._add_blank(blank)

    def withdraw(self, blocks: Iterable[int], hashes: Sequence[bytes] = ()) -> None:
        """Forget the hashes of pinned blocks whose contents cannot be trusted. `hashes` are those
        of the chain that the blocks hold. A hash under which another block is cached stays
        known."""
        doubted = dict.fromkeys(hashes)
        for block in blocks:
            assert self._pins[block] > 0, f"block {block} withdrawn while free"
            digest = self._hash_of[block]
            if digest is not None:
                doubted[digest] = None
            self._forget(block)
        self.on_withdraw(list(doubted))

    def forget(self, hashes: Iterable[bytes]) -> None:
        """Forget these hashes, whether or not their blocks are in use."""
        for digest in hashes:
            if (block := self._block_of.get(digest)) is not None:
                self._forget(block)

    def publish(
        self, block: int, digest: bytes, parent: bytes | None = None, stays_here: bool = False
    ) -> None:
        """Cache a pinned, complete block under its hash; an earlier block with this hash stays.
        `parent` is the hash of the block before it, None for a prompt's first block. With
        `stays_here` the block must not be copied elsewhere: `coldest` leaves it out."""
        assert self._pins[block] > 0, f"block {block} published while free"
        if digest in self._block_of or self._hash_of[block] is not None:
            return
        if stays_here:
            self._stays_here.add(block)
        self._hash_of[block] = digest
        self._parent_of[block] = parent
        self._block_of[digest] = block
        if digest in self._removed:
            del self._removed[digest]
        else:
            self._stored[digest] = None

    def coldest(
        self, count: int, is_kept: Callable[[bytes], bool] = lambda digest: False
    ) -> list[ColdBlock]:
        """The cached blocks among the next `count` that `allocate` hands out, in this order,
        without those whose hash `is_kept`. Considers fewer blocks if many are protected."""
        return [
            ColdBlock(block, digest, self._num_uses[block])
            for block in self.retention.next(self._free, max(0, count - len(self._blank)))
            if (digest := self._hash_of[block]) is not None
            and not is_kept(digest)
            and block not in self._stays_here
        ]

    def find(self, digest: bytes) -> ColdBlock | None:
        """The cached block with this hash."""
        block = self._block_of.get(digest)
        return None if block is None else ColdBlock(block, digest, self._num_uses[block])

    def stay_here(self, hashes: Iterable[bytes]) -> bool:
        """Whether at least one of these cached blocks must not be copied elsewhere."""
        return any(self._block_of.get(digest) in self._stays_here for digest in hashes)

    def is_unchanged(self, cold: ColdBlock) -> bool:
        """Whether the block still holds what it held when `coldest` or `find` returned it."""
        block, digest, num_uses = cold
        return self._num_uses[block] == num_uses and self._hash_of[block] == digest

    def drain_events(self) -> CacheDelta:
        """The changes to the cache since the last call."""
        delta = CacheDelta(list(self._stored), list(self._removed))
        self._stored.clear()
        self._removed.clear()
        return delta

    def parent_of(self, digest: bytes) -> bytes | None:
        """The hash of the block before a cached one; None if it is a prompt's first."""
        return self._parent_of[self._block_of[digest]]

    def hashes(self) -> list[bytes]:
        """Every hash that `match` can find now."""
        return list(self._block_of)

    def idle_prefixes(self) -> Iterator[list[bytes]]:
        """The longest cached prefixes whose last block is not in use, most recently used first.
        Each is the list of its hashes, from the prompt's first block on. The cache must not change
        meanwhile."""
        parents = {self._parent_of[block] for block in self._block_of.values()}
        for block in self._latest_first():
            digest = self._hash_of[block]
            if digest is not None and digest not in parents:
                prefix = self._prefix_up_to(digest)
                if prefix:
                    yield prefix

    def _prefix_up_to(self, digest: bytes | None) -> list[bytes]:
        """The hashes of the prefix that ends with `digest`; empty if one of its blocks is not
        cached."""
        hashes: list[bytes] = []
        while digest is not None:
            block = self._block_of.get(digest)
            if block is None:
                return []
            hashes.append(digest)
            digest = self._parent_of[block]
        return hashes[::-1]

    def clear_cache(self) -> None:
        """Forget every hash; pinned blocks stay pinned."""
        blocks = list(self._block_of.values())
        for block in blocks:
            self._forget(block)
        blank = [block for block in blocks if block in self._free]
        for block in blank:
            del self._free[block]
        self._add_blank(blank)

    def check(self) -> None:
        """Raise AssertionError unless every invariant holds; for tests."""
        blank = set(self._blank)
        assert len(blank) == len(self._blank)
        assert not blank & self._free.keys()
        for block in range(self.num_blocks):
            is_free = block in blank or block in self._free
            assert (self._pins[block] == 0) == is_free, f"block {block}"
        assert all(self._hash_of[block] is None for block in blank)
        for digest, block in self._block_of.items():
            assert self._hash_of[block] == digest
        assert sum(h is not None for h in self._hash_of) == len(self._block_of)
        assert self._num_cached_free == sum(
            self._hash_of[block] is not None for block in self._free
        )

    def _latest_first(self) -> Iterator[int]:
        """The free blocks that may hold something, in reverse order of eviction."""
        return reversed(self._free)

    def _add_blank(self, blocks: list[int]) -> None:
        """Hand out these free blocks, which hold nothing, before all others; the last one first."""
        self._blank += blocks

    def _forget(self, block: int) -> None:
        digest = self._hash_of[block]
        if digest is None:
            return
        self._hash_of[block] = None
        self._stays_here.discard(block)
        self.retention.forget(block)
        self._num_cached_free -= self._pins[block] == 0
        del self._block_of[digest]
        if digest in self._stored:
            del self._stored[digest]
        else:
            self._removed[digest] = None
