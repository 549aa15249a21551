"""Why tokens were computed: each computed token has one reason."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.turns.accounts import Computed, TurnResult, account, computed

BLOCK = 16
FIRST = TurnResult("c", 0, list(range(100)), list(range(100, 120)), 0, 50.0)


def second(prompt: list[int], cached: int) -> TurnResult:
    return TurnResult("c", 1, prompt, [7], cached, 25.0)


WHOLE = [*range(120), *range(500, 530)]
RENDERED = [*range(110), *range(300, 310), *range(500, 530)]


@pytest.mark.parametrize(
    ("prompt", "cached", "expected"),
    [
        (WHOLE, 112, Computed(new=30, block=8)),
        (WHOLE, 80, Computed(new=30, block=16, chosen=24)),
        (WHOLE, 0, Computed(new=30, block=16, chosen=104)),
        (RENDERED, 96, Computed(new=30, rendering=10, block=14)),
        (WHOLE, 149, Computed(new=1)),
    ],
    ids=["a block", "the answer", "everything", "rendering", "more than the history"],
)
def test_each_token_has_a_reason(prompt: list[int], cached: int, expected: Computed) -> None:
    assert computed(FIRST, second(prompt, cached), BLOCK) == expected


def test_a_first_turn_is_new() -> None:
    assert computed(None, FIRST, BLOCK) == Computed(new=100)


def test_what_follows_a_cut_is_new() -> None:
    turn = second([*range(40), *range(500, 530)], 32)
    assert computed(FIRST, turn, BLOCK, is_cut=True) == Computed(new=30, block=8)


def test_an_account_adds_all_turns() -> None:
    found = account([FIRST, second(WHOLE, 112)], set(), BLOCK)
    assert found.computed == Computed(new=130, block=8)
    assert found.num_new == 130
    assert found.per_new == pytest.approx(138 / 130)
    assert (found.p50, found.p95) == (25.0, 25.0)
    assert found.ratio_to(account([FIRST, second(WHOLE, 0)], set(), BLOCK)) == 1.0


@given(
    shared=st.integers(0, 120),
    changed=st.integers(0, 20),
    new=st.integers(1, 40),
    cached=st.integers(0, 180),
    is_cut=st.booleans(),
)
def test_the_reasons_add_up(shared: int, changed: int, new: int, cached: int, is_cut: bool) -> None:
    prompt = [*range(shared), *range(1000, 1000 + changed), *range(2000, 2000 + new)]
    turn = second(prompt, min(cached, len(prompt) - 1))
    parts = computed(FIRST, turn, BLOCK, is_cut)
    assert parts.total == len(prompt) - turn.cached_tokens
    assert min(parts.new, parts.block, parts.rendering, parts.chosen) >= 0
