"""Whose job gets the next place, who is refused, and what becomes of jobs that nobody wants."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from http_kit.caller import CURRENT_ORIGIN, Origin
from http_kit.disconnect import ClientGone
from http_kit.turnstile import MOST_WAIT_S, Standing, Turn, Turnstile
from protocol.errors import TooManyRequests


class Connection:
    """A client's connection, as far as a turnstile knows it."""

    def __init__(self) -> None:
        self.is_lost = False
        self.on_lost: Callable[[], object] | None = None

    def watch(self, on_lost: Callable[[], object]) -> None:
        self.on_lost = on_lost

    def unwatch(self, on_lost: Callable[[], object]) -> None:
        assert self.on_lost == on_lost
        self.on_lost = None

    def leave(self) -> None:
        self.is_lost = True
        if self.on_lost is not None:
            self.on_lost()


@contextmanager
def caller(share: str, connection: Any = None) -> Iterator[None]:
    token = CURRENT_ORIGIN.set(Origin(0, share=share, connection=connection))
    yield
    CURRENT_ORIGIN.reset(token)


class Jobs:
    """Jobs behind a turnstile of one place, whose time is set by hand."""

    def __init__(self, places: int = 1) -> None:
        self.now = 0.0
        self.turnstile = Turnstile(places, lambda: self.now)
        self.begun: list[str] = []
        self.running: list[Turn] = []
        self.tasks: list[asyncio.Task[None]] = []

    def ask(
        self, share: str, seconds: float, standing: Standing = Standing.NEW, connection: Any = None
    ) -> asyncio.Task[None]:
        async def enter() -> None:
            turn = await self.turnstile.enter(seconds, standing)
            self.begun.append(share)
            self.running.append(turn)

        with caller(share, connection):
            self.tasks.append(asyncio.ensure_future(enter()))
        return self.tasks[-1]

    async def end(self, seconds: float) -> None:
        """The oldest job ends after so many seconds."""
        self.now += seconds
        self.turnstile.leave(self.running.pop(0))
        await settle()

    async def end_all(self) -> None:
        while self.running:
            await self.end(0.0)
        assert self.turnstile.num_waiting == 0
        await asyncio.gather(*self.tasks, return_exceptions=True)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_flood_delays_another_caller_by_one_job() -> None:
    jobs = Jobs()
    for _ in range(50):
        jobs.ask("flood", 1.0)
    await settle()
    await jobs.end(1.0)
    jobs.ask("other", 1.0)
    await settle()
    await jobs.end(1.0)
    assert jobs.begun == ["flood", "flood", "other"]
    await jobs.end_all()


async def test_callers_get_equal_time_whatever_the_length_of_their_jobs() -> None:
    jobs = Jobs()
    for _ in range(30):
        jobs.ask("long", 1.0)
        jobs.ask("short", 0.1)
    await settle()
    for _ in range(22):
        await jobs.end(1.0 if jobs.running[0].share == "long" else 0.1)
    assert 18 <= jobs.begun.count("short") <= 20
    await jobs.end_all()


async def test_a_caller_pays_for_the_time_that_its_jobs_really_take() -> None:
    """A short text may take long, such as a grammar or a pattern that gives up late."""
    jobs = Jobs()
    for _ in range(30):
        jobs.ask("sly", 0.01)
        jobs.ask("honest", 0.1)
    await settle()
    for _ in range(22):
        await jobs.end(1.0 if jobs.running[0].share == "sly" else 0.1)
    assert jobs.begun.count("sly") <= 4
    await jobs.end_all()


async def test_a_caller_that_was_idle_has_saved_no_turns() -> None:
    jobs = Jobs()
    for _ in range(20):
        jobs.ask("busy", 1.0)
    await settle()
    for _ in range(10):
        await jobs.end(1.0)
    for _ in range(10):
        jobs.ask("late", 1.0)
    await settle()
    jobs.begun.clear()
    for _ in range(8):
        await jobs.end(1.0)
    assert jobs.begun.count("busy") in (3, 4, 5)
    await jobs.end_all()


async def test_too_much_work_of_one_caller_is_refused_and_of_no_other() -> None:
    jobs = Jobs()
    for _ in range(4):
        jobs.ask("flood", MOST_WAIT_S / 2)
    await settle()
    assert jobs.tasks[3].done(), "one runs, two wait"
    with pytest.raises(TooManyRequests, match="take about 60 s") as caught:
        await jobs.tasks[3]
    assert caught.value.retry_after_s == 59, "some clients ignore a minute and more"
    begun = jobs.ask("flood", MOST_WAIT_S, Standing.BEGUN)
    answer = jobs.ask("flood", MOST_WAIT_S, Standing.ANSWERING)
    other = jobs.ask("other", 2 * MOST_WAIT_S)
    own = jobs.ask("", 2 * MOST_WAIT_S), jobs.ask("", 2 * MOST_WAIT_S)
    await settle()
    assert not any(each.done() for each in (begun, answer, other, *own))
    await jobs.end_all()


async def test_an_answer_that_has_begun_comes_before_its_callers_new_texts() -> None:
    jobs = Jobs()
    turns = [jobs.ask("a", 1.0) for _ in range(3)]
    answer = jobs.ask("a", 1.0, Standing.ANSWERING)
    await settle()
    await jobs.end(1.0)
    assert [each.done() for each in (*turns, answer)] == [True, False, False, True]
    await jobs.end_all()


async def test_a_client_that_leaves_takes_its_waiting_job_with_it() -> None:
    jobs, connection = Jobs(), Connection()
    jobs.ask("a", 1.0)
    await settle()
    waiting = jobs.ask("b", 1.0, connection=connection)
    await settle()
    assert jobs.turnstile.num_waiting == 1
    connection.leave()
    await settle()
    assert jobs.turnstile.num_waiting == 0
    assert connection.on_lost is None
    with pytest.raises(ClientGone):
        await waiting
    with pytest.raises(ClientGone):
        await jobs.ask("b", 1.0, connection=connection)
    await jobs.end_all()


@pytest.mark.parametrize("leaves", [True, False])
async def test_a_place_given_to_a_job_that_has_just_gone_is_not_lost(leaves: bool) -> None:
    jobs, connection = Jobs(), Connection()
    jobs.ask("a", 1.0)
    await settle()
    waiting = jobs.ask("b", 1.0, connection=connection)
    await settle()
    if leaves:
        connection.leave()
    jobs.turnstile.leave(jobs.running.pop(0))
    if not leaves:
        waiting.cancel()
    jobs.ask("c", 1.0)
    await settle()
    assert jobs.begun == ["a", "c"]
    await jobs.end_all()
