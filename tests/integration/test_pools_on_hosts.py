"""Blocks between workers whose ranks have an agent of their own for each, or for some of them: each
rank of the target gets its heads of its layers before the target hears of the write."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from itertools import product

import msgspec
import numpy as np
import pytest

from engine.kv_pool import KvPool
from kv_transfer.head_slices import plan_shares
from kv_transfer.transports.interface import (
    Notification,
    PeerLost,
    PeerReady,
    PoolMemory,
    WriteDone,
)
from kv_transfer.transports.memory_file import SharedMemory, address_of
from protocol.errors import TransferError
from protocol.layout import KvGroup, KvLayout
from scheduling.pool_sizes import blocks_with
from tests.effort import some
from tests.integration.pool_ends import poll_until
from tests.integration.spread_ends import SpreadEnd
from tests.layouts import part_of
from worker.ranks.pool_memory import pool_memory

NUM_BLOCKS = 6
LAYOUT = KvLayout(
    model_fingerprint="model",
    dtype="bfloat16",
    num_layers=3,
    num_kv_heads=4,
    block_size=2,
    head_dim=4,
)
SPREADS = [(1, 1, 1), (2, 1, 1), (2, 1, 2), (4, 1, 2), (4, 1, 4), (1, 2, 2), (2, 3, 3), (2, 3, 6)]
"""Ranks of a stage, stages, and hosts."""


class Spread(SpreadEnd):
    """A worker's pool, with equally many ranks on each host: `parts` are [blocks, numbers]."""

    def __init__(self, tp_size: int, num_stages: int, num_hosts: int) -> None:
        super().__init__()
        self.layout = LAYOUT.shard(0, tp_size, num_stages - 1, num_stages)
        ranks = list(self.layout.ranks)
        memories = [SharedMemory(each.block_bytes * NUM_BLOCKS) for each in ranks]
        self.parts = [
            np.frombuffer(memory.view, np.uint16)[: each.block_bytes // 2 * NUM_BLOCKS].reshape(
                NUM_BLOCKS, -1
            )
            for each, memory in zip(ranks, memories, strict=True)
        ]
        pools = [
            PoolMemory(address_of(memory.view), each.block_bytes, NUM_BLOCKS, "cpu")
            for each, memory in zip(ranks, memories, strict=True)
        ]
        size = len(ranks) // num_hosts
        self.register([joined(pools[i : i + size]) for i in range(0, len(ranks), size)])

    def fill(self, blocks: np.ndarray) -> None:
        """Let each rank have its part of these blocks."""
        for each, part in zip(self.layout.ranks, self.parts, strict=True):
            part[:] = part_of(each, blocks)

    def holds(self, blocks: np.ndarray) -> bool:
        """Whether each rank has its part of these blocks."""
        return all(
            (part == part_of(each, blocks)).all()
            for each, part in zip(self.layout.ranks, self.parts, strict=True)
        )


def joined(pools: list[PoolMemory]) -> PoolMemory:
    """One pool of the ranks of one host."""
    first, *others = [each.parts[0] for each in pools]
    return PoolMemory(first.address, first.block_bytes, NUM_BLOCKS, "cpu", tuple(others))


@pytest.fixture
def ends() -> Iterator[list[Spread]]:
    opened: list[Spread] = []
    yield opened
    for end in opened:
        end.close()


def add(one: Spread, other: Spread) -> None:
    agent, descriptor = other.transport.agent, other.transport.descriptor()
    shares = plan_shares(one.layout, other.layout)
    one.transport.add_peer(agent, descriptor, NUM_BLOCKS, shares)


def some_blocks() -> np.ndarray:
    shape = (NUM_BLOCKS, *LAYOUT.block_shape)
    return np.random.default_rng(7).integers(1, 1 << 16, shape, dtype=np.uint16)


def errors(end: Spread) -> list[str | None]:
    return [each.error for each in end.events if isinstance(each, WriteDone)]


@pytest.mark.parametrize(("source", "target"), some(product(SPREADS, SPREADS), 12))
def test_each_rank_gets_its_heads_wherever_it_lies(
    ends: list[Spread], source: tuple[int, int, int], target: tuple[int, int, int]
) -> None:
    ends += [Spread(*source), Spread(*target)]
    one, other = ends
    numbers = some_blocks()
    one.fill(numbers)
    add(one, other)
    poll_until(PeerReady, one, other)
    one.transport.post_write(other.transport.agent, [1, 2, 5], [4, 5, 0], b"landed")
    poll_until(Notification, other, one)
    expected = np.zeros_like(numbers)
    expected[[4, 5, 0]] = numbers[[1, 2, 5]]
    assert other.holds(expected)
    assert other.events == [Notification(one.transport.agent, b"landed")]
    poll_until(WriteDone, one, other)
    assert errors(one) == [None]


@pytest.fixture
def pair(ends: list[Spread]) -> tuple[Spread, Spread, np.ndarray]:
    """Two workers of two ranks on two hosts each, which have met, and what the first one holds."""
    one, other = Spread(2, 1, 2), Spread(2, 1, 2)
    ends += [one, other]
    numbers = some_blocks()
    one.fill(numbers)
    add(one, other)
    poll_until(PeerReady, one, other)
    return one, other, numbers


Pair = tuple[Spread, Spread, np.ndarray]


def test_a_host_that_stands_still_keeps_the_write_open(pair: Pair) -> None:
    one, other, numbers = pair
    one.far[0].is_stopped = True
    one.transport.post_write(other.transport.agent, [1], [2], b"landed")
    while not (other.parts[0][2] == one.parts[0][1]).all():
        one.poll()
        other.poll()
    for _ in range(100):
        one.poll()
        other.poll()
    assert errors(one) == []
    assert other.events == []
    one.far[0].go_on()
    poll_until(Notification, other, one)
    expected = np.zeros_like(numbers)
    expected[2] = numbers[1]
    assert other.holds(expected)


@pytest.mark.parametrize(
    ("nonce", "after_s", "said"),
    [
        (1, -1.0, "our grant ended before it was posted"),
        (2, 60.0, "the order came too late"),
    ],
)
def test_a_host_writes_nothing_after_the_time_that_it_may(
    pair: Pair, nonce: int, after_s: float, said: str
) -> None:
    one, other, _ = pair
    came_at = one.far[0].host.beat[1]
    one.far[0].host.beat = nonce, came_at
    agent = other.transport.agent
    one.transport.post_write(agent, [1], [2], b"landed", 0, came_at + after_s)
    poll_until(WriteDone, one, other)
    assert errors(one) == [said]
    assert not other.parts[1].any()
    assert other.events == []


def test_peers_get_new_ends_on_all_hosts(pair: Pair) -> None:
    one, other, numbers = pair
    former = other.transport.agent
    assert other.transport.renew(former)
    assert other.transport.agent != former
    one.transport.remove_peer(former)
    other.transport.retire(former)
    one.events.clear()
    add(one, other)
    poll_until(PeerReady, one, other)
    one.transport.post_write(other.transport.agent, [3], [3], b"landed")
    poll_until(Notification, other, one)
    expected = np.zeros_like(numbers)
    expected[3] = numbers[3]
    assert other.holds(expected)


def test_an_end_that_fails_on_another_host_is_lost(pair: Pair) -> None:
    one, other, _ = pair
    one.events.clear()
    shares = plan_shares(one.layout, other.layout)
    descriptor = other.transport.descriptor()
    one.transport.add_peer(other.transport.agent, descriptor[:-8] + bytes(8), NUM_BLOCKS, shares)
    poll_until(PeerLost, one, other)
    with pytest.raises(TransferError, match="is not known"):
        one.transport.post_write(other.transport.agent, [1], [2], b"late")


WINDOWED = msgspec.structs.replace(
    LAYOUT, num_layers=5, grouping=(KvGroup((0, 3)), KvGroup((1, 2, 4), 5))
)
PAGES = 4


class Grouped(SpreadEnd):
    """A worker's pool of layers in groups; of a stage without layers of a group, too."""

    def __init__(self, tp_size: int, num_stages: int, num_hosts: int, seed: int) -> None:
        super().__init__()
        self.layout = WINDOWED.shard(0, tp_size, num_stages - 1, num_stages)
        self.num_blocks = blocks_with(self.layout, PAGES * self.layout.blocks_per_page(0))
        self.pools = [KvPool(each, self.num_blocks) for each in self.layout.ranks]
        numbers = np.random.default_rng(seed)
        for part in self.bytes():
            part[:] = numbers.integers(0, 256, len(part), dtype=np.uint8)
        size = len(self.pools) // num_hosts
        hosts = [self.pools[i : i + size] for i in range(0, len(self.pools), size)]
        for first, *others in hosts:
            first.others = others
        self.register([pool_memory(first) for first, *_ in hosts])

    def bytes(self) -> list[np.ndarray]:
        """Each rank's memory."""
        return [
            np.ctypeslib.as_array(
                (ctypes.c_uint8 * (group.block_bytes * group.num_blocks)).from_address(
                    each.base_address
                )
            )
            for each in self.pools
            for group in each.groups[:1]
        ]


@pytest.mark.parametrize(("source", "target"), [((2, 1), (1, 5)), ((1, 5), (2, 1))])
def test_groups_of_layers_move_as_between_workers_of_one_end(
    source: tuple[int, int], target: tuple[int, int]
) -> None:
    found = []
    for is_spread in (False, True):
        hosts = [size * stages if is_spread else 1 for size, stages in (source, target)]
        one, other = Grouped(*source, hosts[0], 1), Grouped(*target, hosts[1], 2)
        agent, descriptor = other.transport.agent, other.transport.descriptor()
        num_blocks = other.pools[0].groups[0].num_blocks
        shares = plan_shares(one.layout, other.layout)
        one.transport.add_peer(agent, descriptor, num_blocks, shares)
        poll_until(PeerReady, one, other)
        for group in range(2):
            other.events.clear()
            one.transport.post_write(agent, [0, 2], [1, 3], b"landed", group)
            poll_until(Notification, other, one)
        found.append([each.copy() for each in other.bytes()])
        one.close()
        other.close()
    apart, spread = found
    assert all((a == b).all() for a, b in zip(apart, spread, strict=True))
    untouched = Grouped(*target, 1, 2)
    assert not all((a == b).all() for a, b in zip(spread, untouched.bytes(), strict=True))
    untouched.close()
