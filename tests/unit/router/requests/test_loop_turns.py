"""Tasks with long work, one in each turn."""

from __future__ import annotations

import asyncio

from router.requests.loop_turns import Turnstile


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
