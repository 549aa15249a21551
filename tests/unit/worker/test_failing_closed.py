"""References to KV that are stale, expired, repeated, failed or foreign, from members with the
right secret: no token of another prompt, and no wrong one, is ever delivered."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kv_transfer.transfer_loop import NotificationArrived
from process.sockets.control import Peer
from protocol import wire
from protocol.handoff_messages import (
    HandoffToken,
    KvAsk,
    KvBegun,
    KvClosed,
    KvFetch,
    KvGrant,
    KvRenew,
    KvWritten,
)
from protocol.messages import AttemptFailed, Generate, Prefill, Role, StepTokens
from tests.sequences import greedy
from tests.unit.fake_model import BLOCK, continuation
from tests.unit.worker_fleet import Request, WorkerFleet, peer_of
from tests.unit.worker_harness import TTL_S
from worker.counters import Count

PROMPT = [3 * i % 11 for i in range(3 * BLOCK + 1)]
OTHER = [*PROMPT[:-1], PROMPT[-1] + 1]
STRANGER = Peer(b"stranger", "stranger", Role.DECODE)


class Closely(WorkerFleet):
    """Two decode workers and a prefill worker; notes what routers hear."""

    def __init__(self) -> None:
        super().__init__((1, 2, 2), (32, 32))
        self.heard: list[Any] = []
        self.watches = True

    def hear(self, worker: str, message: Any) -> None:
        self.heard.append(message)
        if self.watches:
            super().hear(worker, message)

    def send(self, to: str, kind: type, prompt: list[int], router: int = 0, **fields: Any) -> None:
        message = kind(
            token_ids=prompt, num_output=0, sampling=greedy(3), deadline_ms=60_000, **fields
        )
        self.channels[self.routers[router].name, to].append(message)

    def rounds(self, number: int = 12) -> None:
        for _ in range(number):
            self.round()
            self.check_blocks()

    def tokens(self) -> list[int]:
        """What decode workers have sent."""
        steps = [each for each in self.heard if isinstance(each, StepTokens)]
        return [token for step in steps for each in step.sequences for token in each.token_ids]


@pytest.fixture
def fleet() -> Iterator[Closely]:
    made = Closely()
    yield made
    made.is_calm = False
    for _ in range(10):  # fences fall
        made.clock.now += 0.5
        made.rounds(2)
    for bench in made.workers.values():
        assert bench.scheduler.blocks.num_pinned == 0, bench.name
    made.close()


def run(fleet: Closely, name: str = "r") -> Request:
    request = Request(name, fleet.routers[0], PROMPT, 3, 0, False)
    fleet.ask(request, "p1", "d2")
    return request


def until_sent(fleet: Closely, kind: type) -> tuple[tuple[str, str], Any]:
    """Go on until a message of this kind is under way, and take it out."""
    for _ in range(40):
        for ends, queue in fleet.channels.items():
            for message in queue:
                if isinstance(message, kind):
                    queue.remove(message)
                    return ends, message
        for ends in fleet.busy_channels():
            fleet.deliver(ends, 1)
        for name in list(fleet.workers):
            fleet.turn(name)
        fleet.land_writes(99)
        fleet.finish_writes()
    raise AssertionError(f"no {kind.__name__}")


def test_a_stale_reference_gets_nothing_of_the_former_prompt(fleet: Closely) -> None:
    request = run(fleet)
    fleet.rounds()
    assert request.outcome == "done"
    fleet.heard.clear()
    fleet.send("d2", Generate, OTHER, request_id="r", attempt=1, prefill=peer_of("p1"))
    fleet.send("d3", Generate, OTHER, request_id="r", attempt=1, prefill=peer_of("p1"))
    fleet.rounds()
    assert fleet.tokens() == []
    failed = [each for each in fleet.heard if isinstance(each, AttemptFailed)]
    assert [each.retryable for each in failed] == [True]
    assert fleet.workers["d2"].counter(Count.STALE_MESSAGES) == 1


@pytest.mark.parametrize("first", ["d3", "p1"])
def test_two_requests_of_one_name_get_nothing_of_each_other(fleet: Closely, first: str) -> None:
    """Of two routers, one is dead to its decode worker, and the other to its prefill worker."""
    fleet.watches = False
    fleet.requests["r"] = Request("r", fleet.routers[0], PROMPT, 3, 0, False, outcome="nobody's")
    legs = {
        "p1": (Prefill, PROMPT, 0, {"target": "d3"}),
        "d3": (Generate, OTHER, 1, {"prefill": peer_of("p1")}),
    }
    for name in (first, *({"p1", "d3"} - {first})):
        kind, prompt, router, fields = legs[name]
        fleet.send(name, kind, prompt, router, request_id="r", attempt=1, **fields)
        fleet.round()
    fleet.rounds()
    assert fleet.tokens() == []
    reasons = {each.reason for each in fleet.heard if isinstance(each, AttemptFailed)}
    assert reasons == {"the sink asked for another prompt under this name"}


@pytest.mark.parametrize("kind", [KvAsk, KvGrant, KvRenew])
def test_an_expired_reference_fails_the_attempt_and_the_next_one_is_right(
    fleet: Closely, kind: type
) -> None:
    request = run(fleet)
    if kind is KvRenew:  # of a grant that has been lost
        until_sent(fleet, KvGrant)
        fleet.clock.now += TTL_S / 3 + 0.1
    ends, message = until_sent(fleet, kind)
    fleet.clock.now += TTL_S + 0.1
    fleet.is_calm = False
    fleet.turn("p1")
    fleet.channels[ends].append(message)
    fleet.rounds(40)
    assert request.outcome == "done"
    assert request.tokens == dict(enumerate(continuation(PROMPT, 3)))


@pytest.mark.parametrize(
    "kind", [Prefill, Generate, KvAsk, KvBegun, KvGrant, KvRenew, HandoffToken, KvClosed]
)
def test_a_repeated_message_changes_nothing(fleet: Closely, kind: type) -> None:
    request = run(fleet)
    if kind is KvRenew:
        ends, grant = until_sent(fleet, KvGrant)
        fleet.channels[ends].append(grant)
        message = KvRenew(request_id="r", attempt=1, ttl_ms=3000)
    else:
        ends, message = until_sent(fleet, kind)
    fleet.channels[ends] += [message, message]
    fleet.rounds()
    fleet.channels[ends].append(message)
    fleet.is_calm = False
    fleet.rounds(40)
    assert request.outcome == "done"
    assert request.attempt == 1
    assert fleet.tokens() == continuation(PROMPT, 3)[-len(fleet.tokens()) :]


def test_a_failed_transfer_is_not_taken_for_its_blocks(fleet: Closely) -> None:
    request = run(fleet)
    ends, closed = until_sent(fleet, KvClosed)
    fleet.is_calm = False
    failed = KvClosed(request_id="r", attempt=1, error="the write failed")
    fleet.channels[ends] += [failed, closed]
    fleet.rounds(40)
    fleet.clock.now += 2.0
    fleet.rounds(40)
    assert request.outcome == "done"
    assert request.tokens == dict(enumerate(continuation(PROMPT, 3)))


def test_what_others_say_of_a_handoff_does_not_count(fleet: Closely) -> None:
    """A worker that is not the source says that it has begun, has written and has ended, and one
    that is not the sink asks, grants and fetches."""
    request = run(fleet)
    until_sent(fleet, KvBegun)
    name = {"request_id": "r", "attempt": 1}
    d2, p1 = fleet.workers["d2"], fleet.workers["p1"]
    token = HandoffToken(**name, index=0, token_id=1, cached_tokens=0, last_chunk_end_us=0)
    written = KvWritten(**name, first_block=0, num_blocks=4)
    for message in (KvBegun(**name), token, KvClosed(**name)):
        d2.peers.inbox.append(("stranger-i", message))
    d2.transfers.events.append(NotificationArrived("stranger", wire.encode(written)))
    grant = {"agent": "stranger", "first_block": 0, "block_ids": [0, 1], "ttl_ms": 3000}
    for message in (
        KvAsk(**name, agent="stranger", ttl_ms=3000),
        KvGrant(**name, **grant),
        KvFetch(**name, part=1, hashes=[b"a", b"b"], **grant),
        KvRenew(**name, ttl_ms=3000),
    ):
        p1.server.inbox.append((STRANGER, message))
    fleet.is_calm = False
    fleet.rounds(40)
    fleet.clock.now += TTL_S
    fleet.rounds(40)
    assert request.outcome == "done"
    assert request.tokens == dict(enumerate(continuation(PROMPT, 3)))
