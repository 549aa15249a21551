"""Blocks are owned once, found while cached, and evicted least recently used, tails first."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from scheduling.block_manager import BlockManager, CacheDelta
from tests.effort import times


def chain(name: str, length: int) -> list[bytes]:
    return [f"{name}{i}".encode() for i in range(length)]


def fill(blocks: BlockManager, name: str, length: int) -> list[int]:
    """Allocate, publish and release a chain; its blocks stay cached."""
    table = blocks.allocate(length)
    parent = None
    for block, digest in zip(table, chain(name, length), strict=True):
        blocks.publish(block, digest, parent)
        parent = digest
    blocks.release(table)
    return table


def test_a_cached_prefix_is_found_up_to_the_first_unknown_block() -> None:
    blocks = BlockManager(8)
    table = fill(blocks, "a", 3)
    assert blocks.match([*chain("a", 2), b"other", b"a2"]) == table[:2]
    assert blocks.match([b"other"]) == []


def test_blocks_without_a_hash_go_first_then_the_oldest_chain_from_its_tail() -> None:
    blocks = BlockManager(6)
    a, b = fill(blocks, "a", 2), fill(blocks, "b", 2)
    assert set(blocks.allocate(2)).isdisjoint(a + b)
    assert blocks.allocate(1) == [a[1]]
    assert blocks.match(chain("a", 2)) == [a[0]]
    assert blocks.allocate(2) == [a[0], b[1]]


def test_a_listener_hears_which_blocks_are_handed_out() -> None:
    heard: list[list[int]] = []
    blocks = BlockManager(4, heard.append)
    a = fill(blocks, "a", 2)
    blocks.pin(a)
    assert heard == [a]
    assert [*heard[:1], blocks.allocate(2)] == heard


def test_using_a_chain_again_makes_it_the_youngest() -> None:
    blocks = BlockManager(4)
    a, b = fill(blocks, "a", 2), fill(blocks, "b", 2)
    blocks.pin(a)
    assert blocks.num_free_after_pinning(b) == 0
    blocks.release(a)
    assert blocks.allocate(2) == [b[1], b[0]]


def test_pinned_blocks_are_never_candidates() -> None:
    blocks = BlockManager(2)
    table = blocks.allocate(2)
    with pytest.raises(ValueError, match="1 blocks wanted, 0 free"):
        blocks.allocate(1)
    blocks.release(table)
    assert blocks.num_free == 2


def test_the_first_of_equal_blocks_keeps_the_hash() -> None:
    blocks = BlockManager(2)
    first, second = blocks.allocate(2)
    blocks.publish(first, b"x")
    blocks.publish(second, b"x")
    assert blocks.match([b"x"]) == [first]
    blocks.release([second])
    assert blocks.match([b"x"]) == [first]


def test_events_tell_the_net_change() -> None:
    blocks = BlockManager(2)
    fill(blocks, "a", 2)
    assert blocks.drain_events() == CacheDelta([b"a0", b"a1"], [])
    table = blocks.allocate(1)  # evicts a1
    blocks.publish(table[0], b"a1")  # and a1 comes back
    assert blocks.drain_events() == CacheDelta([], [])
    blocks.release(table)
    blocks.clear_cache()
    assert blocks.drain_events() == CacheDelta([], [b"a0", b"a1"])
    assert blocks.match([b"a0"]) == []


class BlockHistory(RuleBasedStateMachine):
    """Random histories of several owners over few blocks; the router's view follows by events."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(10)
        self.owners: list[tuple[str, list[int]]] = []
        self.view: set[bytes] = set()

    @rule(name=st.sampled_from("abc"), length=st.integers(1, 6))
    def take(self, name: str, length: int) -> None:
        cached = self.blocks.match(chain(name, length))
        if self.blocks.num_free_after_pinning(cached) < length - len(cached):
            return
        self.blocks.pin(cached)
        self.owners.append((name, cached + self.blocks.allocate(length - len(cached))))

    @rule(data=st.data())
    @precondition(lambda self: self.owners)
    def publish_and_release(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.owners) - 1))
        name, table = self.owners.pop(index)
        complete = data.draw(st.integers(0, len(table)))
        for block, digest in zip(table[:complete], chain(name, complete), strict=True):
            self.blocks.publish(block, digest)
        self.blocks.release(table)

    @rule()
    def follow_events(self) -> None:
        delta = self.blocks.drain_events()
        assert self.view.isdisjoint(delta.stored)
        assert self.view >= set(delta.removed)
        self.view = (self.view | set(delta.stored)) - set(delta.removed)
        assert self.view == set(self.blocks.hashes())

    @invariant()
    def consistent(self) -> None:
        self.blocks.check()
        assert self.blocks.num_pinned == len({b for _, table in self.owners for b in table})


BlockHistory.TestCase.settings = settings(
    max_examples=times(50, 400), deadline=None, derandomize=True
)
TestBlockHistory = BlockHistory.TestCase


def test_cached_blocks_that_are_free_are_counted_apart() -> None:
    manager = BlockManager(4)
    blocks = manager.allocate(3)
    manager.publish(blocks[0], b"a")
    manager.publish(blocks[1], b"b")
    assert (manager.num_cached, manager.num_cached_free) == (2, 0)
    manager.release(blocks)
    assert (manager.num_cached, manager.num_cached_free) == (2, 2)
    manager.pin([blocks[0]])
    assert manager.num_cached_free == 1
    manager.allocate(3)
    assert (manager.num_cached, manager.num_cached_free) == (1, 0)
    manager.check()


def test_what_was_withdrawn_is_found_no_more_and_said_to_be_gone() -> None:
    manager = BlockManager(2)
    (block,) = manager.allocate(1)
    manager.publish(block, b"a")
    assert manager.drain_events().stored == [b"a"]
    manager.withdraw([block])
    assert manager.match([b"a"]) == []
    assert manager.drain_events().removed == [b"a"]
    manager.release([block])
    manager.check()


def test_idle_prefixes_come_whole_and_the_one_used_last_first() -> None:
    blocks = BlockManager(12)
    a, b, c = (fill(blocks, name, 3) for name in "abc")
    blocks.pin(a)
    blocks.release(a)
    assert list(blocks.idle_prefixes()) == [chain("a", 3), chain("c", 3), chain("b", 3)]
    blocks.pin(c)
    assert list(blocks.idle_prefixes()) == [chain("a", 3), chain("b", 3)]
    longer = blocks.allocate(1)
    blocks.publish(longer[0], b"b3", b"b2")
    assert list(blocks.idle_prefixes()) == [chain("a", 3)], "a request uses the rest of it"
    blocks.release(longer)
    assert next(iter(blocks.idle_prefixes())) == [*chain("b", 3), b"b3"]
    blocks.release(c)
    assert blocks.match(chain("b", 3)) == b


def test_a_prefix_that_lacks_a_block_is_no_idle_prefix() -> None:
    blocks = BlockManager(4)
    table = fill(blocks, "a", 2)
    blocks.pin(table)
    blocks.withdraw(table[:1])
    blocks.release(table)
    assert list(blocks.idle_prefixes()) == []
