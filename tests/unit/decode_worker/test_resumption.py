"""Streams that a decode worker keeps when their router is gone, and who gets them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from decode_worker import resumption
from process.sockets.control import Peer
from protocol.messages import (
    Abort,
    AttemptFailed,
    FinishReason,
    Generate,
    NotKept,
    Resume,
    Resumed,
    Role,
    StepTokens,
)
from tests.sequences import greedy
from tests.unit.fake_model import continuation
from tests.unit.worker_harness import GRACE_S, ROUTER, Clock, DecodeBench, Lapsed
from worker.counters import Count

OTHER = Peer(b"other", "other", Role.ROUTER)
PROMPT = list(range(10))
TOKENS = continuation(PROMPT, 12)
ASKED = Generate(
    request_id="r",
    attempt=1,
    token_ids=PROMPT,
    num_output=0,
    sampling=greedy(12),
    deadline_ms=90_000,
    is_resumable=True,
)
RESUME = Resume(request_id="r", attempt=65537)


@pytest.fixture
def d() -> Iterator[DecodeBench]:
    bench = DecodeBench("d", Clock())
    yield bench
    assert bench.scheduler.sequences == []
    assert bench.scheduler.blocks.num_pinned == 0, "blocks were left behind"
    bench.close()


def turn(d: DecodeBench, *messages: tuple[Peer, Any], turns: int = 1) -> list[tuple[Peer, Any]]:
    """Turns of the loop after messages, and what was sent to whom."""
    d.server.inbox += messages
    for _ in range(turns):
        d.worker.turn()
    sent = list(d.server.sent)
    d.server.sent.clear()
    return sent


def finish(d: DecodeBench) -> list[tuple[Peer, Any]]:
    return turn(d, turns=20)


def tokens_of(sent: list[tuple[Peer, Any]], router: Peer, attempt: int) -> list[int]:
    """All tokens that a router got, in order and without a hole."""
    tokens: list[int] = []
    for peer, message in sent:
        if peer != router:
            continue
        if isinstance(message, Resumed):
            assert message.attempt == attempt
            tokens = list(message.token_ids)
        elif isinstance(message, StepTokens):
            for sequence in message.sequences:
                assert (sequence.attempt, sequence.index) == (attempt, len(tokens))
                tokens += sequence.token_ids
    return tokens


def test_a_stream_goes_on_without_its_router_and_is_taken_up(d: DecodeBench) -> None:
    turn(d, (ROUTER, ASKED), turns=4)
    d.server.gone = [ROUTER]
    assert turn(d, turns=2) == [], "there is nobody to tell"
    steps = d.counter(Count.DECODE_TOKENS)
    sent = turn(d, (OTHER, RESUME)) + finish(d)
    assert isinstance(sent[0][1], Resumed)
    assert len(sent[0][1].token_ids) == steps
    assert tokens_of(sent, OTHER, RESUME.attempt) == TOKENS
    assert d.counter(Count.DECODE_TOKENS) == len(TOKENS)
    assert d.counter(Count.STREAMS_RESUMED) == 1


def test_a_finished_stream_is_kept_for_its_grace(d: DecodeBench) -> None:
    turn(d, (ROUTER, ASKED), turns=30)
    d.server.gone = [ROUTER]
    d.clock.now += GRACE_S - 1
    for router in (OTHER, ROUTER):
        ((peer, answer),) = turn(d, (router, RESUME))
        assert (peer, answer.token_ids, answer.finish) == (router, TOKENS, FinishReason.LENGTH)
    d.clock.now += 2
    turn(d)
    ((_, gone),) = turn(d, (OTHER, RESUME))
    assert isinstance(gone, NotKept)


def test_nobody_comes_in_time(d: DecodeBench) -> None:
    asked = msgspec.structs.replace(ASKED, sampling=greedy(40))
    turn(d, (ROUTER, asked), turns=4)
    d.server.gone = [ROUTER]
    turn(d, turns=2)
    d.clock.now += GRACE_S + 1
    turn(d)
    assert d.scheduler.sequences == []
    assert d.counter(Count.STREAMS_ABANDONED) == 1
    ((_, answer),) = turn(d, (OTHER, RESUME))
    assert isinstance(answer, NotKept)


@pytest.mark.parametrize("is_back_first", [False, True])
def test_a_router_that_comes_back_has_its_stream_elsewhere(
    d: DecodeBench, is_back_first: bool
) -> None:
    """Its new connection may be there before the old one counts as lost; others change nothing."""
    back = Peer(b"another connection", ROUTER.name, Role.ROUTER)
    turn(d, (ROUTER, ASKED), turns=4)
    d.server.peers = [OTHER, back] if is_back_first else [OTHER]
    d.server.gone = [ROUTER]
    turn(d)
    assert bool(d.scheduler.sequences) is not is_back_first
    d.server.peers = [OTHER, back]
    assert turn(d) == []
    assert d.scheduler.sequences == []
    ((_, answer),) = turn(d, (OTHER, RESUME))
    assert isinstance(answer, NotKept)


def test_without_the_log_probabilities_of_earlier_attempts_a_stream_cannot_be_resumed(
    d: DecodeBench,
) -> None:
    sampling = msgspec.structs.replace(ASKED.sampling, logprobs=0)
    later = msgspec.structs.replace(
        ASKED, token_ids=PROMPT + TOKENS[:1], num_output=1, sampling=sampling
    )
    turn(d, (ROUTER, later), turns=3)
    ((_, answer),) = [each for each in turn(d, (OTHER, RESUME)) if each[0] == OTHER]
    assert isinstance(answer, NotKept)
    d.server.gone = [ROUTER]
    turn(d)
    assert d.scheduler.sequences == []


def test_finished_streams_are_kept_within_bounds(
    d: DecodeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest go first."""
    monkeypatch.setattr(resumption, "MAX_KEPT_TOKENS", 2 * len(TOKENS) + 1)
    for name in ("first", "second", "third"):
        turn(d, (ROUTER, msgspec.structs.replace(ASKED, request_id=name)), turns=30)
    asked = [msgspec.structs.replace(RESUME, request_id=n) for n in ("first", "second", "third")]
    answers = turn(d, *[(OTHER, each) for each in asked])
    assert [type(answer) for _, answer in answers] == [NotKept, Resumed, Resumed]


def test_after_a_lapse_nothing_of_before_is_kept(d: DecodeBench) -> None:
    turn(d, (ROUTER, ASKED), turns=30)
    turn(d, (ROUTER, msgspec.structs.replace(ASKED, request_id="running")), turns=3)
    d.host.lifecycle.join(Lapsed())
    turn(d)
    assert len(d.server.incarnations) == 1
    for name in ("r", "running"):
        asked = msgspec.structs.replace(RESUME, request_id=name)
        ((_, answer),) = turn(d, (OTHER, asked))
        assert isinstance(answer, NotKept)


def test_a_worker_that_drains_waits_for_nobody(d: DecodeBench) -> None:
    turn(d, (ROUTER, ASKED), turns=4)
    d.stop.since = d.clock.now
    assert not d.host.lifecycle.is_finished(d.role.num_jobs)
    sent = turn(d, (OTHER, RESUME))
    assert [type(m) for peer, m in sent if peer == OTHER] == [Resumed, StepTokens]
    d.server.gone = [OTHER]
    turn(d)
    assert d.scheduler.sequences == []
    assert d.host.lifecycle.is_finished(d.role.num_jobs)


def test_the_former_router_is_fenced(d: DecodeBench) -> None:
    """It lives, or was only stopped: it hears of the end, and what it still says is stale."""
    turn(d, (ROUTER, ASKED), turns=4)
    sent = turn(d, (OTHER, RESUME))
    told = [message for peer, message in sent if peer == ROUTER]
    assert isinstance(told[0], AttemptFailed)
    assert (told[0].attempt, told[0].retryable) == (1, False)
    late = Abort(request_id="r", attempt=1)
    again = msgspec.structs.replace(ASKED, attempt=2)
    sent += turn(d, (ROUTER, late), (ROUTER, again)) + finish(d)
    assert tokens_of(sent, OTHER, RESUME.attempt) == TOKENS
    assert d.counter(Count.STALE_MESSAGES) == 2


def test_the_last_who_asks_has_it_and_may_abort_it(d: DecodeBench) -> None:
    turn(d, (ROUTER, ASKED), turns=3)
    turn(d, (OTHER, RESUME))
    later = Resume(request_id="r", attempt=2 << 16)
    turn(d, (ROUTER, later))
    ((_, refused),) = [each for each in turn(d, (OTHER, RESUME)) if each[0] == OTHER]
    assert isinstance(refused, NotKept), "an older life does not take it back"
    turn(d, (ROUTER, Abort(request_id="r", attempt=later.attempt)))
    assert d.scheduler.sequences == []


def test_a_request_that_is_not_resumable_ends_with_its_router(d: DecodeBench) -> None:
    turn(d, (ROUTER, msgspec.structs.replace(ASKED, is_resumable=False)), turns=3)
    d.server.gone = [ROUTER]
    turn(d)
    assert d.scheduler.sequences == []
    ((_, answer),) = turn(d, (OTHER, RESUME))
    assert isinstance(answer, NotKept)


def test_a_router_that_is_told_nothing_is_told_nothing_of_failures(d: DecodeBench) -> None:
    asked = msgspec.structs.replace(ASKED, deadline_ms=5_000)
    turn(d, (ROUTER, asked), turns=3)
    d.server.gone = [ROUTER]
    turn(d)
    d.clock.now += 6
    assert turn(d, turns=2) == []
    assert d.scheduler.sequences == []
