"""Sessions that have had much work wait behind others."""

from __future__ import annotations

from scheduling.scheduler import Scheduler
from scheduling.session_service import FIRST_STEP_TOKENS, MOST_SESSIONS, SessionService
from tests.unit.scheduling.scheduler_harness import make_scheduler, make_sequence, run_step


def test_each_step_takes_twice_as_much_work_as_the_one_before() -> None:
    service = SessionService()
    steps = []
    for _ in range(20):
        steps.append(service.steps_behind(("key", "agent")))
        service.charge(("key", "agent"), FIRST_STEP_TOKENS)
    assert steps == [0, 1, 2, 2, 3, 3, 3, 3, *[4] * 12]
    assert service.steps_behind(("key", "other")) == service.steps_behind(("key", "")) == 0


def test_requests_without_a_session_are_not_counted() -> None:
    service = SessionService()
    service.admit(("key", ""))
    service.charge(("key", ""), 10**9)
    assert service.steps_behind(("key", "")) == len(service) == 0


def test_sessions_that_were_longest_without_a_request_are_forgotten() -> None:
    service = SessionService()
    for number in range(MOST_SESSIONS):
        service.admit(("", str(number)))
    service.charge(("", "0"), FIRST_STEP_TOKENS)
    service.charge(("", "1"), FIRST_STEP_TOKENS)
    service.admit(("", "0"))
    service.admit(("", "new"))
    assert len(service) == MOST_SESSIONS
    assert (service.steps_behind(("", "0")), service.steps_behind(("", "1"))) == (1, 0)


def order(scheduler: Scheduler, count: int) -> list[str]:
    return [run_step(scheduler, 10.0).chunks[0].sequence.request_id for _ in range(count)]


def test_a_long_session_lets_short_ones_pass_for_some_seconds() -> None:
    scheduler = make_scheduler(max_batch_size=1, aging_s=3.0)
    prompts = [list(range(number * 1000, number * 1000 + 16)) for number in range(9)]

    def add(name: str, number: int, arrival: float) -> None:
        sequence = make_sequence(name, prompts[number], max_tokens=1, arrival=arrival)
        sequence.session = name.partition("/")[0]
        scheduler.add(sequence)

    add("agent/1", 1, 0.0)
    assert order(scheduler, 1) == ["agent/1"]
    scheduler.turns.charge(_charged("agent"), FIRST_STEP_TOKENS)
    add("agent/2", 2, 1.0)
    add("talk/1", 3, 3.5)
    add("talk/2", 4, 4.5)
    assert order(scheduler, 3) == ["talk/1", "agent/2", "talk/2"]


def test_a_session_of_the_same_name_of_another_key_owes_nothing() -> None:
    scheduler = make_scheduler(max_batch_size=1, aging_s=3.0)
    scheduler.turns.charge(_charged("inferred", share="one"), FIRST_STEP_TOKENS)
    scheduler.turns.charge(_charged("inferred", share="other"), 0)
    for name, session, arrival in (("talk", "short", 0.5), ("first", "inferred", 0.0)):
        sequence = make_sequence(name, [1, 2, 3], max_tokens=1, arrival=arrival)
        sequence.share, sequence.session = "other", session
        scheduler.add(sequence)
    assert order(scheduler, 2) == ["first", "talk"]


def _charged(session: str, share: str = ""):
    sequence = make_sequence("elsewhere", [1], max_tokens=1)
    sequence.share, sequence.session = share, session
    return sequence
