"""A request leaves decode worker D in mid-stream, and E goes on with D's blocks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.handoff_messages import HandoffToken, KvAsk, KvBegun, KvClosed, KvGrant
from protocol.messages import Abort, AttemptFailed, HandOver, KvPeer, NotKept, PrefillDone
from tests.effort import times
from tests.unit.decode_worker.handover_pair import LEAVE, PROMPT, Handover
from tests.unit.fake_model import continuation
from tests.unit.worker_harness import GRACE_S, LANDING_S, ROUTER, TTL_S, Lapsed
from worker.counters import Count

NEXT = ("r", 2)


@pytest.fixture(params=[False, True], ids=["one by one", "one ahead"])
def pair(request: pytest.FixtureRequest) -> Iterator[Handover]:
    made = Handover(ahead=request.param)
    yield made
    made.settle()
    made.close()


# -- one thing at a time -----------------------------------------------------------------------


def test_the_other_worker_goes_on_without_computing_anything_again(pair: Handover) -> None:
    pair.run_to(5)
    answer = pair.leave()
    assert (answer.keeps_kv, answer.num_output, answer.next_attempt) == (True, 5, 2)
    assert answer.trace.num_decode_steps == 4
    pair.go_on()
    pair.settle()
    assert [token for _, token in sorted(pair.tokens.items())] == continuation(PROMPT, 12)
    assert pair.e.counter(Count.PREFILL_TOKENS) == 0
    assert pair.e.counter(Count.BLOCKS_RECEIVED) == pair.d.counter(Count.BLOCKS_SENT) == 4
    assert pair.d.counter(Count.HANDOVERS) == 1
    (done,) = pair.ends_of_d()
    assert isinstance(done, PrefillDone)
    assert (done.trace.blocks_moved, done.trace.cached_tokens) == (4, 14)


def test_only_blocks_that_the_other_worker_lacks_move(pair: Handover) -> None:
    pair.e.server.inbox.append((ROUTER, pair.generate(0, 0)))
    while len(pair.tokens) < 12:
        pair.turn("e")
    pair.tokens.clear()
    pair.run_to(5)
    pair.leave()
    pair.go_on()
    pair.settle()
    assert pair.d.counter(Count.BLOCKS_SENT) == 1, "of 14 tokens the last 2 were not cached"
    assert [token for _, token in sorted(pair.tokens.items())] == continuation(PROMPT, 12)


@pytest.mark.parametrize("num_tokens", [1, 2, 5])
def test_what_was_cached_for_the_first_token_stays_known(pair: Handover, num_tokens: int) -> None:
    """E, and a router that resumes the stream there, count what D had cached."""
    pair.is_resumable = True
    pair.d.server.inbox.append((ROUTER, pair.generate(0, 0)))
    while len(pair.tokens) < 12:
        pair.turn("d")
    pair.tokens.clear()
    pair.run_to(num_tokens)
    assert pair.cached == 8
    pair.leave()
    pair.go_on()
    while len(pair.tokens) < num_tokens + 2:
        pair.round()
    pair.resume("e")
    assert pair.tokens, "E keeps the stream"


def test_what_has_no_token_yet_is_let_go(pair: Handover) -> None:
    waiting = pair.generate(1, 0, KvPeer(worker_id="p", incarnation="p-i", control=""))
    pair.d.server.inbox.append((ROUTER, waiting))
    pair.turn("d")
    assert pair.leave().keeps_kv is False
    assert [type(m) for _, m in pair.d.peers.sent] == [KvAsk, KvGrant, Abort]
    pair.d.peers.inbox.append(("p-i", KvClosed(request_id="r", attempt=1)))


def test_one_that_is_not_here_is_not_answered(pair: Handover) -> None:
    pair.d.server.inbox.append((ROUTER, LEAVE))
    pair.turn("d")
    assert pair.ends == []
    assert pair.d.counter(Count.STALE_MESSAGES) == 1


def test_a_router_that_changes_its_mind_frees_the_blocks(pair: Handover) -> None:
    pair.run_to(5)
    pair.leave()
    pair.d.server.inbox.append((ROUTER, Abort(request_id="r", attempt=2)))
    pair.turn("d")
    assert pair.d.scheduler.blocks.num_pinned == 0
    assert pair.ends_of_d() == []


def test_a_router_that_is_gone_frees_the_blocks(pair: Handover) -> None:
    pair.run_to(5)
    pair.leave()
    pair.d.server.gone.append(ROUTER)
    pair.turn("d")
    assert pair.d.scheduler.blocks.num_pinned == 0


def test_nobody_who_asks_for_the_blocks_ends_with_the_deadline(pair: Handover) -> None:
    pair.run_to(5)
    pair.leave()
    pair.clock.now += 61.0
    pair.turn("d")
    (failed,) = pair.ends_of_d()
    assert isinstance(failed, AttemptFailed)
    assert failed.retryable
    assert (failed.request_id, failed.attempt) == NEXT


def test_the_worker_stays_until_the_blocks_have_moved(pair: Handover) -> None:
    pair.run_to(5)
    pair.d.stop.since = pair.clock.now
    pair.leave()
    assert not pair.d.host.lifecycle.is_finished(pair.d.role.num_jobs)
    pair.go_on()
    for _ in range(3):
        pair.deliver("d")
        pair.turn("d")
        pair.deliver("e")
        pair.turn("e")
    assert pair.d.transfers.writes
    assert not pair.d.host.lifecycle.is_finished(pair.d.role.num_jobs)
    for _ in range(2):
        pair.write_lands()
        pair.write_finishes()
        pair.turn("d")
    assert pair.d.host.lifecycle.is_finished(pair.d.role.num_jobs)


def test_when_the_grace_is_over_the_router_hears_that_it_failed(pair: Handover) -> None:
    pair.run_to(5)
    pair.leave()
    pair.d.stop.since = pair.clock.now
    pair.clock.now += 5.1
    pair.d.worker.run()
    pair.turn("d")
    (failed,) = pair.ends_of_d()
    assert isinstance(failed, AttemptFailed)
    pair.d.server.inbox.append((ROUTER, Abort(request_id="r", attempt=2)))


def test_after_a_lapse_it_comes_back_when_no_blocks_of_before_move(pair: Handover) -> None:
    pair.run_to(5)
    pair.leave()
    pair.go_on()
    start_moving(pair)
    pair.d.host.lifecycle.join(Lapsed())
    pair.d.server.inbox.append((ROUTER, pair.generate(3, 0)))
    pair.turn("d")
    (refused,) = pair.ends_of_d()
    assert isinstance(refused, AttemptFailed)
    assert (refused.attempt, refused.retryable) == (3, True)
    assert pair.d.server.incarnations == [], "a write may still land"
    while pair.d.transfers.writes:
        pair.write_lands()
        pair.write_finishes()
    pair.turn("d")
    pair.turn("d")
    assert len(pair.d.server.incarnations) == 1
    assert pair.d.role.num_jobs == 0


def test_the_first_token_comes_before_the_end_of_an_empty_handoff(pair: Handover) -> None:
    """Where the other worker has every block, the answer to its grant closes the handoff."""
    pair.prompt = list(range(8))
    pair.e.server.inbox.append((ROUTER, pair.generate(0, 0)))
    while len(pair.tokens) < 12:
        pair.turn("e")
    pair.tokens.clear()
    pair.run_to(5)  # 12 tokens with their KV
    pair.leave()
    pair.go_on()
    told: list[type] = []
    for _ in range(2):  # asked and begun, granted and closed
        pair.turn("e")
        pair.deliver("d")
        pair.turn("d")
        told += [type(message) for message in pair.to_e]
        pair.deliver("e")
    assert told == [KvBegun, HandoffToken, KvClosed]
    pair.settle()
    assert pair.d.counter(Count.BLOCKS_SENT) == 0


# -- streams that are resumed ------------------------------------------------------------------


@pytest.fixture
def stream(pair: Handover) -> Handover:
    """One that may be resumed, with five tokens."""
    pair.is_resumable = True
    pair.run_to(5)
    return pair


def start_moving(pair: Handover) -> None:
    """The other worker has granted, and writes are under way."""
    while not pair.d.transfers.writes:
        for name in "ed":
            pair.turn(name)
            pair.deliver(name)


def test_a_resumed_stream_leaves_a_worker_that_drains(stream: Handover) -> None:
    stream.resume("d")
    stream.d.stop.since = stream.clock.now
    assert not stream.d.host.lifecycle.is_finished(stream.d.role.num_jobs)
    answer = stream.leave(HandOver(request_id="r", attempt=65537, next_attempt=65538))
    assert (answer.attempt, answer.keeps_kv) == (65537, True)
    assert answer.num_output == len(stream.tokens)
    stream.go_on(65538)
    stream.settle()
    assert [token for _, token in sorted(stream.tokens.items())] == continuation(PROMPT, 12)
    assert stream.e.counter(Count.PREFILL_TOKENS) == 0
    assert isinstance(stream.ends_of_d()[0], PrefillDone)
    assert stream.d.host.lifecycle.is_finished(stream.d.role.num_jobs)


def test_it_is_resumed_while_its_blocks_move(stream: Handover) -> None:
    """The worker that they leave does not have it any more. What is granted is written at once, so
    that the rest needs no router."""
    stream.leave()
    stream.go_on()
    start_moving(stream)
    stream.resume("d", "e")
    assert [type(m) for m in stream.ends_of_d()] == [NotKept]
    assert len(stream.tokens) == 4, "the fifth comes with the blocks"
    stream.settle()
    assert [token for _, token in sorted(stream.tokens.items())] == continuation(PROMPT, 12)
    assert stream.e.counter(Count.PREFILL_TOKENS) == 0


def test_nobody_comes_while_its_blocks_move(stream: Handover) -> None:
    stream.leave()
    stream.go_on()
    start_moving(stream)
    stream.resume()
    stream.clock.now += GRACE_S + 1
    stream.settle()
    assert stream.e.counter(Count.STREAMS_ABANDONED) == 1
    assert stream.tokens == {}


# -- everything at once ------------------------------------------------------------------------

FAULTS = {
    "write fails": lambda pair: pair.write_fails(),
    "D loses E": lambda pair: pair.lose_e(),
    "the router gives up": lambda pair: _give_up(pair),
    "the router is lost": lambda pair: pair.d.server.gone.append(ROUTER),
    "a grant runs out": lambda pair: _pass_time(pair, TTL_S + 0.1),
    "a moment": lambda pair: _pass_time(pair, LANDING_S / 3),
}
STEPS = {
    "D turns": lambda pair: pair.turn("d"),
    "E turns": lambda pair: pair.turn("e"),
    "D hears": lambda pair: pair.deliver("d"),
    "E hears": lambda pair: pair.deliver("e"),
    "a write lands": lambda pair: pair.write_lands(),
    "a write finishes": lambda pair: pair.write_finishes(),
}


def _give_up(pair: Handover) -> None:
    for bench in (pair.d, pair.e):
        bench.server.inbox.append((ROUTER, Abort(request_id="r", attempt=2)))


def _pass_time(pair: Handover, seconds: float) -> None:
    pair.clock.now += seconds


@settings(deadline=None, max_examples=times(30, 150))
@given(
    length=st.integers(1, 17),
    before=st.integers(1, 11),
    is_resumable=st.booleans(),
    ahead=st.booleans(),
    steps=st.lists(st.sampled_from([*STEPS, *FAULTS]), max_size=40),
)
def test_in_any_order_and_with_any_fault_nothing_is_left_or_wrong(
    length: int, before: int, is_resumable: bool, ahead: bool, steps: list[str]
) -> None:
    pair = Handover(prompt=range(length), ahead=ahead)
    pair.is_resumable = is_resumable
    pair.run_to(before)
    pair.leave()
    pair.go_on()
    for step in steps:
        (STEPS | FAULTS)[step](pair)
    pair.settle()
    ended = len(pair.tokens) == 12
    told = [m for name, m in pair.ends if name == "e"]
    assert all(isinstance(m, AttemptFailed) and m.retryable for m in told)
    assert len(pair.ends_of_d()) <= 1
    if not set(steps) & set(FAULTS):
        assert ended
        assert isinstance(pair.ends_of_d()[0], PrefillDone)
    elif "the router gives up" not in steps:
        assert ended or told
    pair.close()
