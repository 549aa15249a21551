"""A decode worker keeps its promises, and its blocks, whatever prefill workers do."""

from __future__ import annotations

import msgspec
import pytest

from kv_transfer.handoff.key import HandoffKey
from protocol.events import WorkerStats
from protocol.handoff_messages import KvAsk, KvBegun, KvClosed
from protocol.messages import (
    Abort,
    AttemptFailed,
    FinishReason,
    KvPeer,
)
from tests.sequences import greedy
from tests.unit.decode_worker.exchanges import (
    LOCAL,
    PROMPT,
    REMOTE,
    deliver_blocks,
    first_token,
    say,
    tokens_of,
    turn,
)
from tests.unit.fake_model import continuation
from tests.unit.worker_harness import LANDING_S, DecodeBench
from worker.counters import Count


@pytest.mark.parametrize("how", ["gone", "forgotten", "closed"])
@pytest.mark.parametrize("blocks_came", [False, True])
def test_a_first_token_that_cannot_come_is_not_waited_for(
    d: DecodeBench, how: str, blocks_came: bool
) -> None:
    say(d, REMOTE)
    if blocks_came:
        deliver_blocks(d)
        turn(d)
    if how == "closed":
        d.peers.inbox.append(("p-i", KvClosed(request_id="r", attempt=1, error="broken")))
    else:
        (d.peers.dead if how == "gone" else d.peers.forgotten).append("p-i")
    (failed,) = turn(d)
    assert isinstance(failed, AttemptFailed)
    assert failed.retryable
    # What arrived is cached for the next attempt.
    assert d.scheduler.blocks.num_cached == (2 if blocks_came else 0)
    if how == "forgotten" and not blocks_came:  # it lives, and has to answer
        d.peers.inbox.append(("p-i", KvClosed(request_id="r", attempt=1)))
    turn(d)
    d.clock.now += LANDING_S
    turn(d)


@pytest.mark.parametrize("blocks_came", [False, True])
def test_a_fault_of_the_request_that_the_prefill_worker_tells_of_is_final(
    d: DecodeBench, blocks_came: bool
) -> None:
    say(d, REMOTE)
    if blocks_came:
        deliver_blocks(d)
        turn(d)
    closed = KvClosed(request_id="r", attempt=1, error="too slow", code="grammar_too_slow")
    d.peers.inbox.append(("p-i", closed))
    (failed,) = turn(d)
    assert isinstance(failed, AttemptFailed)
    assert (failed.reason, failed.retryable) == ("too slow", False)
    assert failed.code == "grammar_too_slow"
    d.clock.now += LANDING_S
    turn(d)


@pytest.mark.parametrize("has_come", ["nothing", "blocks", "token"])
def test_a_prefill_worker_that_falls_silent_is_not_waited_for_but_may_yet_write(
    d: DecodeBench, has_come: str
) -> None:
    say(d, REMOTE)
    if has_come == "blocks":
        deliver_blocks(d)
    if has_come == "token":
        d.peers.inbox.append(("p-i", first_token()))
    turn(d)
    d.peers.mute = ["another"]
    assert turn(d) == []
    d.peers.mute = ["p-i"]
    (failed,) = turn(d)
    assert isinstance(failed, AttemptFailed)
    assert failed.retryable
    d.clock.now += 100 * LANDING_S
    turn(d)
    fenced = 0 if has_come == "blocks" else 3
    assert d.sink.num_fenced_blocks == d.scheduler.blocks.num_pinned == fenced
    (failed,) = say(d, msgspec.structs.replace(REMOTE, attempt=2))
    assert isinstance(failed, AttemptFailed)
    assert d.sink.num_fenced_blocks == d.scheduler.blocks.num_pinned == fenced
    d.peers.inbox.append(("p-i", KvClosed(request_id="r", attempt=1)))
    turn(d)


def test_what_needs_nothing_of_a_silent_prefill_worker_goes_on(d: DecodeBench) -> None:
    say(d, REMOTE)
    deliver_blocks(d)
    d.peers.inbox.append(("p-i", first_token()))
    first = tokens_of(turn(d))
    d.peers.mute = ["p-i"]
    assert first + tokens_of(turn(d, 5)) == continuation(PROMPT, 4)


def test_only_the_named_prefill_worker_gives_the_first_token(d: DecodeBench) -> None:
    say(d, REMOTE)
    deliver_blocks(d)
    d.peers.inbox.append(("another", first_token(token_id=3)))
    assert turn(d) == []
    assert d.counter(Count.STALE_MESSAGES) == 1
    d.peers.inbox.append(("p-i", first_token()))
    assert tokens_of(turn(d, 5)) == continuation(PROMPT, 4)


@pytest.mark.parametrize("changes", [{"token_id": 50}, {"token_id": -1}, {"index": 1}])
def test_an_impossible_first_token_fails_its_attempt(
    d: DecodeBench, changes: dict[str, int]
) -> None:
    say(d, REMOTE)
    deliver_blocks(d)
    d.peers.inbox.append(("p-i", first_token(**changes)))
    (failed,) = turn(d)
    assert failed.retryable
    turn(d)


# -- sources that have not begun ------------------------------------------------------------------


@pytest.fixture
def unbegun(d: DecodeBench) -> DecodeBench:
    """REMOTE has asked, and its source has not answered."""
    d.peers.answers_asks = False
    assert say(d, REMOTE, turns=2) == []
    assert [type(message) for _, message in d.peers.sent] == [KvAsk]
    assert d.scheduler.blocks.num_pinned == 0
    return d


def test_nothing_is_reserved_before_the_source_has_begun(unbegun: DecodeBench) -> None:
    d = unbegun
    unbegun.peers.inbox.append(("p-i", KvBegun(request_id="r", attempt=1)))
    turn(d)
    assert d.scheduler.blocks.num_pinned == d.sink.num_fenced_blocks == 3
    deliver_blocks(d)
    d.peers.inbox.append(("p-i", first_token()))
    assert tokens_of(turn(d, 5)) == continuation(PROMPT, 4)


def test_the_first_token_may_come_before_anything_was_granted(unbegun: DecodeBench) -> None:
    d = unbegun
    d.peers.inbox.append(("p-i", first_token()))
    assert turn(d) == []
    d.peers.inbox.append(("p-i", KvBegun(request_id="r", attempt=1)))
    turn(d)
    deliver_blocks(d)
    assert tokens_of(turn(d, 5)) == continuation(PROMPT, 4)


@pytest.mark.parametrize("how", ["gone", "closed", "silent", "reset"])
def test_what_waits_for_a_source_that_will_not_begin_fails_at_once(
    unbegun: DecodeBench, how: str
) -> None:
    d = unbegun
    if how == "gone":
        d.peers.dead.append("p-i")
    elif how == "closed":
        closed = KvClosed(request_id="r", attempt=1, error="no prompt came in time")
        d.peers.inbox.append(("p-i", closed))
    elif how == "silent":
        d.peers.mute = ["p-i"]
    else:
        d.peers.forgotten.append("p-i")
    (failed,) = turn(d)
    assert isinstance(failed, AttemptFailed)
    assert (failed.retryable, failed.lacks_room) == (True, False)
    assert d.sink.num_fenced_blocks == d.scheduler.blocks.num_pinned == 0


def test_a_client_that_goes_away_before_the_grant_leaves_no_fence(unbegun: DecodeBench) -> None:
    d = unbegun
    say(d, Abort(request_id="r", attempt=1))
    assert [type(message) for _, message in d.peers.sent] == [KvAsk, Abort]
    d.peers.inbox.append(("p-i", KvBegun(request_id="r", attempt=1)))
    assert turn(d, 3) == []
    assert d.sink.num_fenced_blocks == d.scheduler.blocks.num_pinned == 0


@pytest.mark.parametrize("is_remote", [False, True])
def test_what_fits_only_beside_blocks_of_a_silent_worker_is_given_back_at_once(
    d: DecodeBench, is_remote: bool
) -> None:
    """A pool of 16 blocks, of which 13 stay fenced."""
    held = msgspec.structs.replace(REMOTE, token_ids=[1] * 50, request_id="held")
    say(d, held)
    d.peers.mute = ["p-i"]
    (failed,) = turn(d)
    assert (failed.request_id, failed.lacks_room) == ("held", False)
    other = KvPeer(worker_id="q", incarnation="q-i", control="inproc://q")
    large = msgspec.structs.replace(
        LOCAL, token_ids=list(range(16)), prefill=other if is_remote else None
    )
    (failed,) = say(d, large)
    assert (failed.request_id, failed.retryable, failed.lacks_room) == ("r", True, True)
    small = msgspec.structs.replace(LOCAL, attempt=2, sampling=greedy(2))
    d.clock.now += 0.2
    assert tokens_of(say(d, small, turns=8)) == continuation(PROMPT, 2)
    stats = [each for each in d.published if isinstance(each, WorkerStats)][-1]
    assert stats.blocks_stuck == 13
    d.peers.inbox.append(("p-i", KvClosed(request_id="held", attempt=1)))
    turn(d)


def test_one_that_has_outgrown_what_stuck_blocks_leave_is_given_back(d: DecodeBench) -> None:
    held = msgspec.structs.replace(REMOTE, token_ids=[1] * 50, request_id="held")
    say(d, held)
    d.peers.mute = ["p-i"]
    turn(d)
    grows = msgspec.structs.replace(LOCAL, sampling=greedy(9))
    sent = say(d, grows, turns=12)
    (failed,) = (message for message in sent if isinstance(message, AttemptFailed))
    assert failed.lacks_room
    assert tokens_of(sent) == continuation(PROMPT, 9)[: len(tokens_of(sent))] != []
    d.peers.inbox.append(("p-i", KvClosed(request_id="held", attempt=1)))
    turn(d)


def test_an_output_that_its_first_token_completes_needs_no_room_here(
    unbegun: DecodeBench,
) -> None:
    """Nothing was granted for it: the source is told to stop, and the router gets the token."""
    d = unbegun
    task = d.role.tasks.find(HandoffKey("r", 1))
    assert task is not None
    task.sequence.sampling = greedy(1)
    d.peers.inbox.append(("p-i", first_token(finish=FinishReason.LENGTH)))
    sent = turn(d)
    assert tokens_of(sent) == continuation(PROMPT, 1)
    (tokens,) = (each for step in sent for each in step.sequences)
    assert tokens.finish is FinishReason.LENGTH
    assert [type(message) for _, message in d.peers.sent] == [KvAsk, Abort]
    d.peers.inbox.append(("p-i", KvBegun(request_id="r", attempt=1)))
    assert turn(d, 3) == []
    assert d.scheduler.blocks.num_pinned == 0


def test_a_first_token_that_wrongly_ends_the_output_fails_the_attempt(
    unbegun: DecodeBench,
) -> None:
    unbegun.peers.inbox.append(("p-i", first_token(finish=FinishReason.STOP)))
    (failed,) = turn(unbegun)
    assert (type(failed), failed.retryable) == (AttemptFailed, True)
