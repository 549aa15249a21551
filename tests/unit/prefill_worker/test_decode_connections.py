"""Decode workers come, go and come again, by several connections: each is answered by its own."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kv_transfer.transfer_loop import PeerFailed
from process.sockets.control import Peer
from protocol.handoff_messages import HandoffToken, KvBegun, KvClosed, KvRenew, PoolRefused
from protocol.messages import Abort, AttemptFailed, FirstToken, PrefillDone, Role
from tests.unit.prefill_worker.prefill_harness import (
    PREFILL,
    PROMPT,
    answered,
    ask,
    finish_writes,
    grant,
    say,
    say_of_d,
    types,
)
from tests.unit.worker_harness import ROUTER, DecodeBench, PrefillBench
from worker.counters import Count


def test_the_next_grant_adds_a_peer_again_that_the_transport_dropped(
    p: PrefillBench, d: DecodeBench
) -> None:
    say(p, PREFILL)
    say_of_d(p, d, d.descriptor, ask(d), grant(d))
    p.transfers.remove_peer(d.transfers.agent)  # as the transfer loop does when a write fails
    p.transfers.events.append(PeerFailed(d.transfers.agent, "a write failed"))
    sent = say(p)
    assert AttemptFailed in types(sent)
    say(p, msgspec.structs.replace(PREFILL, attempt=2), turns=3)
    say_of_d(p, d, ask(d, attempt=2), grant(d, attempt=2))
    assert d.transfers.agent in p.transfers.peers
    assert len(p.transfers.writes) == 3
    finish_writes(p)
    assert PrefillDone in types(say(p))


@pytest.mark.parametrize("loses_the_older", [False, True])
def test_two_connections_of_one_decode_worker_do_not_get_into_each_others_way(
    p: PrefillBench, d: DecodeBench, loses_the_older: bool
) -> None:
    """As when we are another incarnation: its connection to our former self still says who it is
    when the new one already has, and then goes."""
    former = Peer(b"former", d.name, Role.DECODE)
    say(p, PREFILL)
    say_of_d(p, d, d.descriptor)
    p.server.inbox.append((former, d.descriptor))
    say(p)
    if loses_the_older:
        p.server.gone.append(former)
        say(p)
        assert p.transfers.peers == {d.transfers.agent}
    p.server.sent.clear()
    p.server.inbox += [(d.as_peer, ask(d)), (d.as_peer, grant(d))]
    p.worker.turn()
    finish_writes(p)
    p.worker.turn()
    answers = [(peer, type(message)) for peer, message in p.server.sent if peer != ROUTER]
    assert answers == [(d.as_peer, KvBegun), (d.as_peer, HandoffToken), (d.as_peer, KvClosed)]


@pytest.mark.parametrize(
    "message_of", [ask, grant, lambda d: KvRenew(request_id="r", attempt=1, ttl_ms=9)]
)
def test_a_decode_worker_that_is_not_known_is_told_also_while_the_handoff_is_open(
    p: PrefillBench, d: DecodeBench, message_of: Any
) -> None:
    say(p, PREFILL)
    sent = say_of_d(p, d, message_of(d))
    (closed,) = [message for message in sent if isinstance(message, KvClosed)]
    assert "not known" in closed.error
    say(p, Abort(request_id="r", attempt=1), turns=4)


@pytest.mark.parametrize("prompt_came", [False, True])
def test_a_decode_worker_that_comes_back_is_answered_over_the_connection_it_has(
    p: PrefillBench, d: DecodeBench, prompt_came: bool
) -> None:
    """What it granted ended when its connection did, and it has not heard of that."""
    former = Peer(b"former", d.name, Role.DECODE)
    p.server.inbox += [(former, d.descriptor), (former, ask(d)), (former, grant(d))]
    say(p, *[PREFILL] * prompt_came)
    p.server.gone.append(former)
    say(p, turns=2)
    p.server.sent.clear()
    p.server.inbox += [(d.as_peer, d.descriptor), (d.as_peer, Abort(request_id="r", attempt=1))]
    p.worker.turn()
    assert [peer for peer, message in p.server.sent if type(message) is KvClosed] == [d.as_peer]


def test_what_a_lost_connection_granted_goes_on_over_the_other(
    p: PrefillBench, d: DecodeBench
) -> None:
    former = Peer(b"former", d.name, Role.DECODE)
    say(p, PREFILL)
    p.server.inbox += [
        (former, d.descriptor),
        (former, ask(d)),
        (former, grant(d)),
        (d.as_peer, d.descriptor),
    ]
    p.server.gone.append(former)
    say(p)
    p.server.sent.clear()
    p.worker.turn()
    finish_writes(p)
    p.worker.turn()
    assert answered(p) == [(d.as_peer, HandoffToken), (d.as_peer, KvClosed)]


def test_who_asks_about_what_has_ended_is_answered_whichever_connection_is_newer(
    p: PrefillBench, d: DecodeBench
) -> None:
    former = Peer(b"former", d.name, Role.DECODE)
    p.server.inbox += [(d.as_peer, d.descriptor), (former, d.descriptor)]
    p.server.inbox += [(d.as_peer, Abort(request_id="r", attempt=1))]
    p.worker.turn()
    assert answered(p) == [(d.as_peer, KvClosed)]


def test_a_stranger_is_told_of_the_end_of_a_granted_handoff_not_before_its_writes_have_ended(
    p: PrefillBench, d: DecodeBench
) -> None:
    """A connection by which no pool was told speaks of what another one granted."""
    stranger = Peer(b"stranger", d.name, Role.DECODE)
    say(p, PREFILL)
    say_of_d(p, d, d.descriptor, ask(d), grant(d))
    assert p.transfers.writes
    p.server.inbox.append((stranger, KvRenew(request_id="r", attempt=1, ttl_ms=3000)))
    say(p)
    p.server.sent.clear()
    p.worker.turn()
    assert answered(p) == [], "a write may still land"
    finish_writes(p)
    p.worker.turn()
    assert answered(p) == [(stranger, KvClosed)]


def test_of_what_has_ended_nothing_is_remembered_but_its_name(
    p: PrefillBench, d: DecodeBench
) -> None:
    say_of_d(p, d, d.descriptor)
    for number in range(3):
        early, late = (each(d, request_id=f"r{number}") for each in (ask, grant))
        renew = KvRenew(request_id=f"r{number}", attempt=1, ttl_ms=3000)
        sent = say_of_d(p, d, early, Abort(request_id=f"r{number}", attempt=1), renew, early, late)
        assert types(sent) == [KvClosed] * 4
    assert p.role.outbound._speakers == {}


def test_a_decode_worker_that_was_lost_can_come_back(p: PrefillBench, d: DecodeBench) -> None:
    say_of_d(p, d, d.descriptor)
    p.server.gone.append(d.as_peer)
    say(p)
    assert p.transfers.peers == set()
    say_of_d(p, d, d.descriptor)
    assert p.transfers.peers == {d.transfers.agent}


@pytest.mark.parametrize(
    "message",
    [
        KvRenew(request_id="r", attempt=1, ttl_ms=3000),
        Abort(request_id="r", attempt=1),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_decode_worker_whose_pool_was_refused_is_answered(
    p: PrefillBench, d: DecodeBench, message: Any
) -> None:
    forged = msgspec.structs.replace(d.descriptor, digest=b"wrong")
    refused, closed = say_of_d(p, d, forged, message)
    assert isinstance(refused, PoolRefused)
    assert refused.reason
    assert isinstance(closed, KvClosed)
    assert closed.error
    assert p.counter(Count.DESCRIPTORS_REFUSED) == 1
    (closed,) = say_of_d(p, d, grant(d))
    assert closed.error


def test_a_grant_for_another_workers_pool_is_not_followed(p: PrefillBench, d: DecodeBench) -> None:
    assert say_of_d(p, d, d.descriptor, grant(d, agent="somebody else's")) == []
    assert p.counter(Count.UNEXPECTED_MESSAGES) == 1


def test_a_failed_write_ends_only_what_was_granted(p: PrefillBench, d: DecodeBench) -> None:
    say(p, PREFILL)
    say_of_d(p, d, d.descriptor, ask(d), grant(d), ask(d, request_id="waits"))
    p.transfers.remove_peer(d.transfers.agent)  # as the transfer loop does when a write fails
    p.transfers.events.append(PeerFailed(d.transfers.agent, "a write failed"))
    sent = say(p)
    closed = [message.request_id for message in sent if isinstance(message, KvClosed)]
    assert closed == ["r"]
    short = msgspec.structs.replace(PREFILL, request_id="waits", token_ids=[3])
    assert types(say(p, short)) == [KvBegun, FirstToken, HandoffToken], "it goes on"
    say(p, Abort(request_id="waits", attempt=1), turns=2)


def test_prompts_for_one_of_two_decode_workers_leave_room_for_the_other(
    p: PrefillBench, d: DecodeBench
) -> None:
    """A pool of 16 blocks; a prompt of 5 blocks for d waits, a second one may not begin, one for
    the other decode worker may. When d grants, its share is free again."""
    other = DecodeBench("other", d.clock)
    say_of_d(p, other, other.descriptor)
    say_of_d(p, d, d.descriptor)
    prompts = {
        name: msgspec.structs.replace(
            PREFILL, request_id=name, token_ids=[number, *PROMPT], target=target
        )
        for number, (name, target) in enumerate([("a", "d"), ("b", "d"), ("c", "other")])
    }
    say(p, *prompts.values(), turns=9)
    begun = [task.key.request_id for task in p.role.tasks if task.sequence.block_table]
    assert begun == ["a", "c"]
    say_of_d(p, d, ask(d, request_id="a"), grant(d, request_id="a"), turns=2)
    begun = [task.key.request_id for task in p.role.tasks if task.sequence.block_table]
    assert begun == ["a", "b", "c"]
    for name in prompts:
        say(p, Abort(request_id=name, attempt=1))
    finish_writes(p)
    say(p)
    other.close()
