"""Remote bytes become messages or a ProtocolError, and nothing else."""

from __future__ import annotations

import contextlib

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import wire
from protocol.control_message import ControlMessage
from protocol.errors import IncompatiblePeer, ProtocolError
from protocol.events import EventMessage, WorkerStats
from protocol.handoff_messages import KvGrant, KvWritten
from protocol.messages import Generate, Ping
from protocol.registration import WorkerInfo
from protocol.sampling import SamplingParams
from tests.effort import times
from tests.registration import registration

GENERATE = Generate(
    request_id="r",
    attempt=1,
    token_ids=[1, 2, 3],
    num_output=1,
    sampling=SamplingParams(max_tokens=5, seed=9, logit_bias={3: -1.0}, stop_token_ids=(2,)),
    deadline_ms=1000,
)
INFO = registration("w")


def test_messages_survive_the_wire() -> None:
    assert wire.decode_control(wire.encode(GENERATE)) == GENERATE
    written = KvWritten(request_id="r", attempt=0, first_block=2, num_blocks=3)
    assert wire.decode_notification(wire.encode(written)) == written
    assert wire.decode_worker_info(wire.encode_worker_info(INFO)) == INFO


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        b"hello",
        wire.encode(GENERATE)[:-3],
        wire.encode(GENERATE) + b"\x00",
        msgspec.msgpack.encode({"type": "Nonsense"}),
        msgspec.msgpack.encode({"type": "Ping"}),
        msgspec.msgpack.encode({"type": "Ping", "nonce": "1"}),
        msgspec.msgpack.encode({"type": "Ping", "nonce": 1, "extra": 2}),
        msgspec.msgpack.encode([1] * 10),
        b"\x91" * 100_000,
        wire.encode(
            KvWritten(request_id="a", attempt=0, first_block=0, num_blocks=1)
        ),  # right format, wrong plane
    ],
)
def test_what_is_no_control_message_is_refused(frame: bytes) -> None:
    with pytest.raises(ProtocolError, match="control frame"):
        wire.decode_control(frame)


def test_frames_beyond_the_limit_are_not_even_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_MESSAGE_BYTES", 4)
    with pytest.raises(ProtocolError, match="exceeds 4"):
        wire.decode_control(wire.encode(Ping(nonce=1)))


@pytest.mark.parametrize("size", [0, 1, 32 * 1024, 32 * 1024 + 1, 100_000])
def test_a_long_message_travels_in_frames_that_are_small_enough(size: int) -> None:
    encoded = bytes(i % 251 for i in range(size))
    frames = wire.parts(encoded)
    assert max(map(len, frames)) <= wire.MAX_FRAME_BYTES // 2
    assert wire.joined(frames) == encoded


def test_frames_that_are_no_parts_of_a_message_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    part = b"x" * (32 * 1024)
    for frames in ([b"", b"x"], [b"x", b"y"], [part, b""], [part, b"x", b"y"]):
        with pytest.raises(ProtocolError, match="not the parts"):
            wire.joined(frames)
    monkeypatch.setattr(wire, "MAX_MESSAGE_BYTES", 2 * len(part))
    with pytest.raises(ProtocolError, match="exceeds"):
        wire.joined([part, part, b"x"])


KINDS = {
    wire.decode_control: ControlMessage,
    wire.decode_event: EventMessage,
    wire.decode_notification: KvWritten,
    wire.decode_worker_info: WorkerInfo,
}


@settings(derandomize=True, max_examples=times(200, 500), deadline=None)
@given(st.binary(max_size=400), st.sampled_from([GENERATE, Ping(nonce=1)]), st.integers(0, 400))
def test_mutated_frames_never_raise_anything_else(
    noise: bytes, message: ControlMessage, position: int
) -> None:
    frame = wire.encode(message)
    at = position % len(frame)
    mutated = frame[:at] + noise + frame[at + len(noise) :]
    for decode, kind in KINDS.items():
        with contextlib.suppress(ProtocolError):
            assert isinstance(decode(mutated), kind)


def test_planes_do_not_mix() -> None:
    stats = WorkerStats(
        worker_id="w",
        incarnation="i",
        num_waiting=0,
        num_running=0,
        queued_tokens=0,
        blocks_total=1,
        blocks_used=0,
        blocks_cached=0,
    )
    assert wire.decode_event(wire.encode(stats)) == stats
    with pytest.raises(ProtocolError):
        wire.decode_control(wire.encode(stats))


def test_incompatible_peers_are_told_both_values() -> None:
    error = IncompatiblePeer("model", "aaa", "bbb")
    assert str(error) == "model differs: ours is aaa, the peer's is bbb"


def test_a_grant_speaks_of_its_request_and_attempt() -> None:
    grant = KvGrant(request_id="r", attempt=2, agent="x", first_block=0, block_ids=[4], ttl_ms=1000)
    decoded = wire.decode_control(wire.encode(grant))
    assert isinstance(decoded, KvGrant)
    assert (decoded.request_id, decoded.attempt) == ("r", 2)
