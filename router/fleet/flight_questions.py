"""Asks workers for their flight recorders, page by page, over the control connection.

A worker answers between two steps. Times of its events are shifted to the router's clock.
"""

from __future__ import annotations

import asyncio
from itertools import count

import msgspec

from protocol.errors import ServiceError
from protocol.flight import FlightEvent
from protocol.messages import FlightPage, FlightRequest
from router.fleet.worker import Worker

ANSWER_S = 5.0
MAX_PAGES = 64
"""More pages than a whole recorder fills, even while it continues to record."""


class FlightQuestions:
    """The unanswered questions."""

    def __init__(self) -> None:
        self._numbers = count(1)
        self._waiting: dict[tuple[Worker, int], asyncio.Future[FlightPage]] = {}

    async def ask(self, worker: Worker, wanted: FlightRequest) -> list[FlightEvent]:
        """The events that a worker recorded, oldest first; `nonce` and `after` of `wanted` are
        ignored. Raises ServiceError if the worker does not answer."""
        offset_us = worker.link.clock.offset_us
        since_us = wanted.since_us + offset_us if wanted.since_us else 0
        until_us = wanted.until_us + offset_us if wanted.until_us else 0
        found: list[FlightEvent] = []
        after = 0
        for _ in range(MAX_PAGES):
            asked = FlightRequest(
                nonce=next(self._numbers),
                after=after,
                request_id=wanted.request_id,
                since_us=since_us,
                until_us=until_us,
            )
            page = await self._page(worker, asked)
            found += page.events
            after = page.after
            if not after:
                break
        return [_shifted(each, offset_us) for each in found]

    def answer(self, worker: Worker, page: FlightPage) -> None:
        """Take a worker's page. It is dropped if no question to this worker is waiting for it."""
        waiting = self._waiting.pop((worker, page.nonce), None)
        if waiting is not None and not waiting.done():
            waiting.set_result(page)

    async def _page(self, worker: Worker, asked: FlightRequest) -> FlightPage:
        future: asyncio.Future[FlightPage] = asyncio.get_running_loop().create_future()
        question = worker, asked.nonce
        self._waiting[question] = future
        try:
            if not worker.link.send(asked):
                raise ServiceError(f"{worker.worker_id} is not connected")
            async with asyncio.timeout(ANSWER_S):
                return await future
        except TimeoutError:
            name = worker.worker_id
            raise ServiceError(f"{name} did not answer within {ANSWER_S:g} s") from None
        finally:
            self._waiting.pop(question, None)


def _shifted(event: FlightEvent, offset_us: int) -> FlightEvent:
    return msgspec.structs.replace(event, at_us=event.at_us - offset_us) if offset_us else event
