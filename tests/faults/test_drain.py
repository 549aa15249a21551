"""Decode workers that are told to go while long outputs run on them, and what may befall that."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from cli.main import main as baton
from protocol.messages import Role
from tests.effort import some
from tests.faults.faulty_fleet import FaultyFleet, Stream, faulty_fleet
from tests.http_client import HTTP
from tests.integration.fleets import trace_of, wait_for, workers
from tests.integration.reference import BLOCK, Reference
from tests.integration.reference import NUM_TOKENS as NUM_ANSWER

PROMPT = list(range(5, 105))
NUM_TOKENS = 150
EARLY = 20
"""Steps after which a worker is told to go; its outputs would take far more."""


@pytest.fixture(scope="module", params=some(["nixl", "shm"], 1))
def fleet(request: pytest.FixtureRequest) -> Iterator[FaultyFleet]:
    with faulty_fleet(prefill=2, decode=3, transport=request.param) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def expected(fleet: FaultyFleet) -> list[int]:
    """What nobody disturbed."""
    return Stream(fleet.url, PROMPT, NUM_TOKENS).wait().tokens


def begin(fleet: FaultyFleet, num_tokens: int = NUM_TOKENS) -> tuple[Stream, str]:
    """A long output, and the worker on which it is held in mid-stream."""
    fleet.revive()
    fleet.arm(fleet.names(Role.DECODE), "decode", EARLY)
    stream = Stream(fleet.url, PROMPT, num_tokens)
    return stream, fleet.held("decode")


def move(fleet: FaultyFleet, name: str, stream: Stream) -> int:
    """Let a held worker that was told to go run step after step until its router has moved the
    stream: so many at most."""

    def has_moved() -> bool:
        answer = HTTP.get(f"{fleet.url}/requests/{stream.request_id}/trace")
        return modes(answer.raise_for_status().json())[1:] == ["handover"]

    stream.wait_tokens(1)
    return fleet.step_until(name, EARLY + 1, NUM_TOKENS - 2, has_moved)


def ended_well(fleet: FaultyFleet, name: str) -> bool:
    child = fleet.fleet.processes[name]
    return child.wait(60) and child.exit_status() == 0


def modes(trace: dict[str, Any]) -> list[str]:
    return [each["mode"] for each in trace["attempts"]]


@pytest.mark.parametrize("how", some(["baton drain", "SIGTERM"], 1))
def test_what_runs_moves_with_its_blocks(fleet: FaultyFleet, expected: list[int], how: str) -> None:
    """A drain request is seen with the next renewal of the lease, a signal at once."""
    stream, drained = begin(fleet)
    with ThreadPoolExecutor(1) as pool:
        if how == "SIGTERM":
            fleet.signal(drained, signal.SIGTERM)
        else:
            asked = pool.submit(baton, ["drain", drained, f"--redis-url={fleet.fleet.redis_url}"])
        most_steps = move(fleet, drained, stream)
        assert ended_well(fleet, drained)
        assert how == "SIGTERM" or asked.result(60) == 0
    stream.wait()
    assert (stream.error, stream.tokens) == (None, expected)
    trace = trace_of(fleet.fleet, stream.request_id)
    assert modes(trace) == ["remote", "handover"]
    first, second = trace["attempts"]
    steps = first["decode"]["num_decode_steps"]
    assert EARLY <= steps <= most_steps, "it went on after it had handed over"
    computed = len(PROMPT) + steps
    assert second["prefill"]["worker_id"] == drained
    assert second["prefill"]["cached_tokens"] == computed
    others = second["decode"]["cached_tokens"] // BLOCK
    assert second["prefill"]["blocks_moved"] == -(-computed // BLOCK) - others
    assert second["decode"]["chunks"] == [], "nothing was computed again"
    wait_for("it to leave", lambda: drained not in workers(fleet.fleet))


def test_what_has_not_begun_to_decode_is_placed_again(
    fleet: FaultyFleet, expected: list[int]
) -> None:
    fleet.revive()
    fleet.arm(fleet.names(Role.PREFILL), "chunk", 1)
    fresh = [7, *PROMPT]
    stream = Stream(fleet.url, fresh, EARLY)
    computing = fleet.held("chunk")
    shown = wait_for("a worker to wait for blocks", lambda: _busy(fleet))
    fleet.signal(shown, signal.SIGTERM)
    wait_for("another to wait for them", lambda: _busy(fleet, but=shown))
    fleet.release(computing, "chunk")
    assert ended_well(fleet, shown)
    stream.wait()
    again = Stream(fleet.url, fresh, EARLY).wait()
    assert (stream.error, stream.tokens) == (None, again.tokens)
    assert "handover" not in modes(trace_of(fleet.fleet, stream.request_id))


def test_the_drained_worker_is_killed_before_its_blocks_have_moved(
    fleet: FaultyFleet, expected: list[int]
) -> None:
    stream, drained = begin(fleet)
    fleet.arm([drained], "post")
    fleet.signal(drained, signal.SIGTERM)
    move(fleet, drained, stream)
    assert fleet.held("post") == drained
    fleet.kill(drained)
    stream.wait()
    assert (stream.error, stream.tokens) == (None, expected)
    assert modes(trace_of(fleet.fleet, stream.request_id))[1] == "handover"


def test_the_worker_that_takes_over_is_killed_before_it_has_the_blocks(
    fleet: FaultyFleet, expected: list[int]
) -> None:
    stream, drained = begin(fleet)
    fleet.arm([drained], "post")
    fleet.signal(drained, signal.SIGTERM)
    move(fleet, drained, stream)
    assert fleet.held("post") == drained
    taker = wait_for("a worker to take over", lambda: _busy(fleet, but=drained))
    fleet.kill(taker)
    fleet.release(drained, "post")
    assert ended_well(fleet, drained)
    stream.wait()
    assert (stream.error, stream.tokens) == (None, expected)


def test_without_another_decode_worker_it_finishes_what_it_has(
    fleet: FaultyFleet, expected: list[int]
) -> None:
    stream, drained = begin(fleet, 100)
    for name in [each for each in fleet.names(Role.DECODE) if each != drained]:
        child = fleet.fleet.processes[name]
        fleet.kill(name)
        wait_for("the router to notice", lambda child=child: not fleet.serves(child))
    fleet.signal(drained, signal.SIGTERM)
    fleet.release(drained, "decode")
    assert ended_well(fleet, drained)
    stream.wait()
    assert (stream.error, stream.tokens) == (None, expected[:100])
    fleet.revive()
    assert modes(trace_of(fleet.fleet, stream.request_id)) == ["remote"]


def test_a_prefill_worker_finishes_what_it_has_and_gets_nothing_new(
    fleet: FaultyFleet, long_prompts: list[Reference]
) -> None:
    fleet.revive()
    reference, other = long_prompts[:2]
    fleet.arm(fleet.names(Role.PREFILL), "chunk", 3)
    stream = Stream(fleet.url, list(reference.prompt), NUM_ANSWER)
    drained = fleet.held("chunk")
    fleet.arm([drained], "close")
    fleet.signal(drained, signal.SIGTERM)
    fleet.release(drained, "chunk")
    assert fleet.held("close") == drained
    wait_for("the router to hear", lambda: workers(fleet.fleet)[drained]["state"] == "draining")
    elsewhere = Stream(fleet.url, list(other.prompt), NUM_ANSWER).wait()
    assert elsewhere.tokens == list(other.output)
    (attempt,) = trace_of(fleet.fleet, elsewhere.request_id)["attempts"]
    assert attempt["prefill"]["worker_id"] != drained
    fleet.release(drained, "close")
    assert ended_well(fleet, drained)
    stream.wait()
    assert (stream.error, stream.tokens) == (None, list(reference.output))
    (attempt,) = trace_of(fleet.fleet, stream.request_id)["attempts"]
    assert attempt["prefill"]["worker_id"] == drained


def _busy(fleet: FaultyFleet, but: str = "") -> str | None:
    """A decode worker that has somebody's request."""
    for name, shown in workers(fleet.fleet).items():
        if (
            name != but
            and shown["role"] == "decode"
            and (shown["num_handoffs"] or shown["num_waiting"])
        ):
            return name
    return None
