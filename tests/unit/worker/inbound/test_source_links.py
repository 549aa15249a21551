"""Links to prefill workers open when these appear, or are needed, introduce our pool, and close
when the peer is gone."""

from __future__ import annotations

import os
import time
from typing import Any

import msgspec
import pytest

from protocol.handoff_messages import KvClosed, PeerDescriptor, PoolRefused
from protocol.messages import PROTOCOL_VERSION, Abort, KvPeer, Role
from protocol.registration import WorkerInfo, WorkerState
from tests.unit.worker.inbound.source_pair import ABORT, Pair, introduce, member


def test_a_prefill_worker_that_appears_gets_to_know_our_pool(pair: Pair) -> None:
    pair.peers.connect_new(0.0)
    pair.members = [member(pair)]
    pair.peers.connect_new(0.05)
    assert pair.peers.num_links == 0, "it is not the time to look yet"
    pair.peers.connect_new(0.2)
    pair.peers.connect_new(0.4)
    assert pair.peers.num_links == 1
    pair.exchange(lambda: pair.peers.receive() or pair.heard)
    assert [type(message) for _, message in pair.heard] == [PeerDescriptor]


@pytest.mark.parametrize(
    "changes",
    [
        {"role": Role.DECODE},
        {"state": WorkerState.LOADING},
        {"state": WorkerState.DRAINING},
        {"layout_fingerprint": "other"},
        {"transport": "other"},
        {"protocol_version": PROTOCOL_VERSION + 1},
    ],
)
def test_who_will_not_send_to_us_is_left_alone(pair: Pair, changes: dict[str, Any]) -> None:
    pair.members = [member(pair, **changes)]
    pair.peers.connect_new(1.0)
    assert pair.peers.num_links == 0


def test_one_that_refuses_us_is_met_once(pair: Pair) -> None:
    pair.members = [member(pair, incarnation="former")]
    pair.peers.connect_new(1.0)
    pair.exchange(lambda: pair.peers.receive() or pair.peers.take_lost(1.0))
    pair.peers.connect_new(2.0)
    assert pair.peers.num_links == 0


def test_our_pool_is_introduced_before_anything_else(pair: Pair) -> None:
    pair.peers.connect(pair.peer)
    pair.peers.send("p-i", ABORT)
    pair.exchange(lambda: pair.peers.receive() or len(pair.heard) == 2)
    assert [type(message) for _, message in pair.heard] == [PeerDescriptor, Abort]


def test_what_a_peer_says_comes_with_its_incarnation(pair: Pair) -> None:
    introduce(pair)
    closed = KvClosed(request_id="r", attempt=1)
    pair.server.send(pair.heard[0][0], closed)
    received: list[Any] = []
    pair.exchange(lambda: received.extend(pair.peers.receive()) or received)
    assert received == [("p-i", closed)]


def test_a_peer_that_forgot_us_gets_our_pool_again_and_is_reported(pair: Pair) -> None:
    introduce(pair)
    assert pair.peers.reset() == []
    agent = pair.peers.descriptor.agent
    pair.peers.note_refusal("p-i", PoolRefused(agent=agent, reason="it may say so again"))
    pair.server.lost(pair.clock.now + 1e10)  # it thinks that we are gone
    pair.heard.clear()
    pair.peers.send("p-i", ABORT)
    pair.exchange(lambda: pair.peers.receive() or pair.heard)
    assert isinstance(pair.heard[0][1], PeerDescriptor)
    assert pair.peers.refusals == {}
    assert pair.peers.reset() == ["p-i"]
    assert pair.peers.reset() == []


def test_a_peer_gets_our_pool_under_another_name_and_keeps_to_it(pair: Pair) -> None:
    introduce(pair)
    usual = pair.peers.descriptor
    other = msgspec.structs.replace(usual, agent="another end")
    assert pair.peers.agent_for("p-i") == usual.agent
    pair.peers.introduce("p-i", other)
    assert pair.peers.agents == {"another end"}
    pair.heard.clear()
    pair.exchange(lambda: pair.peers.receive() or pair.heard)
    assert [message for _, message in pair.heard] == [other]
    pair.server.lost(pair.clock.now + 1e10)  # it thinks that we are gone
    pair.heard.clear()
    pair.peers.send("p-i", ABORT)
    pair.exchange(lambda: pair.peers.receive() or pair.heard)
    assert pair.heard[0][1] == other


def test_foreign_frames_are_counted(pair: Pair) -> None:
    introduce(pair)
    pair.server.socket.send_multipart([pair.heard[0][0].identity, b"junk"])
    pair.exchange(lambda: pair.peers.receive() or pair.peers.refused)
    assert pair.peers.refused == 1
    pair.peers.receive()
    assert pair.peers.refused == 1


def test_silence_alone_is_not_death(pair: Pair) -> None:
    introduce(pair)
    assert pair.peers.silent(time.monotonic()) == []
    far = 1e12  # links hear by the process's own clock
    assert pair.peers.take_lost(far) == []
    assert pair.peers.silent(far) == ["p-i"], "but nobody need wait for it"
    pair.alive = False
    assert pair.peers.take_lost(far) == ["p-i"]
    assert pair.peers.neighbours_of_lapsed("p-i") == set(), "it may go on, on another machine"
    assert pair.peers.neighbours_of_lapsed("p-i") is None
    assert pair.peers.num_links == 0
    pair.peers.send("p-i", ABORT)  # dropped: its receiver hears that the peer is gone


@pytest.mark.parametrize(("machine", "kept"), [("elsewhere", {"127.0.0.1"}), ("", set())])
def test_peers_are_told_apart_by_address_though_they_are_known_by_name(
    machine: str, kept: set[str]
) -> None:
    """The connections of blocks have addresses only. One that names no machine may have written
    from any."""
    near = Pair()
    name = KvPeer(
        worker_id="q", incarnation="p-i", control=near.endpoint.replace("127.0.0.1", "localhost")
    )
    far = Pair(host="127.0.0.2", incarnation="far", machine=machine)
    near.peers.connect(name)
    near.peers.connect(KvPeer(worker_id="f", incarnation="far", control=far.endpoint))
    near.exchange(lambda: far.serve() or near.peers.receive() or near.num_answered() == 2)
    near.alive = False
    near.silence("far")
    assert near.peers.take_lost(time.monotonic()) == ["far"]
    assert near.peers.neighbours_of_lapsed("far") == kept
    near.close()
    far.close()


@pytest.mark.parametrize("machine", ["here", "elsewhere"])
def test_one_that_never_answers_is_gone_however_alive_it_is(pair: Pair, machine: str) -> None:
    """Its address may be wrong from where we are: what waits for it would wait for ever."""
    pair.info = member(pair, machine=machine, pid=os.getpid())
    pair.peers.connect(pair.peer)
    pair.peers.send("p-i", ABORT)
    assert pair.peers.take_lost(time.monotonic()) == []
    assert pair.peers.take_lost(1e12) == ["p-i"]
    pair.peers.connect(pair.peer)
    pair.exchange(lambda: pair.peers.receive() or pair.heard)
    assert [type(message) for _, message in pair.heard] == [PeerDescriptor], "and nothing of before"


def test_another_process_at_the_same_place_is_not_the_one_that_was_named(pair: Pair) -> None:
    pair.peers.connect(KvPeer(worker_id="p", incarnation="before", control=pair.endpoint))
    gone: list[str] = []
    pair.exchange(lambda: pair.peers.receive() or gone.extend(pair.peers.take_lost(0.0)) or gone)
    assert gone == ["before"]


def test_a_peer_with_another_model_is_gone_at_once() -> None:
    pair = Pair(model="another")
    pair.peers.connect(pair.peer)
    gone: list[str] = []
    pair.exchange(lambda: pair.peers.receive() or gone.extend(pair.peers.take_lost(0.0)) or gone)
    assert gone == ["p-i"]
    pair.close()


def test_a_place_that_is_none_is_gone_at_once(pair: Pair) -> None:
    nowhere = KvPeer(worker_id="p", incarnation="x", control="carrier-pigeon://p")
    pair.peers.connect(nowhere)
    assert pair.peers.take_lost(0.0) == ["x"]
    assert pair.peers.take_lost(0.0) == []


def test_what_keeps_each_prefill_worker_from_sending_is_said(pair: Pair) -> None:
    others = [
        member(pair, worker_id="layout", incarnation="1", layout_fingerprint="other"),
        member(pair, worker_id="new", incarnation="2"),
        member(pair, worker_id="leaves", incarnation="3", state=WorkerState.DRAINING),
        member(pair, worker_id="decodes", incarnation="4", role=Role.DECODE),
    ]
    pair.members = others
    assert pair.peers.obstacles(0.0) == {
        "layout": "its KV layout fingerprint is other, ours is layout",
        "new": "not connected yet",
    }
    pair.members = [member(pair)]
    pair.peers.connect_new(1.0)
    assert pair.peers.obstacles(0.0) == {"p": f"nobody has answered yet at {pair.endpoint}"}
    pair.exchange(lambda: pair.peers.receive() or pair.heard)
    pair.exchange(lambda: pair.peers.receive() or pair.peers.obstacles(0.0) == {"p": None})
    assert "silent for " in str(pair.peers.obstacles(1e12)["p"])


def test_a_refusal_is_known_until_the_pool_has_another_name_or_the_link_closes(
    pair: Pair,
) -> None:
    pair.members = [member(pair)]
    introduce(pair)
    agent = pair.peers.descriptor.agent
    pair.peers.note_refusal("p-i", PoolRefused(agent="a former name", reason="late"))
    assert pair.peers.refusals == {}
    pair.peers.note_refusal("p-i", PoolRefused(agent=agent, reason="it compares digests"))
    assert pair.peers.refusals == {"p-i": "it compares digests"}
    assert pair.peers.obstacles(0.0) == {"p": "it compares digests"}
    pair.peers.introduce("p-i", msgspec.structs.replace(pair.peers.descriptor, agent="new"))
    assert pair.peers.refusals == {}
    pair.peers.note_refusal("p-i", PoolRefused(agent="new", reason="still"))
    pair.members = []
    pair.peers.connect_new(2.0)
    assert pair.peers.refusals == {"p-i": "still"}, "the view of the fleet may have a gap"
    pair.alive = False
    assert pair.peers.take_lost(1e12) == ["p-i"]
    assert pair.peers.refusals == {}


def test_one_that_was_given_up_is_met_again_when_asked_for(pair: Pair) -> None:
    pair.members = [member(pair)]
    pair.peers.connect_new(1.0)
    assert pair.peers.take_lost(1e12) == ["p-i"]
    pair.peers.connect_new(2.0)
    assert pair.peers.num_links == 0
    assert pair.peers.obstacles(0.0) == {"p": f"nobody answers at {pair.endpoint}"}
    pair.peers.retry_closed()
    pair.peers.connect_new(3.0)
    assert pair.peers.num_links == 1
    pair.exchange(lambda: pair.peers.receive() or pair.peers.obstacles(0.0) == {"p": None})


def test_a_cache_is_offered_to_ready_workers_of_the_role_or_else_to_the_others(pair: Pair) -> None:
    def named(*members: WorkerInfo) -> list[str]:
        pair.members = list(members)
        return [each.worker_id for each in pair.peers.takers()]

    def decode(name: str, **changes: Any) -> WorkerInfo:
        return member(pair, worker_id=name, incarnation=f"{name}-i", role=Role.DECODE, **changes)

    unfit = [
        decode("d"),  # this worker
        decode("drains", state=WorkerState.DRAINING),
        decode("loads", state=WorkerState.LOADING),
        decode("other", layout_fingerprint="another"),
    ]
    assert named(*unfit) == []
    assert named(*unfit, member(pair)) == ["p"]
    assert named(*unfit, member(pair), decode("e"), decode("f")) == ["e", "f"]


def test_a_worker_that_offers_its_cache_is_found_in_the_fleet(pair: Pair) -> None:
    pair.members = [member(pair, state=WorkerState.DRAINING)]
    assert pair.peers.leaving("p") == pair.peer
    assert pair.peers.leaving("unknown") is None
    pair.members = [member(pair, transport="another")]
    assert pair.peers.leaving("p") is None


def test_a_worker_of_another_generation_is_named_in_one_line_with_ours(pair: Pair) -> None:
    changes = {"layout_fingerprint": "another", "weight_version": "1f3a", "revision": "6d4c"}
    pair.members = [member(pair, **changes)]
    found = pair.peers.obstacles(0.0)
    assert found == {
        "p": "its KV layout fingerprint is another (weights 1f3a, deployment 6d4c), ours is layout"
    }
    pair.members = [member(pair, weight_version="1f3a", revision="6d4c")]
    assert pair.peers.obstacles(0.0) == {"p": "not connected yet"}, "equal fingerprints prove it"
