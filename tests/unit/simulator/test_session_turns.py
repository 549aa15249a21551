"""Long sessions of agents do not hold up short talks, whether or not clients name sessions."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from router.routing.decision import Decision, Query, decide
from router.routing.fleet_view import FleetView
from simulator.policies.ablation import without_sessions
from simulator.policies.choices import Policy
from simulator.requests import Request
from simulator.traces.sessions import BlockRuns, Session, Turn
from tests.unit.simulator.fleets import BLOCK, served, single, small_fleet

TALK_TOKENS = 24
START_S = 40.0
"""When each agent has had more than eight thousand tokens."""


def unnamed(view: FleetView, query: Query, now: float, rng: random.Random) -> Decision:
    return decide(view, replace(query, session=""), now, rng)


def agent(number: int, rng: random.Random) -> Session:
    """Turns at once after each other, of which each adds two thousand tokens."""
    turns, said = [], 0
    for _ in range(10):
        said += rng.randint(1500, 2500)
        blocks = BlockRuns(number + 1, BLOCK, ((0, said // BLOCK),))
        turns.append(Turn(0.01, said, 2, blocks))
    return Session(f"agent {number}", 0.1 * number, tuple(turns))


def waits(policy: Policy) -> tuple[list[float], list[float]]:
    """The seconds to first tokens of talks, in order, and of agents, once talks begin."""
    rng = random.Random(1)
    agents = [agent(number, rng) for number in range(3)]
    talks = [single(START_S + 2 * number, TALK_TOKENS, 2) for number in range(18)]
    fleet = small_fleet(0, 1, num_blocks=30_000, policy=policy)
    requests = served(fleet, *agents, *talks).requests
    late = [each for each in requests if each.arrival >= START_S]

    def is_talk(request: Request) -> bool:
        return request.num_prompt == TALK_TOKENS

    seconds = [sorted(e.ttft_s for e in late if is_talk(e) is kind) for kind in (True, False)]
    return seconds[0], seconds[1]


@pytest.mark.parametrize(
    "policy", [pytest.param(decide, marks=pytest.mark.nightly), unnamed], ids=["named", "inferred"]
)
def test_short_talks_wait_less_beside_agents(policy: Policy) -> None:
    talks, agents = waits(policy)
    talks_before, agents_before = waits(without_sessions)
    assert sum(talks) < 0.7 * sum(talks_before)
    assert sum(agents) < 1.1 * sum(agents_before), "agents lose little"
