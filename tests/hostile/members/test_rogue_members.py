"""A rogue router and a rogue worker with the right secret, beside a client, on a real fleet.

They send every lie about every field of every message, about the client's own request. The client
gets its tokens, and no process raises an error that it did not expect.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import psutil
import pytest

from cli.fleet import Fleet
from process.sockets.control import MAX_UNREAD_BYTES
from process.sockets.encrypted_sockets import Network
from protocol import wire
from protocol.control_message import ControlMessage
from protocol.events import EventMessage
from protocol.messages import KvPeer, Ping, Pong, Role
from protocol.registration import WorkerInfo
from protocol.sampling import SamplingParams
from tests.effort import in_turn, some, times
from tests.hostile.bystander import MemoryWatch
from tests.hostile.members.attacks import MEMBER_ATTACKS, Insider
from tests.hostile.members.lies import lies
from tests.hostile.members.rogue_worker import RogueWorker
from tests.http_client import HTTP
from tests.integration.fleets import complete, running_fleet, wait_for, workers
from tests.integration.reference import NUM_TOKENS, Reference, load_references
from tests.integration.test_foreign_frames import SECRET, dealer_to, hello

REQUEST = "a request of a client's"
SAMPLING = SamplingParams(
    max_tokens=3,
    seed=1,
    top_k=3,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    logit_bias={5: 1.5},
    logprobs=2,
    prompt_logprobs=2,
    stop_token_ids=(7,),
    grammar='start: "a" "b"',
    allowed_token_ids=tuple(range(500)),
    bad_words=((3, 4),),
)
EVERYDAY = 60
PATHS = ("/fleet", "/requests", "/metrics", "/doctor", "/v1/models", "/cache")


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with running_fleet(local_prefill_threshold_tokens=0, cluster_secret=SECRET) as made:
        yield made
        for name in made.processes:
            log = (made.log_dir / f"{name}.log").read_text()
            assert "Traceback" not in log, f"{name} did not expect a lie"


@pytest.fixture(scope="module")
def reference() -> Reference:
    return load_references()[20]


def told(network: Network, worker: WorkerInfo, role: Role, frames: list[bytes]) -> None:
    """Send the frames as a member of this role, and wait until the worker has read them."""
    socket = dealer_to(network, worker)
    socket.send(wire.encode(hello(worker, role=role)))
    for frame in frames:
        socket.send_multipart(wire.parts(frame))
    socket.send(wire.encode(hello(worker, role=role)))  # a lie may have ended the connection
    socket.send(wire.encode(Ping(nonce=7)))
    answer = None
    while answer != 7:
        message = wire.decode_control(wire.joined(socket.recv_multipart()))
        answer = message.nonce if isinstance(message, Pong) else None
    socket.close()


@pytest.mark.parametrize(("worker_id", "role"), in_turn(["prefill-1", "decode-1"], Role))
def test_a_rogue_member_harms_no_worker(
    fleet: Fleet, reference: Reference, worker_id: str, role: Role
) -> None:
    source = fleet.workers["prefill-1"]
    peer = KvPeer(
        worker_id=source.worker_id, incarnation=source.incarnation, control=source.control
    )
    true = {
        "request_id": REQUEST, "sampling": SAMPLING, "prefill": peer, "token_ids": [1, 2, 3],
        "num_output": 0, "trace_id": "", "deadline_ms": 500, "shared_tokens": 1, "ttl_ms": 200,
    }  # fmt: skip
    frames = [frame for _, frame in some(lies(ControlMessage, **true), EVERYDAY)]
    network = Network(SECRET)
    try:
        told(network, fleet.workers[worker_id], role, frames)
    finally:
        network.close()
    answer = complete(fleet, list(reference.prompt), max_tokens=NUM_TOKENS)
    assert answer["choices"][0]["token_ids"] == list(reference.output)


def during(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_a_rogue_worker_harms_neither_the_router_nor_another_s_answer(
    fleet: Fleet, reference: Reference, role: Role
) -> None:
    found = lies(ControlMessage, request_id=REQUEST)
    frames = [frame for name, frame in found if not name.startswith("Hello")]
    frames = some(frames, EVERYDAY)
    answers: list[list[int]] = []

    def ask() -> None:
        for _ in range(times(3, 40)):
            answer = complete(fleet, list(reference.prompt), max_tokens=NUM_TOKENS)
            answers.append(answer["choices"][0]["token_ids"])

    honest = fleet.workers[f"{role.value}-1"]
    with closing(RogueWorker(SECRET, fleet.redis_url, honest)) as worker:
        names = {"worker_id": "rogue", "incarnation": worker.info.incarnation}
        events = [frame for _, frame in some(lies(EventMessage, **names), EVERYDAY)]
        asking = during(ask)
        worker.lie(frames, events)
        asking.join(120)
        for path in PATHS:
            assert HTTP.get(f"{fleet.url}{path}").status_code == 200, path
    assert answers == [list(reference.output)] * times(3, 40)
    wait_for("the rogue to be gone", lambda: "rogue" not in workers(fleet))


@pytest.mark.nightly
def test_no_message_without_an_end_fills_a_process(fleet: Fleet, reference: Reference) -> None:
    """Two gigabytes are sent to each port; libzmq alone would keep them all."""
    processes = [psutil.Process(each.pid) for each in fleet.processes.values()]
    before = [each.memory_info().rss for each in processes]
    with ExitStack() as stack:
        watches = [stack.enter_context(MemoryWatch(each.pid)) for each in processes]
        MEMBER_ATTACKS["messages without an end"](Insider(SECRET, fleet.redis_url))
        grown = [each.take_peak() - rss for each, rss in zip(watches, before, strict=True)]
    assert max(grown) < MAX_UNREAD_BYTES + 400_000_000
    answer = complete(fleet, list(reference.prompt), max_tokens=NUM_TOKENS)
    assert answer["choices"][0]["token_ids"] == list(reference.output)
    wait_for("the rogue to be gone", lambda: "rogue" not in workers(fleet))


@pytest.mark.parametrize(
    "name", ["a rogue worker's large messages", "half handshakes at the workers' ports"]
)
def test_a_fleet_outlasts_crowds_and_large_messages(
    fleet: Fleet, reference: Reference, name: str
) -> None:
    MEMBER_ATTACKS[name](Insider(SECRET, fleet.redis_url))
    answer = complete(fleet, list(reference.prompt), max_tokens=NUM_TOKENS)
    assert answer["choices"][0]["token_ids"] == list(reference.output)
    wait_for("the rogue to be gone", lambda: "rogue" not in workers(fleet))
