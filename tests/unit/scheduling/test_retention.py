"""Hints keep blocks from being evicted as long as there are others, within limits, and pin none."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.retention import RetentionHint
from scheduling.retention import ALL_SHARE, OWNER_SHARE, Retention

POOL = 40
OWN, ALL = int(OWNER_SHARE * POOL), int(ALL_SHARE * POOL)


class Rig:
    """A pool whose blocks are all free, the first one used least recently."""

    def __init__(self) -> None:
        self.retention = Retention(POOL)
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(POOL))

    def protect(
        self, blocks: range, owner: str = "a", priority: int = 50, seconds: int = 10
    ) -> int:
        return self.retention.protect(list(blocks), owner, RetentionHint(seconds, priority))

    def take(self, count: int) -> list[int]:
        return self.retention.take(self.free, count)


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_without_hints_the_oldest_go_first(rig: Rig) -> None:
    assert rig.take(3) == [0, 1, 2]


def test_protected_blocks_outlast_all_others(rig: Rig) -> None:
    assert rig.protect(range(4)) == 4
    assert set(rig.take(POOL - 4)) == set(range(4, POOL))
    assert list(rig.free) == [0, 1, 2, 3], "in their order"
    assert rig.take(4) == [0, 1, 2, 3], "and are no pins"
    assert len(rig.retention) == 0


def test_a_hint_ends(rig: Rig) -> None:
    rig.protect(range(4), seconds=10)
    rig.retention.now = 10.0
    assert rig.take(3) == [0, 1, 2]


def test_of_protected_blocks_those_of_low_priority_go_first(rig: Rig) -> None:
    rig.protect(range(4), priority=70)
    rig.protect(range(4, 8), owner="b", priority=20)
    rig.take(POOL - 8)
    assert rig.take(5) == [4, 5, 6, 7, 0]


def test_an_owner_protects_its_part_and_no_more(rig: Rig) -> None:
    assert rig.protect(range(30), owner="greedy") == OWN
    assert rig.protect(range(30, 40), owner="greedy", priority=100) == 0
    assert rig.protect(range(30, 34), owner="modest") == 4
    taken = rig.take(POOL - OWN - 4)
    assert not set(taken) & set(range(30, 34)), "no protected block of another owner is evicted"
    assert not set(taken) & set(range(OWN)), "of its chain, the beginning stays"


def test_all_owners_together_have_a_limit(rig: Rig) -> None:
    protected = [
        rig.protect(range(first, first + OWN), owner=f"{first}") for first in range(0, POOL, OWN)
    ]
    assert sum(protected) == ALL


def test_a_limit_is_free_again_when_hints_end(rig: Rig) -> None:
    rig.protect(range(OWN), seconds=5)
    rig.retention.now = 5.0
    assert rig.protect(range(20, 24)) == 4
    assert len(rig.retention) == 4


def test_a_later_hint_replaces_the_one_before(rig: Rig) -> None:
    rig.protect(range(OWN), seconds=5)
    assert rig.protect(range(OWN), owner="a", seconds=20) == OWN
    rig.retention.now = 6.0
    assert rig.take(2) == [OWN, OWN + 1]


def test_a_short_hint_of_another_owner_takes_nothing_away(rig: Rig) -> None:
    """Owners may share the beginning of a prompt."""
    rig.protect(range(4), owner="a", seconds=20)
    rig.protect(range(6), owner="b", seconds=5)
    rig.retention.now = 6.0
    rig.take(POOL - 4)
    assert list(rig.free) == [0, 1, 2, 3]


def test_an_owner_whose_part_is_used_up_takes_no_protection_away(rig: Rig) -> None:
    rig.protect(range(4), owner="a", seconds=5)
    rig.protect(range(4, 4 + OWN), owner="b", seconds=20)
    assert rig.protect(range(4), owner="b", seconds=20) == 0
    rig.take(POOL - 4 - OWN)
    assert list(rig.free) == list(range(4 + OWN))


class CountedMoves(OrderedDict[int, None]):
    """Free blocks that count how often one of them was moved."""

    num_moves = 0

    def move_to_end(self, key: int, last: bool = True) -> None:
        self.num_moves += 1
        super().move_to_end(key, last)


def test_a_pool_of_protected_blocks_is_searched_once_for_many() -> None:
    """A block that decoding needs must not cost a look at all protected ones."""
    retention, free = Retention(8192), CountedMoves((block, None) for block in range(4096))
    for owner, first in (("a", 0), ("b", 2048)):
        hint = RetentionHint(10, 20 if owner == "b" else 70)
        assert retention.protect(range(first, first + 2048), owner, hint) == 2048
    taken = [retention.take(free, 1)[0] for _ in range(128)]
    assert taken == list(range(2048, 2048 + 128)), "the lowest priority first"
    assert free.num_moves < 3 * 4096


@given(
    hints=st.lists(
        st.tuples(st.integers(0, 30), st.integers(0, 10), st.sampled_from("abc")), max_size=6
    ),
    counts=st.lists(st.integers(0, 9), max_size=4),
)
def test_each_free_block_is_taken_once(
    hints: list[tuple[int, int, str]], counts: list[int]
) -> None:
    rig = Rig()
    for first, number, owner in hints:
        rig.protect(range(first, first + number), owner)
    taken = [block for count in counts for block in rig.take(count)]
    assert len(taken) == sum(counts) == len(set(taken))
    assert set(taken) | set(rig.free) == set(range(POOL))


@pytest.mark.parametrize("count", [1, 4, 12, POOL])
@pytest.mark.parametrize("first", [0, 3, 20])
def test_what_is_looked_up_is_what_is_taken_next(rig: Rig, first: int, count: int) -> None:
    rig.protect(range(first, first + 6), "a", priority=9)
    rig.protect(range(first + 6, first + 10), "b", priority=1)
    found: list[int] = []
    for _ in range(POOL):  # protected blocks at the front are passed over bit by bit
        found = rig.retention.next(rig.free, count)
        assert len(found) <= count
        if len(found) == count:
            break
    assert found == rig.take(count)


def test_protected_blocks_come_last(rig: Rig) -> None:
    rig.protect(range(4))
    assert rig.retention.next(rig.free, 2) in ([], [4, 5])
    assert rig.retention.next(rig.free, 2) == [4, 5]
    rig.take(POOL - 4)
    assert rig.retention.next(rig.free, 2) == [0, 1]
