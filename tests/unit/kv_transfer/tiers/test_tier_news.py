"""The portions in which a tier reports its changes add up to the blocks that it holds."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.tiers.slot_index import SlotIndex
from kv_transfer.tiers.tier_news import GroupNews, TierNews
from kv_transfer.tiers.units import Units
from protocol.hashing import end_of
from tests.effort import times


def digest(number: int) -> bytes:
    return number.to_bytes(16, "little")


@settings(max_examples=times(50, 2000), deadline=None)
@given(
    changes=st.lists(st.tuples(st.sampled_from(["come", "leave", "take"]), st.integers(0, 6))),
    portion=st.integers(1, 3),
)
def test_portions_add_up(changes: list[tuple[str, int]], portion: int) -> None:
    news, held, told = TierNews(), set[bytes](), set[bytes]()

    def take() -> bool:
        stored, removed = news.take(portion)
        told.update(stored)
        told.difference_update(removed)
        return bool(stored or removed)

    for what, number in changes:
        if what == "come":
            news.store(digest(number))
            held.add(digest(number))
        elif what == "leave":
            news.remove(digest(number))
            held.discard(digest(number))
        else:
            take()
    while take():
        pass
    assert told == held == set(news.hashes())


def test_of_a_large_tier_a_part_is_told() -> None:
    news = TierNews(most=2)
    for number in range(4):
        news.store(digest(number))
    news.remove(digest(3))
    assert news.take(9) == ([digest(0), digest(1)], [])
    news.remove(digest(0))
    news.store(digest(5))
    assert news.take(9) == ([digest(5)], [digest(0)])


def test_every_entry_of_a_tier_is_told_of_until_it_leaves() -> None:
    index = SlotIndex(3, max_age_s=10.0)
    index.restore([(2, digest(2), 0.0)])
    for number in (0, 1):
        slot = index.try_reserve()
        assert slot is not None
        index.fill(slot, digest(number), 5.0)
    assert set(index.news.take(9).stored) == {digest(number) for number in range(3)}
    assert index.try_reserve() is not None, "at the cost of the oldest entry"
    index.drop(digest(0))
    index.expire(20.0)
    assert index.news.take(9) == ([], [digest(2), digest(0), digest(1)])
    assert index.news.hashes() == []


def test_of_several_groups_the_first_one_s_blocks_and_ends_are_told() -> None:
    """An end is where all other groups have all units of a block."""
    units = Units([20, 110, 30])
    news, a, b = GroupNews(units.per_block), digest(1), digest(2)
    first, *windows = (units.names(group, a) for group in range(3))
    news.store(first[0])
    assert news.take(9) == ([], [])
    for name in (first[1], *windows[0], *units.names(1, b), *windows[1][1:]):
        news.store(name)
    assert news.take(9) == ([a], [])
    news.store(windows[1][0])
    assert news.take(9) == ([end_of(a)], [])
    assert set(news.hashes()) == {a, end_of(a)}
    for name in (windows[0][5], *windows[1], units.names(1, b)[0]):
        news.remove(name)
    assert news.take(9) == ([], [end_of(a)])
    news.remove(first[1])
    assert news.take(9) == ([], [a])


def test_entries_that_were_there_before_are_told() -> None:
    index, units = SlotIndex(3, max_age_s=10.0), Units([10, 10])
    (window,) = units.names(1, digest(1))
    index.restore([(0, digest(1), 0.0), (1, window, 0.0)])
    index.report_by(GroupNews(units.per_block))
    assert set(index.news.take(9).stored) == {digest(1), end_of(digest(1))}
