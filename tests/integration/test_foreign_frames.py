"""Corrupt and foreign frames on a worker's sockets are refused and counted, and it goes on."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import zmq

from cli.fleet import Fleet
from kv_transfer.authentication import authenticate_descriptor
from process.sockets.encrypted_sockets import Network
from protocol import wire
from protocol.handoff_messages import (
    KvClosed,
    KvFetch,
    KvGrant,
    KvRenew,
    PeerDescriptor,
    PoolRefused,
)
from protocol.hashing import block_hashes, chain_root, seed_of
from protocol.messages import (
    PROTOCOL_VERSION,
    Abort,
    Generate,
    Hello,
    HelloAccepted,
    HelloRefused,
    Role,
)
from protocol.registration import WorkerInfo
from protocol.sampling import SamplingParams
from tests.integration.fleets import complete, counters, running_fleet, wait_for
from tests.integration.reference import NUM_TOKENS, Reference

SECRET = "the secret of a test's cluster"
GENERATE = Generate(
    request_id="x",
    attempt=0,
    token_ids=[1],
    num_output=0,
    sampling=SamplingParams(max_tokens=1, seed=0),
    deadline_ms=1000,
)


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with running_fleet(local_prefill_threshold_tokens=0, cluster_secret=SECRET) as fleet:
        yield fleet


@pytest.fixture(params=["prefill-1", "decode-1"])
def worker(request: pytest.FixtureRequest, fleet: Fleet) -> WorkerInfo:
    return fleet.workers[request.param]


@pytest.fixture
def dealer(worker: WorkerInfo) -> Iterator[zmq.Socket[bytes]]:
    with insider() as network:
        yield dealer_to(network, worker)


@contextmanager
def insider() -> Iterator[Network]:
    """What has the fleet's secret, as a compromised member would."""
    network = Network(SECRET)
    yield network
    network.close(linger_ms=1000)


def dealer_to(network: Network, worker: WorkerInfo) -> zmq.Socket[bytes]:
    socket = network.connecting(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 1000)
    socket.setsockopt(zmq.RCVTIMEO, 60_000)
    socket.connect(worker.control)
    return socket


def hello(worker: WorkerInfo, **change: Any) -> Hello:
    fields = {
        "sender": "stranger",
        "role": Role.ROUTER,
        "protocol_version": PROTOCOL_VERSION,
        "model_fingerprint": worker.model_fingerprint,
        "layout_fingerprint": worker.layout_fingerprint,
    }
    return Hello(**(fields | change))


def refused(fleet: Fleet, worker: WorkerInfo) -> int:
    return counters(fleet, worker.worker_id)["frames_refused"]


def still_serves(fleet: Fleet, references: list[Reference]) -> bool:
    answer = complete(fleet, list(references[9].prompt), max_tokens=NUM_TOKENS)
    return answer["choices"][0]["token_ids"] == list(references[9].output)


def test_garbage_is_counted_and_dropped(
    fleet: Fleet, worker: WorkerInfo, dealer: Any, references: list[Reference]
) -> None:
    before = refused(fleet, worker)
    rng = random.Random(3)
    frames = [[rng.randbytes(rng.randrange(0, 300))] for _ in range(200)]
    frames += [[b"a", b"b", b"c"], [], [b""] * 5, [wire.encode(GENERATE)[:-2]]]
    frames += [[msgspec.msgpack.encode({"type": "Generate", "token_ids": "all"})]]
    for frame in frames:
        dealer.send_multipart(frame or [b""])
    wait_for("200 refusals", lambda: refused(fleet, worker) >= before + 200)
    assert still_serves(fleet, references)


def test_nothing_is_taken_before_an_accepted_hello(
    fleet: Fleet, worker: WorkerInfo, dealer: Any
) -> None:
    dealer.send(wire.encode(GENERATE))
    answer = wire.decode_control(dealer.recv())
    assert isinstance(answer, HelloRefused)
    assert answer.what == "hello"


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"protocol_version": 99}, "protocol version"),
        ({"model_fingerprint": "0" * 32}, "model fingerprint"),
        ({"layout_fingerprint": "0" * 32, "role": Role.DECODE}, "KV layout fingerprint"),
    ],
)
def test_a_mismatch_is_refused_with_both_values(
    worker: WorkerInfo, dealer: Any, change: dict[str, Any], what: str
) -> None:
    dealer.send(wire.encode(hello(worker, **change)))
    answer = wire.decode_control(dealer.recv())
    assert isinstance(answer, HelloRefused)
    assert answer.what == what
    assert answer.theirs == str(next(iter(change.values())))
    assert answer.ours not in ("", answer.theirs)
    dealer.send(wire.encode(GENERATE))
    assert isinstance(wire.decode_control(dealer.recv()), HelloRefused)


def test_a_forged_pool_never_reaches_the_transport(
    fleet: Fleet, references: list[Reference]
) -> None:
    worker = fleet.workers["prefill-1"]
    with insider() as network:
        dealer = dealer_to(network, worker)
        dealer.send(wire.encode(hello(worker, role=Role.DECODE)))
        assert isinstance(wire.decode_control(dealer.recv()), HelloAccepted)
        forged = PeerDescriptor(
            transport=worker.transport,
            agent="forged",
            descriptor=b"\x00" * 500,
            digest=b"\x01" * 32,
            num_blocks=10,
        )
        dealer.send(wire.encode(forged))
        grant = KvGrant(
            request_id="x", attempt=0, agent="forged", first_block=0, block_ids=[1], ttl_ms=1000
        )
        dealer.send(wire.encode(grant))
        refused = wire.decode_control(dealer.recv())
        assert isinstance(refused, PoolRefused)
        assert refused.reason
        closed = wire.decode_control(dealer.recv())
        assert isinstance(closed, KvClosed), "so that it does not wait for its blocks"
        assert closed.error
        assert counters(fleet, "prefill-1")["descriptors_refused"] == 1
    assert still_serves(fleet, references)


def test_requests_that_would_break_the_engine_are_answered(
    fleet: Fleet, worker: WorkerInfo, dealer: Any, references: list[Reference]
) -> None:
    """A router with wrong ideas: token ids outside of the vocabulary, a role's wrong message."""
    dealer.send(wire.encode(hello(worker)))
    assert isinstance(wire.decode_control(dealer.recv()), HelloAccepted)
    bad = msgspec.structs.replace(GENERATE, token_ids=[10**9])
    dealer.send(wire.encode(bad))
    if worker.role is Role.DECODE:
        failed = wire.decode_control(dealer.recv())
        assert "token ids" in failed.reason
        assert not failed.retryable
    else:
        wait_for(
            "the count",
            lambda: counters(fleet, worker.worker_id).get("unexpected_messages"),
        )
    assert still_serves(fleet, references)


@pytest.mark.parametrize("plane", ["control", "events"])
@pytest.mark.parametrize("secret", [None, "the secret of another cluster"])
def test_who_lacks_the_secret_gets_nowhere_and_is_counted(
    fleet: Fleet, worker: WorkerInfo, references: list[Reference], plane: str, secret: str | None
) -> None:
    before = turned_away(fleet, worker)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    network = Network(secret or SECRET, context)
    kind = zmq.DEALER if plane == "control" else zmq.SUB
    stranger = context.socket(kind) if secret is None else network.connecting(kind)
    if plane == "control":
        stranger.connect(worker.control)
        stranger.send(wire.encode(hello(worker)))
    else:
        stranger.subscribe(b"")
        stranger.connect(worker.events)
    wait_for("the count", lambda: turned_away(fleet, worker) > before)
    assert still_serves(fleet, references)
    assert not stranger.poll(0), "an answer or an event came"
    network.close()


def turned_away(fleet: Fleet, worker: WorkerInfo) -> int:
    return counters(fleet, worker.worker_id).get("peers_turned_away", 0)


@pytest.mark.parametrize("role", [Role.DECODE, Role.PREFILL])
def test_stale_failed_expired_and_repeated_messages_never_spoil_an_answer(
    fleet: Fleet, worker: WorkerInfo, dealer: Any, references: list[Reference], role: Role
) -> None:
    """A member with the right secret and a pool that is nowhere asks for KV of requests
    that are over, and for blocks that the worker really has."""
    reference = references[-1]
    answer = complete(fleet, list(reference.prompt), max_tokens=NUM_TOKENS)
    sender = f"{role.value}-stranger"
    dealer.send(wire.encode(hello(worker, role=role, sender=sender)))
    assert isinstance(wire.decode_control(dealer.recv()), HelloAccepted)
    digest = authenticate_descriptor(SECRET.encode(), sender, b"nowhere", 64)
    pool = PeerDescriptor(
        transport=worker.transport,
        agent=sender,
        descriptor=b"nowhere",
        digest=digest,
        num_blocks=64,
    )
    root = chain_root(worker.model_fingerprint, seed=seed_of(SECRET))
    hashes = block_hashes(root, list(reference.prompt), worker.block_size)[:32]
    key: dict[str, Any] = {"request_id": answer["id"], "attempt": 1}
    grant: dict[str, Any] = {"agent": sender, "first_block": 0, "block_ids": list(range(32))}
    fetch = KvFetch(**key, **grant, part=1, hashes=hashes, ttl_ms=3000)
    dealer.send(wire.encode(pool))
    messages = [
        KvGrant(**key, **grant, ttl_ms=3000),  # stale: its request is over
        KvRenew(**key, ttl_ms=3000),
        fetch,  # of blocks that are here: its write fails
        fetch,  # repeated
        msgspec.structs.replace(fetch, part=2, ttl_ms=0),  # expired
        Abort(**key, part=3),
        msgspec.structs.replace(fetch, part=3),  # after its abort
        msgspec.structs.replace(fetch, part=4, hashes=[bytes(len(hashes[0]))] * 32),  # not here
        msgspec.structs.replace(fetch, part=0),  # no fetch at all
    ]
    for message in messages:
        dealer.send(wire.encode(message))
    closed = set()
    while closed < {0, 1, 2, 3, 4}:
        told = wire.decode_control(dealer.recv())
        if isinstance(told, KvClosed):
            closed.add(told.part)
            assert told.num_blocks == 0 or told.error, "nothing was written"
    again = complete(fleet, list(reference.prompt), max_tokens=NUM_TOKENS)
    for each in (answer, again):
        assert each["choices"][0]["token_ids"] == list(reference.output)
    assert still_serves(fleet, references)
