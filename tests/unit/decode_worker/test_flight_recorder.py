"""The events that a decode worker's flight recorder keeps about a request."""

from __future__ import annotations

import msgspec
import pytest

from protocol.messages import (
    AttemptFailed,
    FlightPage,
    FlightRequest,
)
from tests.unit.decode_worker.exchanges import LOCAL, REMOTE, deliver_blocks, first_token, say, turn
from tests.unit.worker_harness import DecodeBench


def recorded(d: DecodeBench) -> list[tuple[str, int, int]]:
    """Kind, number and tokens of each event in the answer to a router that asks for them."""
    (page,) = say(d, FlightRequest(nonce=7, request_id="r"))
    assert isinstance(page, FlightPage)
    assert (page.nonce, page.after) == (7, 0)
    assert {each.request_id for each in page.events} <= {"r", ""}
    return [(each.kind.value, each.number, each.tokens) for each in page.events]


def test_it_records_how_a_request_came_from_a_peer_and_ended(
    d: DecodeBench,
) -> None:
    say(d, REMOTE)
    deliver_blocks(d)
    d.peers.inbox.append(("p-i", first_token()))
    turn(d, 6)
    events = recorded(d)
    assert [each for each in events if each[0] != "step"] == [
        ("received", 0, 10),
        ("admitted", 3, 0),
        ("first_token", 0, 0),
        ("arrived", 3, 0),
        ("finished", 0, 4),
    ]
    assert [each for each in events if each[0] == "step"] == [("step", 1, 0)] * 3


def test_it_records_how_a_local_prompt_was_computed_and_failed(
    d: DecodeBench, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    say(d, msgspec.structs.replace(LOCAL, trace_id="a" * 32), turns=2)
    d.clock.now += 60.0
    turn(d)
    events = recorded(d)
    assert ("chunk", 0, 8) in events
    assert events[-1][0] == "failed"
    (line,) = [each for each in caplog.records if "failed" in each.message]
    assert line.message == "attempt 1 of request r failed: its deadline passed"
    assert (line.request_id, line.trace_id) == ("r", "a" * 32)  # type: ignore[attr-defined]


def test_a_malformed_trace_id_is_refused(d: DecodeBench) -> None:
    (failed,) = say(d, msgspec.structs.replace(LOCAL, trace_id="not a trace\n"))
    assert isinstance(failed, AttemptFailed)
    assert failed.reason == "a trace id has 32 hexadecimal digits"
