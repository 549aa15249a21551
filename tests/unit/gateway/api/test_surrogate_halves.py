"""Halves of surrogate pairs in long bodies, which are searched slice by slice."""

import pytest

from gateway.api.surrogate_halves import SLICE_BYTES, without_half_pairs

PAIR, HALF, REPLACED = rb"\ud83d\ude00", rb"\ud83d", rb"\ufffd"


@pytest.mark.parametrize("before", [SLICE_BYTES + shift for shift in range(-13, 2)])
def test_a_border_of_slices_cuts_nothing(before: int) -> None:
    padding = b"x" * before
    assert without_half_pairs(padding + PAIR + b"x" + HALF) == padding + PAIR + b"x" + REPLACED


def test_halves_in_every_slice_are_found() -> None:
    part = HALF + b"x" * (SLICE_BYTES - 5)
    assert without_half_pairs(part * 5) == part.replace(HALF, REPLACED) * 5
