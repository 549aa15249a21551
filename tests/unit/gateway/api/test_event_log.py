"""The events of one response in the background, and the memory that they take."""

from __future__ import annotations

from contextlib import aclosing

import pytest

from gateway.api.openai_responses.event_log import EventLog
from gateway.http.byte_budget import ByteBudget
from gateway.http.request_scope import RequestRecord


@pytest.mark.parametrize("is_followed", [False, True])
async def test_its_memory_counts_until_nobody_uses_it(is_followed):
    budget = ByteBudget(None)
    log = EventLog(RequestRecord(0.0, "/v1/responses", {}, budget))
    log.write(b"data: 1\n\ndata: 2\n\n")
    log.write(b"data: ")
    assert log.whole() == b"data: 1\n\ndata: 2\n\n"
    log.write(b"3\n\n")
    async with aclosing(log.follow(1)) as events:
        if is_followed:
            assert await anext(events) == b"data: 2\n\ndata: 3\n\n"
        log.end()
        log.leave_run()
        assert (budget.in_flight > 0) == is_followed
    assert budget.in_flight == 0
