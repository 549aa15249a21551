"""Routers take turns to place, if prompts are so long that a turn does not count."""

from __future__ import annotations

import pytest

from router.routing.fleet_view import FleetView
from router.routing.sent_requests import SentRequest, SentRequests
from router.routing.stagger import HALF_LIFE, MOST_SHARE, TURN_S, Stagger
from router.routing.worker_view import WorkerView
from tests.unit.router.routing.test_decision import stats, view_of, worker

TOKEN_US = 50.0


def told(*tokens: int) -> list[SentRequests]:
    """A message about prompts of these lengths on one worker, and about a decode worker."""
    prompts = [SentRequest(number + 1, each, 1) for number, each in enumerate(tokens)]
    return [
        SentRequests("p1", "other", 1, len(tokens), prompts),
        SentRequests("d1", "other", 1, 1, [SentRequest(1, 0, 1)]),
    ]


def prompt_of(turns: int) -> int:
    """The least tokens of a prompt that is worth so many turns of waiting."""
    return -int(-turns * TURN_S / MOST_SHARE // (TOKEN_US * 1e-6))


def wait_s(rank: int, *tokens: int) -> float:
    stagger = Stagger()
    stagger.rank = rank
    stagger.note_told(told(*tokens))
    return stagger.wait_s(TOKEN_US)


def test_each_router_waits_for_those_before_it() -> None:
    waits = [wait_s(rank, prompt_of(3)) for rank in range(4)]
    assert waits == pytest.approx([0.0, TURN_S, 2 * TURN_S, 3 * TURN_S])


def test_routers_share_turns_if_more_are_not_worth_it() -> None:
    waits = [wait_s(rank, prompt_of(1)) for rank in range(4)]
    assert waits == pytest.approx([0.0, TURN_S, 0.0, TURN_S])


def test_nobody_waits_for_short_prompts() -> None:
    assert wait_s(1, prompt_of(1) - 10) == 0.0


def test_the_average_follows_the_traffic() -> None:
    stagger = Stagger()
    stagger.rank = 1
    stagger.note_told(told(*[prompt_of(1)] * HALF_LIFE))
    stagger.note_told(told(*[0] * HALF_LIFE))
    assert stagger.wait_s(TOKEN_US), "requests without a prompt to compute do not count"
    stagger.note_told(told(*[1] * HALF_LIFE))
    assert not stagger.wait_s(TOKEN_US)


@pytest.fixture
def view() -> FleetView:
    p1: WorkerView = worker("p1")
    view = view_of(worker("d1"), p1)
    view.take_stats(p1, stats("p1", step_fixed_us=1.0, step_per_token_us=TOKEN_US))
    return view


def test_a_router_that_hears_nothing_of_others_places_at_once(view: FleetView) -> None:
    view.stagger.rank = 1
    assert view.wait_s == 0.0


def test_the_fleets_speed_decides_what_is_long(view: FleetView) -> None:
    view.stagger.rank = 1
    view.reserve_for_others(told(prompt_of(2)))
    assert view.wait_s == TURN_S
    view.stagger.rank = 0
    assert view.wait_s == 0.0
