"""The events of one response in the background, the memory that they take, and the place of the
response behind the gate."""

from __future__ import annotations

import time
from contextlib import aclosing

import pytest

from gateway.admission.gate import Gate
from gateway.api.openai_responses.event_log import EventLog
from gateway.http.byte_budget import ByteBudget
from gateway.http.request_scope import RequestRecord
from http_kit.tenant import EVERYBODY


@pytest.mark.parametrize("is_followed", [False, True])
async def test_memory_counts_until_nobody_reads_and_a_place_until_the_run_ends(is_followed):
    budget, gate = ByteBudget(None), Gate(1, time.monotonic)
    record = RequestRecord(0.0, "/v1/responses", {}, budget, ticket=gate.passing(EVERYBODY))
    record.ticket.enter()
    log = EventLog(record)
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
        assert gate.in_flight == 0, "the run has left"
    assert budget.in_flight == 0
