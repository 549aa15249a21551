"""Stop strings in text that comes in pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.text.stop_strings import StopMatcher


def run(pieces: list[str], stops: list[str], include: bool = False) -> tuple[str, str | None]:
    """The whole output, and the stop that ended it."""
    matcher = StopMatcher(stops, include)
    out = ""
    for piece in pieces:
        out += matcher.push(piece)
        if matcher.matched:
            return out, matcher.matched
    return out + matcher.flush(), None


def expected(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Character by character, without any holding back."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


@pytest.mark.parametrize(
    ("pieces", "stops", "out", "matched"),
    [
        (["Hello world"], [], "Hello world", None),
        (["Hello world"], ["wor"], "Hello ", "wor"),
        (["Hel", "lo w", "orl", "d"], ["wor"], "Hello ", "wor"),
        (["a", "b", "a", "b", "c"], ["abc"], "ab", "abc"),
        (["aab"], ["ab", "aab"], "", "aab"),
        (["abc"], ["abc", "b"], "a", "b"),
        (["\n", "\n", "x"], ["\n\n"], "", "\n\n"),
        (["almost sto"], ["stop"], "almost sto", None),
        (["x a", "a", "b"], ["aab"], "x ", "aab"),
        (["aaa", "b"], ["aab"], "a", "aab"),
        (["xaa", "bc"], ["abc"], "xa", "abc"),
        (["你", "好"], ["好"], "你", "好"),
    ],
)
def test_text_ends_before_the_first_complete_match(pieces, stops, out, matched):
    assert run(pieces, stops) == (out, matched)


def test_text_that_may_begin_a_stop_is_held_back_until_it_cannot():
    matcher = StopMatcher(["END"])
    assert matcher.push("the E") == "the "
    assert matcher.push("N") == ""
    assert matcher.push("d") == "ENd"
    assert matcher.push(" E") == " "
    assert matcher.flush() == "E"
    assert matcher.matched is None


def test_the_stop_itself_belongs_to_the_text_if_asked_for():
    assert run(["one tw", "o three"], ["two"], include=True) == ("one two", "two")


@given(
    pieces=st.lists(st.text("abc", max_size=4), max_size=12),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=4),
    include=st.booleans(),
)
def test_where_pieces_are_cut_does_not_matter(pieces, stops, include):
    assert run(pieces, stops, include) == expected("".join(pieces), stops, include)
