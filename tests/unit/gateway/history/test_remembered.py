"""Remembered answers: bounded in bytes and time, and no tenant takes another's room."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.history.remembered import ENTRY_BYTES, MOST_LENGTHS, Remembered

IDS = b"\0" * 100
ENTRY = ENTRY_BYTES + len(IDS)


def test_an_entry_is_found_by_its_owner_alone_until_its_time_is_over() -> None:
    now = 0.0
    kept = Remembered(10 * ENTRY, 60, lambda: now)
    kept.put("a", b"x", IDS)
    assert (kept.find("a", b"x"), kept.find("b", b"x"), kept.find("a", b"y")) == (IDS, None, None)
    now = 60.0
    assert kept.find("a", b"x") is None
    assert (kept.has("a"), kept.num_bytes) == (False, 0)


def test_the_owner_with_most_bytes_makes_room() -> None:
    kept = Remembered(10 * ENTRY, 60, lambda: 0.0)
    kept.put("quiet", b"0", IDS)
    for number in range(100):
        kept.put("loud", b"%d" % number, IDS)
    assert kept.num_bytes == 10 * ENTRY
    assert kept.find("quiet", b"0") == IDS
    assert kept.find("loud", b"90") is None
    assert kept.find("loud", b"91") == IDS


def test_an_entry_larger_than_all_room_is_not_kept() -> None:
    kept = Remembered(ENTRY, 60, lambda: 0.0)
    kept.put("a", b"x", IDS)
    kept.put("a", b"y", IDS + b"\0")
    assert (kept.find("a", b"x"), kept.find("a", b"y")) == (IDS, None)


def test_a_sweep_drops_what_is_too_old() -> None:
    now = 0.0
    kept = Remembered(10 * ENTRY, 60, lambda: now)
    kept.put("a", b"x", IDS, length=7)
    now = 30.0
    kept.put("b", b"y", IDS, length=8)
    now = 60.0
    kept.sweep()
    assert (kept.has("a"), kept.lengths("a")) == (False, [])
    assert (kept.has("b"), kept.lengths("b"), kept.num_bytes) == (True, [8], ENTRY)


def test_lengths_are_bounded() -> None:
    kept = Remembered(1000 * ENTRY, 60, lambda: 0.0)
    for number in range(2 * MOST_LENGTHS):
        kept.put("a", b"%d" % number, IDS, length=number)
    assert kept.lengths("a") == list(range(MOST_LENGTHS, 2 * MOST_LENGTHS))


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.binary(max_size=1), st.integers(0, 900)), max_size=60
    )
)
def test_bytes_are_counted_as_they_are(puts: list[tuple[str, bytes, int]]) -> None:
    now = 0.0
    kept = Remembered(2000, 9, lambda: now)
    for owner, name, size in puts:
        now += 1
        kept.put(owner, name, b"\0" * size)
        assert kept.num_bytes <= 2000
    now += 10
    kept.sweep()
    assert kept.num_bytes == 0
    assert not any(map(kept.has, "abc"))
