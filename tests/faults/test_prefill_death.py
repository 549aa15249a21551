"""A prefill worker dies: what arrived stays, only the rest is computed and sent again."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from protocol.messages import Role
from tests.effort import in_turn, some
from tests.faults.faulty_fleet import FaultyFleet, Stream, faulty_fleet
from tests.integration.fleets import counters, trace_of, wait_for, workers
from tests.integration.reference import BLOCK, NUM_TOKENS, Reference

MOMENTS = {
    "before the grant": ("grant", 1),
    "before any block": ("write", 1),
    "between chunks": ("chunk", 3),
    "before the last blocks, after the first token": ("post", 3),
    "during a write, after the first token": ("posted", 3),
    "as the last write begins": ("landing", 1),
}
_SETTLED_US = 1_000_000
_AFTER_FIRST_TOKEN = ("post", "posted", "landing")


TRANSPORTS = ["nixl", "shm"]


@pytest.fixture(scope="module")
def fleet(request: pytest.FixtureRequest) -> Iterator[FaultyFleet]:
    with faulty_fleet(prefill=2, decode=1, transport=request.param) as fleet:
        yield fleet


@pytest.mark.parametrize(
    ("fleet", "moment"), in_turn(TRANSPORTS, some(MOMENTS, 2)), indirect=["fleet"], scope="module"
)
def test_another_prefill_worker_sends_only_what_is_missing(
    fleet: FaultyFleet,
    long_prompts: list[Reference],
    one_chunk_prompts: list[Reference],
    moment: str,
) -> None:
    fleet.revive()
    acquaint(fleet)
    point, passes = MOMENTS[moment]
    reference = long_prompts[list(MOMENTS).index(moment)]
    if point == "landing":  # which is their only write
        reference = one_chunk_prompts[0]
    num_tokens = len(reference.prompt) + (point in _AFTER_FIRST_TOKEN)  # of the retry's prompt
    num_blocks = -(-num_tokens // BLOCK)
    before = counters(fleet.fleet, "decode-1")["blocks_received"]
    fleet.arm(fleet.names(Role.PREFILL), point, passes)
    stream = Stream(fleet.url, list(reference.prompt), NUM_TOKENS)
    killed = fleet.held(point)
    if point in _AFTER_FIRST_TOKEN:
        stream.wait_tokens(1)
    arrived = received_when_settled(fleet) - before
    fleet.kill(killed)
    stream.wait()
    assert (stream.error, stream.tokens) == (None, list(reference.output))
    _, retry = trace_of(fleet.fleet, stream.request_id)["attempts"]
    assert retry["prefill"]["worker_id"] != killed
    assert retry["decode"]["granted_blocks"] <= num_blocks - arrived, "or more have landed since"
    assert counters(fleet.fleet, "decode-1")["blocks_received"] - before == num_blocks


@pytest.mark.parametrize("fleet", some(TRANSPORTS, 1), indirect=True, scope="module")
def test_it_has_written_everything_but_not_said_so(
    fleet: FaultyFleet, long_prompts: list[Reference]
) -> None:
    """The decode worker has all that it needs, and goes on."""
    fleet.revive()
    acquaint(fleet)
    reference = long_prompts[len(MOMENTS) + 1]
    fleet.arm(fleet.names(Role.PREFILL), "close")
    stream = Stream(fleet.url, list(reference.prompt), NUM_TOKENS)
    held = fleet.held("close")
    stream.wait_tokens(2)
    fleet.kill(held)
    stream.wait()
    assert (stream.error, stream.tokens) == (None, list(reference.output))
    assert len(fleet.attempts(stream.request_id)) == 1


@pytest.mark.parametrize("fleet", some(TRANSPORTS, 1), indirect=True, scope="module")
def test_without_another_prefill_worker_the_decode_worker_prefills(
    fleet: FaultyFleet, long_prompts: list[Reference]
) -> None:
    fleet.revive()
    fleet.kill("prefill-2")
    Stream(fleet.url, [7] * 40, 2).wait()  # the pair gets to know each other
    reference = long_prompts[len(MOMENTS)]
    before = counters(fleet.fleet, "decode-1")
    fleet.arm(["prefill-1"], "chunk", 1)
    stream = Stream(fleet.url, list(reference.prompt), NUM_TOKENS)
    assert fleet.held("chunk") == "prefill-1"
    fleet.compute_until_granted("prefill-1")
    fleet.move_on("prefill-1", "chunk", 6)
    wait_for("blocks", lambda: received_when_settled(fleet) > before["blocks_received"])
    fleet.kill("prefill-1")
    stream.wait()
    assert (stream.error, stream.tokens) == (None, list(reference.output))
    assert trace_of(fleet.fleet, stream.request_id)["attempts"][-1]["mode"] == "local"
    after = counters(fleet.fleet, "decode-1")
    arrived = after["blocks_received"] - before["blocks_received"]
    computed = after["prefill_tokens"] - before["prefill_tokens"]
    assert computed == len(reference.prompt) - arrived * BLOCK


def acquaint(fleet: FaultyFleet) -> None:
    """Until each prefill worker has written to the decode worker: of the first writes over a new
    connection a later one may land before an earlier, and what is kept begins with the first."""

    def have_written() -> bool:
        streams = [Stream(fleet.url, [randrange(3, 500) for _ in range(90)], 1) for _ in range(2)]
        for stream in streams:
            assert stream.wait().error is None
        names = fleet.names(Role.PREFILL)
        return all(counters(fleet.fleet, name)["blocks_sent"] for name in names)

    randrange = random.Random(1).randrange
    wait_for("every prefill worker to have written", have_written, 60)


def received_when_settled(fleet: FaultyFleet) -> int:
    """`blocks_received` of the decode worker, once reports say the same for a second: of the first
    writes over a connection a later one may land long before an earlier."""
    seen: list[tuple[int, int]] = []

    def is_settled() -> bool:
        shown = workers(fleet.fleet)["decode-1"]
        report = (shown["reported_us"], shown["counters"].get("blocks_received", 0))
        if not seen or report[1] != seen[0][1]:
            seen[:] = [report]
        elif report[0] > seen[-1][0]:
            seen.append(report)
        return seen[-1][0] - seen[0][0] >= _SETTLED_US

    wait_for("posted writes to land", is_settled)
    return seen[-1][1]
