"""A session's requests go where the last one ran, if that costs no more."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from protocol.messages import FinishReason, Generate
from router.routing.decision import apply, decide
from router.routing.sessions import Sessions
from tests.unit.router.router_harness import (
    WHOLE,
    Consumer,
    Harness,
    failed,
    finish_on,
    first_with,
    request,
    until,
)
from tests.unit.router.routing.test_decision import BLOCK, query, view_of, worker


def test_a_session_keeps_its_last_workers() -> None:
    sessions = Sessions()
    assert sessions.workers("a") == frozenset()
    sessions.note("a", "d1", "p1")
    assert sessions.workers("a") == {"d1", "p1"}
    sessions.note("a", "d2", None)
    assert sessions.workers("a") == {"d2", "p1"}
    assert sessions.workers("b") == frozenset()


def test_a_request_without_a_session_leaves_nothing() -> None:
    sessions = Sessions()
    sessions.note("", "d1", "p1")
    assert sessions.workers("") == frozenset()


def test_the_sessions_longest_without_a_request_are_forgotten() -> None:
    sessions = Sessions(most=2)
    for name in ("a", "b", "a", "c"):
        sessions.note(name, "d1", None)
    assert [bool(sessions.workers(name)) for name in "abc"] == [True, False, True]


def blocks(*ids: int) -> list[bytes]:
    return [each.to_bytes(16, "big") for each in ids]


def asked(sessions: Sessions, *ids: int) -> str:
    """The session of a prompt without a name, which is placed."""
    session = sessions.inferred(blocks(*ids))
    sessions.note(session, "d1", None)
    sessions.note_prompt(session, blocks(*ids))
    return session


def test_a_prompt_that_continues_the_last_one_is_of_the_same_session() -> None:
    sessions = Sessions()
    first = asked(sessions, 1, 2, 3)
    assert first
    assert asked(sessions, 1, 2, 3, 4, 5) == first
    assert asked(sessions, 1, 2, 3, 4, 5, 6) == first
    assert sessions.workers(first) == {"d1"}
    assert asked(sessions, 7, 8) not in ("", first)


def test_what_many_prompts_begin_with_makes_no_session() -> None:
    """A common beginning, then talks of their own."""
    sessions = Sessions()
    asked(sessions, 1, 2)
    talks = [asked(sessions, 1, 2, number) for number in range(10, 15)]
    assert len(set(talks[1:])) == 4
    for number, talk in zip(range(11, 15), talks[1:], strict=True):
        assert asked(sessions, 1, 2, number, number + 100) == talk


def test_the_same_prompt_again_may_be_anybodys() -> None:
    sessions = Sessions()
    first = asked(sessions, 1, 2)
    assert asked(sessions, 1, 2) == ""
    assert asked(sessions) == ""
    assert asked(sessions, 1, 2, 3) == first


def test_a_branch_of_a_talk_is_a_session_of_its_own() -> None:
    sessions = Sessions()
    first = asked(sessions, 1, 2)
    assert asked(sessions, 1, 2, 3) == first
    branch = asked(sessions, 1, 2, 9)
    assert branch not in ("", first)
    assert asked(sessions, 1, 2, 9, 10) == branch
    assert asked(sessions, 1, 2, 3, 4) == first


def test_a_block_that_two_sessions_continue_tells_neither() -> None:
    sessions = Sessions()
    first = asked(sessions, 1, 2)
    assert asked(sessions, 1, 2, 3, 4) == first
    branch = asked(sessions, 1, 2, 9)
    assert asked(sessions, 1, 2, 3, 5) not in ("", first, branch)


def test_only_the_last_blocks_are_compared_with_earlier_prompts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("router.routing.sessions.LOOK_BACK", 3)
    sessions = Sessions()
    first = asked(sessions, 1)
    assert asked(sessions, 1, 2, 3, 4) not in ("", first)
    assert asked(sessions, 1, 7, 8) == first


def test_ends_of_prompts_are_forgotten() -> None:
    sessions = Sessions(most=2)
    first = asked(sessions, 1)
    for number in range(2, 8):
        asked(sessions, number)
    assert asked(sessions, 1, 9) != first
    assert len(sessions) == 2


@pytest.mark.parametrize(("by_load", "session"), [(False, ""), (True, ""), (True, "a")])
def test_by_load_only_sessions_that_clients_name_draw_their_prompts(
    by_load: bool, session: str
) -> None:
    view, rng = view_of(worker("d1"), worker("p1"), worker("p2")), random.Random(0)
    served = set()
    for length in range(40, 60):
        hashes = blocks(*range(length))
        tokens = length * BLOCK + 1
        asked = query(tokens, hashes=hashes, by_load=by_load, session=session, uses_cache=False)
        decision = decide(view, asked, 0.0, rng)
        for owner, reservation in apply(view, decision, 0.0):
            owner.release(reservation)
        served.add(decision.placement.prefill.worker_id)
    stays = bool(session) or not by_load
    assert len(served) == (1 if stays else 2)


async def test_a_session_stays_on_its_worker_even_if_caches_do_not_count() -> None:
    harness = Harness(placement="load")
    workers = await harness.join("d1", "d2")
    for session in ("a", "b", "c", "d"):
        served = set()
        for turn in range(3):
            asked = replace(request(request_id=f"{session}-{turn}"), session=session)
            consumer = Consumer(harness.dispatcher, asked)
            before = [each.received.count(Generate) for each in workers]

            def chosen(before: list[int] = before) -> int | None:
                now = [each.received.count(Generate) for each in workers]
                return next((at for at in range(2) if now[at] > before[at]), None)

            await until(lambda chosen=chosen: chosen() is not None)
            at = chosen()
            assert at is not None
            served.add(at)
            await finish_on(workers[at], consumer)
        assert len(served) == 1
    await harness.close()


async def test_an_inferred_session_moves_with_the_next_attempt() -> None:
    harness = Harness()
    workers = {each.info.worker_id: each for each in await harness.join("d1", "d2")}
    consumer = Consumer(harness.dispatcher, request())
    first = await first_with(workers, Generate)
    asked = await first.received.next(Generate)
    first.send(failed(asked, first))
    other = workers["d2" if first is workers["d1"] else "d1"]
    again = await other.received.next(Generate)
    assert again.session == asked.session != ""
    assert harness.fleet.view().sessions.workers(asked.session) == {other.info.worker_id}
    other.tokens(again, 0, WHOLE, finish=FinishReason.STOP)
    assert await consumer.end() == WHOLE
    await harness.close()
