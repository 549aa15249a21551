"""Which requests are refused because they would miss their own targets."""

from __future__ import annotations

import random

import pytest

from router.routing.pairs import Pairs
from router.routing.placement import PlacementQuery, Targets
from router.routing.policy import place
from router.routing.prediction import WorkerSpeed
from router.routing.shedding import Asker, Shed, WaitingPrompt, shed
from tests.unit.router.routing.placements import BLOCK, load

SPEED = WorkerSpeed(1000.0, 200.0, 0.0, 10_000, 50.0, 0, 0, 10**6, 1.0, 1.0)
"""A prompt token takes 0.2 ms."""
TARGET = Targets(1000.0)


def asked(
    asker: Asker,
    *waiting: WaitingPrompt,
    queued: int = 0,
    speed: WorkerSpeed = SPEED,
    rows: int = 0,
) -> Shed | None:
    """A prompt of 1,000 tokens (200 ms), behind `queued` tokens on one prefill worker."""
    decode = [load("d1", speed=speed, num_requests=rows)]
    prefill = [load("p1", speed=speed, queued_tokens=queued, num_requests=1)]
    query = PlacementQuery(1000, 1100, BLOCK)
    loads = [each.load for each in (*decode, *prefill)]
    placement = place(query, loads[:1], loads[1:], {}, random.Random(0), Pairs())
    assert placement.prefill is not None
    return shed(asker, placement, loads, waiting)


def prompt(tokens: int, share: str = "", priority: int = 0) -> WaitingPrompt:
    return WaitingPrompt("p1", tokens, share, priority)


@pytest.mark.parametrize(
    ("targets", "queued", "is_refused"),
    [
        (TARGET, 0, False),
        (TARGET, 2900, False),
        (TARGET, 3100, True),
        (Targets(), 10**6, False),
        (Targets(150.0), 0, False),
        (Targets(150.0), 50, False),
        (Targets(150.0), 200, True),
    ],
    ids=["idle", "in time", "late", "no target", "hopeless", "hopeless, behind a little",
         "hopeless, behind more"],
)  # fmt: skip
def test_a_wait_that_leaves_too_little_of_the_target(targets, queued, is_refused) -> None:
    """A request that would be late on an idle fleet, too, is served while the fleet is idle."""
    found = asked(Asker(targets), prompt(queued), queued=queued)
    assert (found is not None) is is_refused


def test_a_refusal_tells_when_to_come_back() -> None:
    found = asked(Asker(TARGET), prompt(10_000), queued=10_000)
    assert found is not None
    assert found.is_first_token
    assert found.predicted_ms == pytest.approx(2200, rel=0.01)
    assert found.late_ms == pytest.approx(1400, rel=0.01), "with a fifth of the target to spare"


def test_a_wait_grows_by_urgent_requests_that_are_still_to_come() -> None:
    queued = 2500
    assert asked(Asker(TARGET, left=0.9), prompt(queued), queued=queued) is None
    found = asked(Asker(TARGET, left=0.5), prompt(queued), queued=queued)
    assert found is not None
    assert found.predicted_ms == pytest.approx(1400, rel=0.01)
    assert asked(Asker(TARGET, left=0.5)) is None, "nothing waits"


def test_predictions_need_a_wider_margin_where_other_routers_send_more() -> None:
    """A router does not see what the others have just sent."""
    queued = 2600
    assert asked(Asker(TARGET), prompt(queued), queued=queued) is None
    assert asked(Asker(TARGET, others_share=0.75), prompt(queued), queued=queued) is not None
    assert asked(Asker(TARGET, others_share=0.75), prompt(2000), queued=2000) is None


def test_the_least_urgent_are_refused_first() -> None:
    kinds = [prompt(2000, priority=priority) for priority in (1, 0, -1)]
    refused = [
        priority
        for priority in (1, 0, -1)
        if asked(Asker(TARGET, priority=priority), *kinds, queued=6000)
    ]
    assert refused == [0, -1][-len(refused) :]
    assert refused, "the queue takes 1.2 s"
    assert 1 not in refused
    margins = [Asker(TARGET, "", priority).spared for priority in (5, 1, 0, -1, -9)]
    assert margins == pytest.approx([0.95, 0.85, 0.8, 0.75, 0.5])


def test_a_share_that_floods_the_fleet_refuses_its_own() -> None:
    flood = prompt(20_000, "flood")
    assert asked(Asker(TARGET, "flood"), flood, queued=20_000) is not None
    assert asked(Asker(TARGET, "other"), flood, queued=20_000) is None
    assert asked(Asker(TARGET, "other"), flood, prompt(5000, "other"), queued=25_000) is not None


def test_background_work_waits_for_more_of_other_shares() -> None:
    """A token of priority -2 costs its share four times as much, so four times as much of another
    share comes first, unless that is background work, too."""
    background = Asker(TARGET, "ours", -2)
    assert asked(Asker(TARGET, "ours"), prompt(4000, "theirs"), queued=4000) is None
    found = asked(background, prompt(4000, "theirs"), queued=4000)
    assert found is not None
    assert found.predicted_ms == pytest.approx(1000, rel=0.01)
    assert asked(background, prompt(4000, "theirs", -2), queued=4000) is None


def test_what_other_routers_sent_counts_as_alike() -> None:
    """This router knows of a quarter of what waits."""
    assert asked(Asker(TARGET, priority=1), prompt(1000), queued=4000) is None
    assert asked(Asker(TARGET, priority=1), prompt(1000, priority=1), queued=8000) is not None


def test_tokens_that_would_come_too_slowly() -> None:
    """A row takes 0.2 ms more, a step alone 1.2 ms."""
    quick = Asker(Targets(tpot_ms=10.0))
    assert asked(quick, rows=20) is None
    found = asked(quick, rows=60)
    assert found is not None
    assert not found.is_first_token
    assert found.predicted_ms > 10
    assert found.late_ms > 0
    assert asked(Asker(Targets(tpot_ms=1.0)), rows=60) is None, "no load is to blame"


def test_a_model_that_has_not_proved_itself_refuses_nothing() -> None:
    doubtful = WorkerSpeed(1000.0, 200.0, 0.0, 10_000, 50.0, 0, 0, 10**6, 1.0, 0.05)
    assert asked(Asker(TARGET), prompt(10_000), queued=10_000, speed=doubtful) is None


def test_prompts_that_wait_on_a_decode_worker_refuse_nobody() -> None:
    """They slow the tokens of what is handed over to it, but are over soon."""
    decode = load("d1", speed=SPEED, queued_tokens=400, num_requests=1)
    prefill = load("p1", speed=SPEED)
    query = PlacementQuery(1000, 1006, BLOCK, output_tokens=6)
    placement = place(query, [decode.load], [prefill.load], {}, random.Random(0), Pairs())
    assert placement.prefill is not None
    assert placement.decode.tpot_ms > 10
    asker = Asker(Targets(tpot_ms=10.0))
    assert shed(asker, placement, [decode.load, prefill.load], ()) is None
