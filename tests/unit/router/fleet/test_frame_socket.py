"""A ZeroMQ socket on the event loop: no message is lost or reordered."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import zmq

from router.fleet import frame_socket
from router.fleet.frame_socket import MAX_AT_ONCE, MAX_TURN_S, FrameSocket
from tests.unit.router.router_harness import until


@dataclass
class Pair:
    """A served socket, and its peer."""

    near: zmq.Socket[bytes]
    far: zmq.Socket[bytes]
    taken: list[bytes] = field(default_factory=list)
    """Frames; those of one message that is `long` are taken one by one."""
    errors: list[Exception] = field(default_factory=list)

    def serve(self, max_queued: int = 1000) -> FrameSocket:
        return FrameSocket(self.near, self.take, self.errors.append, max_queued)

    def take(self, frames: list[bytes]) -> Iterator[None] | None:
        if frames == [b"bad"]:
            raise ValueError("bad")
        if frames[0] == b"long":
            return self._one_by_one(frames[1:])
        self.taken += frames
        return None

    def _one_by_one(self, frames: list[bytes]) -> Iterator[None]:
        for frame in frames:
            if frame == b"bad":
                raise ValueError("bad")
            self.taken.append(frame)
            yield


@pytest.fixture
def pair() -> Iterator[Pair]:
    context = zmq.Context()
    near, far = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    far.setsockopt(zmq.RCVTIMEO, 60_000)
    far.bind("inproc://pair")
    near.connect("inproc://pair")
    yield Pair(near, far)
    context.destroy(linger=0)


@pytest.fixture
def _slow_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at the clock finds that a turn's time is over."""
    ticks = itertools.count(step=2 * MAX_TURN_S)
    monkeypatch.setattr("router.fleet.frame_socket._clock", lambda: next(ticks))


async def taken_by_turn(pair: Pair, number: int) -> list[int]:
    """How many frames were taken after each turn of the loop, until there are `number`."""
    seen = [len(pair.taken)]
    while seen[-1] < number:
        await asyncio.sleep(0)
        seen.append(len(pair.taken))
    return seen


async def test_what_came_before_is_taken(pair: Pair) -> None:
    pair.far.send(b"early")
    served = pair.serve()
    await until(lambda: bool(pair.taken))
    assert (pair.taken, pair.errors) == ([b"early"], [])
    served.close()


async def test_messages_come_and_go_in_order_while_both_talk(pair: Pair) -> None:
    served = pair.serve()
    wanted = []
    for number in range(5 * MAX_AT_ONCE):
        frame = b"%d" % number
        wanted.append(frame)
        pair.far.send(frame)
        assert served.send([frame])
        if number % 7 == 0:
            await asyncio.sleep(0)
    await until(lambda: pair.taken == wanted)
    assert [pair.far.recv() for _ in wanted] == wanted
    assert not pair.errors
    served.close()


async def test_one_turn_s_messages_leave_in_the_next(pair: Pair) -> None:
    served = pair.serve()
    await asyncio.sleep(0)
    served.send([b"1"])
    served.send([b"2"])
    assert pair.far.poll(0) == 0
    await asyncio.sleep(0)
    assert [pair.far.recv(), pair.far.recv()] == [b"1", b"2"]
    served.close()


async def test_what_was_sent_leaves_before_the_socket_closes(pair: Pair) -> None:
    served = pair.serve()
    served.send([b"last words"])
    served.close(linger_ms=1000)
    assert pair.far.recv() == b"last words"
    served.close()


async def test_a_queue_that_is_full_refuses_and_drains_later() -> None:
    context = zmq.Context()
    near, far = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    near.setsockopt(zmq.SNDHWM, 2)
    far.setsockopt(zmq.RCVHWM, 2)
    far.bind("inproc://pair")
    near.connect("inproc://pair")
    pair = Pair(near, far)
    served = pair.serve(max_queued=10)
    sent = 0
    while served.send([b"%d" % sent]):
        sent += 1
        await asyncio.sleep(0)
    assert sent >= 10
    received: list[bytes] = []

    def drained() -> bool:
        while far.poll(0):
            received.append(far.recv())
        return len(received) == sent

    await until(drained)
    assert received == [b"%d" % number for number in range(sent)]
    served.close()
    context.destroy(linger=0)


async def test_what_a_message_fails_with_is_told(pair: Pair) -> None:
    served = pair.serve()
    pair.far.send(b"bad")
    await until(lambda: bool(pair.errors))
    assert isinstance(pair.errors[0], ValueError)
    served.close()


async def test_the_last_messages_are_taken_in_batches_and_then_the_end_is_told(pair: Pair) -> None:
    served = pair.serve()
    wanted = [b"%d" % number for number in range(5 * MAX_AT_ONCE)]
    for frame in wanted:
        pair.far.send(frame)
    ends: list[int] = []
    before = len(pair.taken)
    served.finish(lambda: ends.append(len(pair.taken)))
    sizes = [len(pair.taken) - before]
    while not ends:
        before = len(pair.taken)
        await asyncio.sleep(0)
        sizes.append(len(pair.taken) - before)
    assert pair.taken == wanted
    assert ends == [len(wanted)], "once, when all were taken"
    assert max(sizes) <= MAX_AT_ONCE
    served.close()


async def test_an_end_without_messages_is_told_at_once(pair: Pair) -> None:
    served = pair.serve()
    await asyncio.sleep(0)
    ends: list[str] = []
    served.finish(lambda: ends.append("end"))
    assert ends == ["end"]
    served.close()


@pytest.mark.parametrize(
    ("bound", "value"), [("MAX_FINISH_BYTES", 10 * MAX_AT_ONCE), ("MAX_FINISH_S", -1.0)]
)
async def test_a_peer_that_does_not_stop_delays_the_end_only_so_long(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, bound: str, value: float
) -> None:
    monkeypatch.setattr(frame_socket, bound, value)
    served = pair.serve()
    for _ in range(10 * MAX_AT_ONCE):
        pair.far.send(b"ten bytes.")
    ends: list[int] = []
    served.finish(lambda: ends.append(len(pair.taken)))
    while not ends:
        await asyncio.sleep(0)
    assert ends[0] <= 2 * MAX_AT_ONCE
    served.close()


@pytest.mark.parametrize("how", ["close", "error"])
async def test_no_end_is_told_after_an_error_or_a_close(pair: Pair, how: str) -> None:
    served = pair.serve()
    for number in range(2 * MAX_AT_ONCE):
        pair.far.send(b"%d" % number)
    pair.far.send(b"bad")
    ends: list[str] = []
    served.finish(lambda: ends.append("end"))
    if how == "close":
        served.close()
        await asyncio.sleep(0)
        assert len(pair.taken) <= MAX_AT_ONCE
    else:
        await until(lambda: bool(pair.errors))
        await asyncio.sleep(0)
    assert not ends
    served.close()


@pytest.mark.usefixtures("_slow_clock")
async def test_slow_messages_leave_the_loop_to_others(pair: Pair) -> None:
    served = pair.serve()
    for number in range(5):
        pair.far.send(b"%d" % number)
    assert set(await taken_by_turn(pair, 5)) >= {1, 2, 3, 4}, "one message a turn"
    served.close()


@pytest.mark.usefixtures("_slow_clock")
async def test_the_rest_of_a_slow_message_is_taken_in_later_turns_and_before_the_next(
    pair: Pair,
) -> None:
    served = pair.serve()
    pair.far.send_multipart([b"long", b"1", b"2", b"3"])
    pair.far.send(b"4")
    assert set(await taken_by_turn(pair, 4)) >= {1, 2, 3}, "one step a turn"
    assert pair.taken == [b"1", b"2", b"3", b"4"]
    served.close()


@pytest.mark.usefixtures("_slow_clock")
async def test_sending_much_does_not_lengthen_the_turns_of_receiving(pair: Pair) -> None:
    """What is sent is flushed with a look for messages, since that resets ZeroMQ's signal."""
    served = pair.serve()
    for number in range(40):
        pair.far.send(b"%d" % number)
    most = 0
    while len(pair.taken) < 40:
        served.send([b"x"])
        before = len(pair.taken)
        await asyncio.sleep(0)
        most = max(most, len(pair.taken) - before)
    assert most <= 2
    served.close()


async def test_a_message_whose_rest_fails_is_told_and_dropped(pair: Pair) -> None:
    served = pair.serve()
    pair.far.send_multipart([b"long", b"1", b"bad", b"2"])
    await until(lambda: bool(pair.errors))
    assert (pair.taken, len(pair.errors)) == ([b"1"], 1)
    await asyncio.sleep(0)
    assert (pair.taken, len(pair.errors)) == ([b"1"], 1)
    served.close()


@pytest.mark.usefixtures("_slow_clock")
async def test_nothing_is_taken_once_the_socket_is_closed(pair: Pair) -> None:
    served = pair.serve()
    pair.far.send_multipart([b"long", b"1", b"2", b"3"])
    await taken_by_turn(pair, 1)
    served.close()
    for _ in range(5):
        await asyncio.sleep(0)
    assert pair.taken == [b"1"]


async def test_a_step_that_closes_the_socket_is_the_last(pair: Pair) -> None:
    taken: list[bytes] = []

    def one_by_one(frames: list[bytes]) -> Iterator[None]:
        for frame in frames:
            taken.append(frame)
            served.close()
            yield

    served = FrameSocket(pair.near, one_by_one, pair.errors.append, 1000)
    pair.far.send_multipart([b"1", b"2"])
    await until(lambda: bool(taken))
    await asyncio.sleep(0)
    assert (taken, pair.errors) == ([b"1"], [])


@pytest.mark.usefixtures("_slow_clock")
async def test_the_rest_of_a_message_is_among_the_last(pair: Pair) -> None:
    served = pair.serve()
    pair.far.send_multipart([b"long", b"1", b"2", b"3"])
    pair.far.send(b"4")
    await taken_by_turn(pair, 1)
    ends: list[int] = []
    served.finish(lambda: ends.append(len(pair.taken)))
    await until(lambda: bool(ends))
    assert pair.taken == [b"1", b"2", b"3", b"4"]
    assert ends == [4]
    served.close()
