"""A session's requests go where the last one ran, if that costs no more."""

from __future__ import annotations

from msgspec.structs import replace

from protocol.messages import Generate
from router.routing.sessions import Sessions
from tests.unit.router.router_harness import Consumer, Harness, finish_on, request, until


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
