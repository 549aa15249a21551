"""What the pool has evicted is loaded from host memory before a prompt is computed; the output is
that of a worker without tiers."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest

from kv_transfer.tiers.host_tier import HostTier
from protocol.messages import Abort, Generate, StepTokens
from scheduling import fetch_rule
from scheduling.sequence import SequenceState
from tests.effort import times
from tests.sequences import greedy
from tests.unit.fake_model import BLOCK, VOCAB, continuation
from tests.unit.worker_harness import ROUTER, Clock, DecodeBench, pinned_for_peers
from worker.counters import Count

POOL, SLOTS = 8, 32
ONE = [3 * i % 11 for i in range(4 * BLOCK + 1)]
TWO = [5 * i % 13 for i in range(3 * BLOCK + 2)]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[DecodeBench]:
    monkeypatch.setattr(fetch_rule, "SLACK_S", -1.0)  # anything is quicker than computing
    made = DecodeBench("d", Clock(), POOL, host_slots=SLOTS)
    yield made
    assert made.scheduler.blocks.num_pinned == 0
    assert made.model.strays == []
    made.close()


def ask(bench: DecodeBench, name: str, prompt: list[int], **fields: Any) -> None:
    message = Generate(
        request_id=name,
        attempt=0,
        token_ids=prompt,
        num_output=0,
        sampling=greedy(2),
        deadline_ms=60_000,
        **fields,
    )
    bench.server.inbox.append((ROUTER, message))


def turn(bench: DecodeBench, count: int = 1) -> None:
    for _ in range(count):
        bench.clock.now += 0.3
        bench.worker.turn()


def run(bench: DecodeBench, name: str, prompt: list[int], **fields: Any) -> int:
    """Generate, and return how many tokens of the prompt were computed."""
    before = bench.counter(Count.PREFILL_TOKENS)
    ask(bench, name, prompt, **fields)
    tokens = finish(bench, name)
    assert tokens == continuation(prompt, 2)
    return bench.counter(Count.PREFILL_TOKENS) - before


def finish(bench: DecodeBench, name: str) -> list[int]:
    """The tokens of one request, when there is none left."""
    tokens: list[int] = []
    for _ in range(40):
        turn(bench)
        for message in bench.take_sent():
            for each in message.sequences if isinstance(message, StepTokens) else ():
                tokens += each.token_ids if each.request_id == name else []
        if not bench.scheduler.sequences:
            break
    turn(bench, 2)
    return tokens


def host_tier(bench: DecodeBench) -> HostTier:
    tiers = bench.host.tiers._tiers
    assert tiers is not None
    return tiers.host


def test_a_prompt_whose_blocks_were_evicted_is_loaded_and_not_computed(bench: DecodeBench) -> None:
    prompts = [ONE, TWO, [*TWO[::-1], 1, 2, 3]]
    for name, prompt in zip("abc", prompts, strict=True):
        assert run(bench, name, prompt) == len(prompt)
    held = len(bench.scheduler.blocks.match(root(bench, ONE)))
    assert held < 4, "the pool has evicted it"
    assert run(bench, "again", ONE) == 1
    assert bench.counter(Count.LOADED_TOKENS) == (4 - held) * BLOCK
    counted = (Count.PREFILL_TOKENS, Count.CACHED_TOKENS, Count.LOADED_TOKENS)
    assert sum(bench.counter(name) for name in counted) == sum(map(len, [*prompts, ONE]))


def root(bench: DecodeBench, prompt: list[int]) -> list[bytes]:
    message = Generate(
        request_id="x", attempt=0, token_ids=prompt, num_output=0, sampling=greedy(2),
        deadline_ms=1,
    )  # fmt: skip
    return bench.host.intake.sequence(message, 0.0).hashes


def warm(bench: DecodeBench) -> None:
    """Have ONE in host memory, and not in the pool."""
    run(bench, "one", ONE)
    run(bench, "two", TWO)
    bench.scheduler.blocks.clear_cache()


def test_the_trace_says_what_came_from_host_memory(bench: DecodeBench) -> None:
    warm(bench)
    ask(bench, "again", ONE)
    traces = []
    for _ in range(20):
        turn(bench)
        for message in bench.take_sent():
            assert isinstance(message, StepTokens)
            traces += [each.trace for each in message.sequences if each.trace is not None]
    (trace,) = traces
    assert (trace.cached_tokens, trace.fetched_tokens) == (0, 4 * BLOCK)
    (span,) = trace.fetches
    assert (span.tier, span.holder, span.first_block, span.asked, span.found) == (
        "host memory", "", 0, 4, 4,
    )  # fmt: skip
    assert span.done_us >= span.sent_us


def test_others_go_on_while_a_prompt_is_loaded(bench: DecodeBench) -> None:
    warm(bench)
    bench.tier_thread.is_held = True
    ask(bench, "again", ONE)
    turn(bench)
    (sequence,) = bench.scheduler.sequences
    assert sequence.state is SequenceState.FETCHING
    ask(bench, "short", ONE[3:6])
    turn(bench, 6)
    assert [each.request_id for each in bench.scheduler.sequences] == ["again"]
    bench.tier_thread.is_held = False
    assert finish(bench, "again") == continuation(ONE, 2)


@pytest.mark.parametrize("bad", [0, 2])
def test_a_block_that_fails_is_computed_and_the_request_goes_on(
    bench: DecodeBench, bad: int
) -> None:
    warm(bench)
    tier = host_tier(bench)
    slot = tier.index.find(root(bench, ONE)[bad])
    assert slot is not None
    tier.slot(slot)[0] ^= 1
    assert run(bench, "again", ONE) == (4 - bad) * BLOCK + 1
    assert bench.counter(Count.HOST_TIER_FAILURES) == 1


def test_a_tier_that_raises_costs_a_computation(
    bench: DecodeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm(bench)

    def broken(*_: object) -> None:
        raise RuntimeError("the copy engine is on fire")

    monkeypatch.setattr(host_tier(bench)._copies, "load", broken)
    assert run(bench, "again", ONE) == len(ONE)
    assert bench.counter(Count.HOST_TIER_FAILURES) > 0


@pytest.mark.parametrize("how", ["abort", "deadline"])
def test_blocks_of_a_request_that_ends_in_mid_load_stay_pinned_until_it_is_over(
    bench: DecodeBench, how: str
) -> None:
    warm(bench)
    bench.tier_thread.is_held = True
    ask(bench, "again", ONE)
    turn(bench)
    bench.tier_thread.run(1)  # copied, and not noticed yet
    if how == "abort":
        bench.server.inbox.append((ROUTER, Abort(request_id="again", attempt=0)))
    else:
        bench.clock.now += 61.0
    ask(bench, "next", TWO)
    bench.host.tiers.turn = lambda: None  # type: ignore[method-assign]
    turn(bench)
    assert len(pinned_for_peers(bench)) == bench.scheduler.blocks.num_pinned - blocks_of(bench)
    assert len(pinned_for_peers(bench)) == 4
    del bench.host.tiers.turn
    bench.tier_thread.is_held = False
    assert finish(bench, "next") == continuation(TWO, 2)
    assert pinned_for_peers(bench) == []


def blocks_of(bench: DecodeBench) -> int:
    return sum(len(each.block_table) for each in bench.scheduler.sequences)


def test_loading_is_left_when_computing_is_quicker(
    bench: DecodeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm(bench)
    monkeypatch.setattr(fetch_rule, "SLACK_S", 100.0)
    assert run(bench, "again", ONE) == len(ONE)
    assert bench.counter(Count.LOADED_TOKENS) == 0


def test_a_request_that_forbids_tiers_neither_loads_nor_leaves_blocks(bench: DecodeBench) -> None:
    warm(bench)
    held = set(host_tier(bench).index.names())
    assert run(bench, "again", ONE, stays_in_pool=True) == len(ONE)
    other = [each + 1 for each in ONE]
    assert run(bench, "other", other, stays_in_pool=True) == len(other)
    run(bench, "next", TWO)
    assert set(host_tier(bench).index.names()) <= held | set(root(bench, TWO))


def test_prompts_whose_logits_are_wanted_are_computed_whole(bench: DecodeBench) -> None:
    warm(bench)
    message = Generate(
        request_id="again",
        attempt=0,
        token_ids=ONE,
        num_output=0,
        sampling=greedy(2, prompt_logprobs=0),
        deadline_ms=60_000,
    )
    bench.server.inbox.append((ROUTER, message))
    finish(bench, "again")
    assert bench.counter(Count.LOADED_TOKENS) == 0


@pytest.mark.parametrize("one_step_ahead", [False, True])
def test_many_requests_over_few_blocks_give_the_tokens_of_a_worker_without_tiers(
    monkeypatch: pytest.MonkeyPatch, one_step_ahead: bool
) -> None:
    """Documents are asked about in any order, clients go away, and the tier's thread is slow."""
    monkeypatch.setattr(fetch_rule, "SLACK_S", -1.0)
    rng = random.Random(5)
    bench = DecodeBench("d", Clock(), POOL, one_step_ahead=one_step_ahead, host_slots=SLOTS)
    documents = [[rng.randrange(VOCAB) for _ in range(4 * BLOCK)] for _ in range(5)]
    asked: dict[str, list[int]] = {}
    given: dict[str, list[int]] = defaultdict(list)
    gone: set[str] = set()
    for number in range(times(150, 2000)):
        name = f"r{number}"
        asked[name] = [*rng.choice(documents)[: rng.randrange(1, 17)], number % VOCAB]
        ask(bench, name, asked[name])
        if rng.random() < 0.2:
            name = f"r{rng.randrange(number + 1)}"
            gone.add(name)
            bench.server.inbox.append((ROUTER, Abort(request_id=name, attempt=0)))
        bench.tier_thread.is_held = rng.random() < 0.5
        for _ in range(rng.randrange(1, 7)):
            turn(bench)
            bench.scheduler.blocks.check()
        collect(bench, given)
    bench.tier_thread.is_held = False
    while bench.scheduler.sequences or bench.engine.is_ahead:
        turn(bench)
    collect(bench, given)
    turn(bench, 2)
    assert {name: given[name] for name in asked.keys() - gone} == {
        name: continuation(prompt, 2) for name, prompt in asked.items() if name not in gone
    }
    assert bench.counter(Count.LOADED_TOKENS) > 20 * BLOCK
    assert bench.scheduler.blocks.num_pinned == 0
    assert bench.model.strays == []
    host_tier(bench).index.check()
    bench.close()


def collect(bench: DecodeBench, given: dict[str, list[int]]) -> None:
    for message in bench.take_sent():
        for each in message.sequences if isinstance(message, StepTokens) else ():
            given[each.request_id] += each.token_ids
