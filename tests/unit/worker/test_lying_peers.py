"""What a member of the cluster sends that it must not harms its own work only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from kv_transfer.handoff.key import HandoffKey
from process.sockets.control import Peer
from protocol.handoff_messages import KvAsk, KvBegun, KvClosed, KvGrant, KvRenew
from protocol.messages import Abort, Generate, KvPeer, Prefill, Role
from tests.sequences import greedy
from tests.unit.worker_harness import Clock, DecodeBench, PrefillBench
from worker.counters import Count

STRANGER = Peer(b"stranger", "stranger", Role.ROUTER)
OWNER = Peer(b"owner", "owner", Role.ROUTER)
FIELDS: dict[str, Any] = {
    "request_id": "r", "attempt": 1, "token_ids": list(range(10)), "num_output": 0,
    "sampling": greedy(4), "deadline_ms": 9000,
}  # fmt: skip
PREFILL = Prefill(**FIELDS)
HONEST = KvPeer(worker_id="p", incarnation="p-i", control="tcp://127.0.0.1:1")


@pytest.fixture
def p() -> Iterator[PrefillBench]:
    made = PrefillBench("p", Clock())
    yield made
    made.role.drop_all()
    made.worker.turn()
    made.close()


@pytest.fixture
def d() -> Iterator[DecodeBench]:
    made = DecodeBench("d", Clock())
    yield made
    made.close()


def test_a_message_that_cannot_be_handled_ends_its_connection_and_nothing_else(
    p: PrefillBench, d: DecodeBench
) -> None:
    for bench, kind in ((p, Prefill), (d, Generate)):
        bad = msgspec.structs.replace(kind(**FIELDS), request_id="bad", token_ids=["x"])
        own = msgspec.structs.replace(kind(**FIELDS), request_id="own")
        bench.server.inbox += [(STRANGER, own), (STRANGER, bad), (OWNER, kind(**FIELDS))]
        bench.worker.turn()
        assert [task.router for task in bench.role.tasks if not is_dropped(task)] == [OWNER]
        bench.role.drop_all()
        bench.worker.turn()


def is_dropped(task: Any) -> bool:
    return getattr(task, "unwanted", False)


def test_only_the_router_of_a_prompt_aborts_it(p: PrefillBench) -> None:
    abort = Abort(request_id="r", attempt=1)
    p.server.inbox += [(OWNER, PREFILL), (STRANGER, abort)]
    p.worker.turn()
    (task,) = p.role.tasks
    assert not task.unwanted
    assert p.counter(Count.STALE_MESSAGES) == 1
    p.server.inbox.append((OWNER, abort))
    p.worker.turn()
    assert task.unwanted


@pytest.mark.parametrize(
    "lie",
    [
        KvGrant(
            request_id="r", attempt=1, agent="agent of e", first_block=0, block_ids=[1], ttl_ms=9
        ),
        KvRenew(request_id="r", attempt=1, ttl_ms=9),
        Abort(request_id="r", attempt=1),
    ],
    ids=lambda lie: type(lie).__name__,
)
def test_no_sink_speaks_of_another_s_handoff(p: PrefillBench, d: DecodeBench, lie: Any) -> None:
    other = DecodeBench("e", Clock())
    ask = KvAsk(request_id="r", attempt=1, agent=d.transfers.agent, ttl_ms=3000)
    p.server.inbox += [
        (d.as_peer, d.descriptor),
        (other.as_peer, other.descriptor),
        (OWNER, PREFILL),
        (d.as_peer, ask),
        (other.as_peer, lie),
    ]
    for _ in range(3):
        p.worker.turn()
    assert p.counter(Count.UNEXPECTED_MESSAGES) == 1
    assert p.role.outbound.is_asked_for(HandoffKey("r", 1))
    assert p.transfers.writes == []
    other.close()


@pytest.mark.parametrize("lie", [KvBegun, KvClosed])
def test_only_the_source_of_a_handoff_begins_and_closes_it(d: DecodeBench, lie: Any) -> None:
    """Another worker's word must not lift the fence around blocks that the source may write."""
    d.peers.answers_asks = lie is KvClosed
    d.server.inbox.append((OWNER, Generate(**FIELDS, prefill=HONEST)))
    for _ in range(2):
        d.worker.turn()
    pinned = d.scheduler.blocks.num_pinned
    d.peers.inbox.append(("another", lie(request_id="r", attempt=1)))
    d.worker.turn()
    assert d.counter(Count.UNEXPECTED_MESSAGES) == 1
    assert d.scheduler.blocks.num_pinned == pinned
    assert len(d.role.tasks) == 1
    assert d.take_sent() == []


def test_a_source_s_message_that_cannot_be_handled_ends_what_waits_for_it(d: DecodeBench) -> None:
    d.server.inbox.append((OWNER, Generate(**FIELDS, prefill=HONEST)))
    for _ in range(2):
        d.worker.turn()
    d.peers.inbox.append(("p-i", KvClosed(request_id="r", attempt=["x"])))  # type: ignore[arg-type]
    d.worker.turn()
    (failed,) = d.take_sent()
    assert failed.retryable
    assert "cannot be handled" in failed.reason
