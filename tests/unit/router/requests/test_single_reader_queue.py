"""Items for one reader."""

from __future__ import annotations

import asyncio

from router.requests.single_reader_queue import Mailbox


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
