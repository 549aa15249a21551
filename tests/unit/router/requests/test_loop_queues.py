"""Items for one reader, and tasks with long work."""

from __future__ import annotations

import asyncio

from router.requests.loop_queues import Mailbox, Turnstile


async def test_items_come_in_order_whether_the_reader_waits_or_not() -> None:
    box: Mailbox[int] = Mailbox()
    box.put(1)
    box.put(2)
    assert len(box) == 2
    assert [await box.get(), await box.get()] == [1, 2]
    reading = asyncio.create_task(box.get())
    await asyncio.sleep(0)
    box.put(3)
    box.put(4)
    assert await reading == 3
    assert await box.get() == 4
    assert not box


async def test_a_reader_that_gives_up_takes_nothing() -> None:
    box: Mailbox[int] = Mailbox()
    reading = asyncio.create_task(box.get())
    await asyncio.sleep(0)
    reading.cancel()
    box.put(1)
    await asyncio.wait([reading])
    assert await box.get() == 1


async def test_tasks_that_wake_up_together_pass_one_by_one_in_order() -> None:
    turnstile, woken = Turnstile(), asyncio.Event()
    passed: list[int] = []

    async def work(number: int) -> None:
        await woken.wait()
        await turnstile.passed()
        passed.append(number)

    tasks = [asyncio.create_task(work(number)) for number in range(5)]
    await asyncio.sleep(0)
    woken.set()
    seen = []
    while len(passed) < 5:
        await asyncio.sleep(0)
        seen.append(len(passed))
    assert passed == [0, 1, 2, 3, 4]
    assert set(seen) >= {1, 2, 3, 4}, "others have their turn after each"
    await asyncio.gather(*tasks)


async def test_a_task_that_gives_up_keeps_nobody_waiting() -> None:
    turnstile = Turnstile()
    await turnstile.passed()
    tasks = [asyncio.create_task(turnstile.passed()) for _ in range(3)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    async with asyncio.timeout(60):
        await asyncio.wait(tasks)
        await turnstile.passed()
    assert [each.cancelled() for each in tasks] == [False, True, False]
