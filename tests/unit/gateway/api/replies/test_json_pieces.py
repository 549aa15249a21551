"""Documents in pieces are the documents that an encoder would write."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.api.replies.json_pieces import (
    SLICE_VALUES,
    Holes,
    list_of,
    list_pieces,
    slices,
    take_some,
    with_last_changed,
)
from tests.effort import times

JSON = st.recursive(
    st.none() | st.integers(-100, 100) | st.text(), lambda inner: st.lists(inner), max_leaves=8
)


class Document(msgspec.Struct):
    first: Any
    text: str
    second: Any = msgspec.UNSET


@settings(max_examples=times(20, 200))
@given(st.lists(st.lists(JSON)))
def test_a_list_from_parts_is_the_list_of_all_items(parts: list[list[Any]]) -> None:
    written = b"".join(list_pieces(parts))
    assert msgspec.json.decode(written) == [item for part in parts for item in part]


@given(st.lists(st.lists(JSON)), st.text(), st.lists(JSON))
def test_holes_are_filled_in_their_places(
    parts: list[list[Any]], text: str, documents: list[Any]
) -> None:
    """Whatever text stands beside them, and in whatever order they were made."""
    holes = Holes()
    inner = list_of(iter([msgspec.json.encode(each)]) for each in documents)
    second = holes.put(inner)
    document = Document(holes.put(list_pieces(parts)), text, second)
    written = b"".join(holes.pieces(document))
    assert msgspec.json.decode(written) == {
        "first": [item for part in parts for item in part],
        "text": text,
        "second": documents,
    }


@pytest.mark.parametrize("values_each", [0, 1, 21, 5000])
def test_slices_hold_a_bounded_number_of_values(values_each: int) -> None:
    items = list(range(3000))
    parts = list(slices(items, values_each))
    assert [item for part in parts for item in part] == items
    assert all(len(part) * values_each <= max(SLICE_VALUES, values_each) for part in parts)


def test_nothing_is_made_before_it_is_needed() -> None:
    made: list[int] = []

    def parts() -> Iterator[list[int]]:
        for number in range(100):
            made.append(number)
            yield [number]

    holes = Holes()
    pieces = holes.pieces(Document(holes.put(list_pieces(parts())), "x"))
    assert made == []
    taken = take_some(pieces, 20)
    assert 20 <= len(taken) < 30
    assert len(made) < 10
    rest = take_some(pieces, 10**6)
    assert msgspec.json.decode(taken + rest)["first"] == list(range(100))
    assert take_some(pieces, 10) == b""


@given(st.lists(st.binary(min_size=1)))
def test_only_the_last_piece_is_changed(pieces: list[bytes]) -> None:
    changed = list(with_last_changed(pieces, lambda last: last + b"!"))
    assert changed == [*pieces[:-1], *(piece + b"!" for piece in pieces[-1:])]
