"""Blocks leave the pool for host memory before they are evicted, and come back bit for bit."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from itertools import repeat

import pytest

from kv_transfer.tiers.copies import HostCopies
from kv_transfer.tiers.host_tier import MAX_SAVING, UNITS_PER_JOB, HostTier
from kv_transfer.tiers.kv_tiers import KvTiers, WantedBlock
from kv_transfer.tiers.units import ColdUnit, Units
from kv_transfer.transports.interface import PoolMemory
from protocol.retention import RetentionHint
from scheduling.block_manager import BlockManager, ColdBlock
from scheduling.block_pools import BlockPools
from tests.unit.held_thread import HeldThread

BYTES = 64


class Pool:
    """A pool of blocks with a tier of `num_slots` below it."""

    def __init__(self, num_blocks: int, num_slots: int, max_age_s: float = 100.0) -> None:
        self.memory = ctypes.create_string_buffer(num_blocks * BYTES)
        self.blocks = BlockManager(num_blocks)
        self.pools = BlockPools.of_one(self.blocks, 16)
        self.thread = HeldThread()
        address = ctypes.addressof(self.memory)
        copies = HostCopies(PoolMemory(address, BYTES, num_blocks, "cpu"), num_slots)
        self.host = HostTier(copies, self.thread, BYTES, max_age_s)  # type: ignore[arg-type]
        self.tiers = KvTiers(self.pools, Units([BYTES]), self.host)
        self.now = 0.0

    def turn(self) -> None:
        """Save what there is, and take note of it."""
        for _ in range(2):
            self.now += 1.0
            self.tiers.turn(self.now)

    def write(self, block: int, text: bytes) -> None:
        self.memory[block * BYTES : (block + 1) * BYTES] = text.ljust(BYTES, b".")

    def read(self, block: int) -> bytes:
        return bytes(self.memory[block * BYTES : (block + 1) * BYTES]).rstrip(b".")

    def fill(self, names: list[bytes], stays_here: bool = False) -> list[int]:
        """Compute a chain of blocks and let go of them."""
        table = self.blocks.allocate(len(names))
        for block, name in zip(table, names, strict=True):
            self.write(block, name)
            self.blocks.publish(block, name, stays_here=stays_here)
        self.blocks.release(table)
        return table

    def evict_all(self) -> None:
        table = self.blocks.allocate(self.blocks.num_free)
        for block in table:
            self.write(block, b"other")
        self.blocks.release(table)

    def num_ready(self, names: list[bytes]) -> int:
        """How many leading blocks of a chain can be loaded."""
        return self.pools.reach(names, 0, self.tiers.is_ready)

    def load(self, names: list[bytes]) -> list[bytes]:
        """What is in blocks of a request that has loaded these."""
        table = self.blocks.allocate(len(names))
        arrived: list[int] = []
        self.tiers.load(list(map(WantedBlock, repeat(0), names, table)), arrived.append, self.now)
        self.turn()
        self.blocks.release(table)
        return [self.read(block) for block in table[: arrived[0]]]


@pytest.fixture
def pool() -> Iterator[Pool]:
    made = Pool(8, 16)
    yield made
    made.tiers.close()


def chain(name: str, length: int) -> list[bytes]:
    return [f"{name}{i}".encode() for i in range(length)]


def test_what_the_pool_evicts_comes_back_bit_for_bit(pool: Pool) -> None:
    pool.fill(chain("a", 4))
    pool.turn()
    pool.evict_all()
    assert pool.num_ready(chain("a", 5)) == 4
    assert pool.num_ready(chain("b", 4)) == 0
    assert pool.load(chain("a", 4)) == chain("a", 4)
    assert pool.host.counts.loaded_bytes == pool.host.counts.stored_bytes == 4 * BYTES


def test_each_block_is_saved_once(pool: Pool) -> None:
    table = pool.fill(chain("a", 3))
    for _ in range(5):
        pool.turn()
        pool.blocks.pin(table)
        pool.blocks.release(table)
    assert pool.host.counts.num_stored == 3


def test_saved_blocks_are_not_looked_at_again(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that steps would lose time to it whenever it looks for cold blocks."""
    pool.fill(chain("a", 6))
    pool.turn()
    new = chain("b", 2)
    pool.fill(new)
    looked_at: list[bytes] = []
    cold = pool.tiers.units.cold

    def count(group: int, block: ColdBlock) -> list[ColdUnit]:
        looked_at.append(block.digest)
        return cold(group, block)

    monkeypatch.setattr(pool.tiers.units, "cold", count)
    pool.turn()
    assert sorted(looked_at) == sorted(new)


def test_prompts_that_are_cached_whole_cause_no_search_for_cold_blocks(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.fill(chain("a", 6))
    pool.turn()
    monkeypatch.setattr(pool.tiers, "_unsaved", lambda: pytest.fail("nothing new to save"))
    for _ in range(50):
        table = pool.blocks.match(chain("a", 6))
        pool.blocks.pin(table)
        pool.blocks.release(table)
        pool.tiers.turn(pool.now)
    pool.fill(chain("b", 2))
    with pytest.raises(pytest.fail.Exception):
        pool.tiers.turn(pool.now)


def test_blocks_are_saved_soon_after_their_first_user_lets_go_of_them(pool: Pool) -> None:
    """Not only by the next search that is due because time has passed."""
    table = pool.blocks.allocate(4)
    pool.turn()
    for block, name in zip(table, chain("a", 4), strict=True):
        pool.blocks.publish(block, name)
    pool.blocks.release(table)
    pool.tiers.turn(pool.now)
    pool.tiers.turn(pool.now)
    assert pool.host.counts.num_stored == 4


def test_a_block_that_is_allocated_while_it_is_copied_is_not_kept(pool: Pool) -> None:
    pool.fill(chain("a", 8))
    pool.thread.is_held = True
    pool.turn()
    pool.evict_all()
    pool.thread.run()
    pool.turn()
    assert len(pool.host.index) == 0
    assert pool.host.counts.num_missed == 8
    pool.host.index.check()


def test_blocks_that_may_not_leave_the_pool_stay(pool: Pool) -> None:
    pool.fill(chain("a", 8), stays_here=True)
    pool.turn()
    assert len(pool.host.index) == 0


def test_protected_blocks_are_saved_when_no_others_are_left() -> None:
    pool = Pool(8, 4)  # saves two blocks ahead
    hinted = pool.fill(chain("a", 2))
    pool.blocks.retention.protect(hinted, "owner", RetentionHint(60, 50))
    pool.fill(chain("b", 6))
    pool.turn()
    assert set(pool.host.index.names()) == {b"b4", b"b5"}
    pool.blocks.allocate(6)
    pool.turn()
    assert {b"a0", b"a1"} <= set(pool.host.index.names())
    pool.tiers.close()


@pytest.mark.parametrize("is_copying", [False, True])
def test_blocks_whose_contents_were_wrong_are_forgotten(pool: Pool, is_copying: bool) -> None:
    table = pool.fill(chain("a", 8))
    pool.thread.is_held = is_copying
    pool.turn()
    pool.blocks.pin(table)
    pool.blocks.withdraw(table)
    pool.blocks.release(table)
    pool.thread.is_held = False
    pool.turn()
    assert len(pool.host.index) == 0
    pool.host.index.check()


def test_a_copy_is_forgotten_though_another_block_is_the_cached_one(pool: Pool) -> None:
    """It may have been loaded from there into the block whose contents were wrong."""
    held = chain("a", 3)
    pool.fill(held)
    pool.turn()
    assert len(pool.host.index) == 3
    loaded = pool.blocks.allocate(3)
    for block, digest in zip(loaded, held, strict=True):
        pool.blocks.publish(block, digest)
    pool.blocks.withdraw(loaded, held)
    assert len(pool.blocks.match(held)) == 3, "the other blocks are cached"
    assert len(pool.host.index) == 0
    pool.blocks.release(loaded)


def test_a_bit_that_flips_in_host_memory_is_noticed(
    pool: Pool, caplog: pytest.LogCaptureFixture
) -> None:
    held = chain("a", 4)
    pool.fill(held)
    pool.turn()
    slot = pool.host.index.find(held[1])
    assert slot is not None
    pool.host.slot(slot)[3] ^= 1
    for _ in range(2):
        assert pool.load(held) == held[:1]
        held = held[:1]
    assert pool.host.counts.num_failures == 1
    assert caplog.text.count("host memory") == 1
    pool.host.index.check()


def test_a_load_that_nobody_wants_any_more_writes_nothing(pool: Pool) -> None:
    pool.fill(chain("a", 8))
    pool.turn()
    pool.evict_all()
    pool.thread.is_held = True
    (block,) = pool.blocks.allocate(1)
    arrived: list[int] = []
    load = pool.tiers.load([WantedBlock(0, b"a7", block)], arrived.append, pool.now)
    load.cancel()
    pool.thread.run()
    pool.turn()
    assert (arrived, pool.read(block)) == ([0], b"other")
    assert pool.host.counts.num_failures == 0


def test_old_blocks_are_forgotten() -> None:
    pool = Pool(4, 8, max_age_s=10.0)
    pool.fill(chain("a", 4))
    pool.turn()
    assert len(pool.host.index) == 4
    pool.now += 11.0
    pool.blocks.clear_cache()
    pool.turn()
    assert (len(pool.host.index), pool.host.index.num_evicted) == (0, 4)
    pool.tiers.close()


def test_a_small_tier_is_not_filled_again_and_again() -> None:
    pool = Pool(64, 8)
    pool.fill(chain("a", 64))
    for _ in range(10):
        pool.turn()
    assert pool.host.counts.num_stored == 4
    pool.tiers.close()


def test_saving_leaves_room_for_loads_in_between() -> None:
    pool = Pool(4 * MAX_SAVING, 4 * MAX_SAVING)
    pool.fill(chain("a", 4 * MAX_SAVING))
    pool.thread.is_held = True
    pool.turn()
    assert len(pool.thread.waiting) == MAX_SAVING // UNITS_PER_JOB
    pool.tiers.close()
