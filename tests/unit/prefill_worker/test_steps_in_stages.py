"""A prefill worker whose pipeline has a step in each of three stages.

The stand-in for the stages computes as late as they may: when a step's result is waited for.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from protocol.handoff_messages import KvBegun, KvClosed
from protocol.messages import Abort, FirstToken, PrefillDone
from tests.unit.fake_model import continuation
from tests.unit.prefill_worker.prefill_harness import (
    PREFILL,
    PROMPT,
    ask,
    finish_writes,
    grant,
    say,
    say_of_d,
    types,
)
from tests.unit.worker_harness import Clock, DecodeBench, PrefillBench, land

SHORT = msgspec.structs.replace(PREFILL, request_id="short", token_ids=[9, 8, 7, 6, 5])
"""One chunk, of two blocks."""


@pytest.fixture
def p() -> Iterator[PrefillBench]:
    """The worker under test; nothing of it may be left when the test ends."""
    bench = PrefillBench("p", Clock())
    bench.engine.run_ahead(2, num_stages=3)
    yield bench
    assert bench.model.strays == [], "a block was written to that was free, or that a peer read"
    assert bench.scheduler.sequences == []
    assert bench.scheduler.blocks.num_pinned == 0, "blocks were left behind"
    assert bench.scheduler.blocks_under_way() == set()
    assert not bench.engine.is_ahead
    bench.close()


def test_chunks_of_one_prompt_are_in_consecutive_stages_and_leave_when_the_last_has_them(
    p: PrefillBench, d: DecodeBench
) -> None:
    p.server.inbox += [(d.as_peer, message) for message in (d.descriptor, ask(d))]
    assert types(say(p, PREFILL)) == [KvBegun]
    say_of_d(p, d, grant(d))
    assert p.model.log == ["launch 0", "launch 1"], "a third stage is free"
    assert [write.fence.is_done() for write in p.transfers.writes] == [False, False]
    say(p)
    assert p.model.log[2:] == ["launch 2", "read 0"]
    assert [write.fence.is_done() for write in p.transfers.writes] == [True, False]
    sent = say(p, turns=2)
    assert p.model.log[4:] == ["read 1", "read 2"]
    assert [m.token_id for m in sent if type(m) is FirstToken] == continuation(PROMPT, 1)
    for write in list(p.transfers.writes):
        land(write, p, d)
    assert d.memory.flatten()[: len(PROMPT)].tolist() == PROMPT
    finish_writes(p)
    assert types(say(p)) == [KvClosed, PrefillDone]


def test_blocks_of_an_ended_prompt_are_not_served_before_the_last_stage_has_them(
    p: PrefillBench,
) -> None:
    say(p, PREFILL, turns=2)
    hashes = next(iter(p.role.tasks)).sequence.hashes
    p.role.drop(next(iter(p.role.tasks)))
    under_way = p.scheduler.blocks_under_way()
    assert set(p.scheduler.blocks.match(hashes)) <= under_way
    assert len(under_way) == 5
    say(p, turns=2)


@pytest.mark.parametrize("when", ["launch", "late"])
def test_a_step_that_raises_withdraws_all_stages_and_costs_no_token(
    p: PrefillBench, when: str
) -> None:
    say(p, PREFILL, turns=2)
    p.model.explodes = when
    sent = say(p, SHORT, turns=8)
    assert p.model.explodes is None, "it has raised"
    firsts = {m.request_id: m.token_id for m in sent if type(m) is FirstToken}
    assert firsts == {
        "r": continuation(PROMPT, 1)[0],
        "short": continuation(SHORT.token_ids, 1)[0],
    }
    say(p, Abort(request_id="r", attempt=1), Abort(request_id="short", attempt=1))


def test_a_step_alone_takes_all_stages_and_counts_as_one(p: PrefillBench) -> None:
    """The step model learns the time from one step's end to the next one's."""
    seconds: list[float] = []
    p.scheduler.model.observe = lambda cost, s: seconds.append(s)  # type: ignore[method-assign]
    say(p, SHORT)
    p.clock.now += 0.3
    say(p)
    assert seconds == [pytest.approx(0.1)]
    say(p, PREFILL, turns=2)
    p.clock.now += 0.3
    say(p)
    p.clock.now += 0.1
    say(p)
    assert seconds[1:] == [pytest.approx(0.1), pytest.approx(0.1)]
    say(p, Abort(request_id="r", attempt=1), Abort(request_id="short", attempt=1), turns=2)
