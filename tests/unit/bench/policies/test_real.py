"""Placements on real workers in turns: what is sent, in which order, and what counts as worse."""

from __future__ import annotations

import asyncio

import pytest

from bench.hot_prefix import Load as HotPrefix
from bench.policies.real import OTHER, OURS, Turn, is_worse, ratio, report, take_turns
from bench.policies.real_loads import AgentOptions, Sample, cut, hot_prefix, interference
from bench.tools.stream_load import StreamLoad
from simulator.traces.sessions import Session
from simulator.traces.sessions import Turn as Asked
from tests.unit.bench.engine.answering_server import StreamingServer

OPTIONS = AgentOptions(sessions=1, context=100, most_turns=3, span_s=1.0, pace=10.0)


def turn(ttft_s: float, gap_s: float = 0.01, split: float = 0.5) -> Turn:
    return Turn(Sample([ttft_s] * 10, [gap_s] * 10), split, 100.0)


def test_routers_take_turns_and_the_first_pair_warms_up() -> None:
    asked: list[tuple[str, int]] = []

    def run(router: str, pair: int) -> Turn:
        asked.append((router, pair))
        return turn(pair + (0.5 if router == OTHER else 0.0))

    pairs = take_turns(run, 2, lambda: True)
    assert asked == [(OURS, 0), (OTHER, 0), (OTHER, 1), (OURS, 1), (OURS, 2), (OTHER, 2)]
    assert [(ours.sample.ttft_s[0], other.sample.ttft_s[0]) for ours, other in pairs] == [
        (1.0, 1.5),
        (2.0, 2.5),
    ]


def test_no_pair_begins_after_the_time_is_over() -> None:
    numbers = list[int]()

    def run(router: str, pair: int) -> Turn:
        numbers.append(pair)
        return turn(0.1)

    assert len(take_turns(run, 9, lambda: len(numbers) < 6)) == 2
    assert numbers == [0, 0, 1, 1, 2, 2]


def test_only_what_is_worse_by_more_than_chance_fails() -> None:
    slower = [(turn(0.12), turn(0.10))] * 5
    assert ratio(slower, "TTFT p99, ms") == pytest.approx((1.2, 1.2, 1.2))
    assert is_worse(slower)
    assert not is_worse([(turn(0.08), turn(0.10))] * 5)
    assert not is_worse([(turn(0.12), turn(0.10)), (turn(0.08), turn(0.10))] * 3)
    assert is_worse([(turn(0.1, gap_s=0.03), turn(0.1, gap_s=0.02))] * 5)


def test_the_report_has_both_placements_and_their_ratio() -> None:
    table = report("agents", "--flag", [(turn(0.05, split=0.1), turn(0.1, split=0.9))] * 3)
    ours, other, ratios = (list(column.cells) for column in table.columns[1:])
    assert (ours[2], other[2], ratios[2]) == ("50.00", "100.00", "0.500 (0.500 to 0.500)")
    assert (ours[-1], other[-1]) == ("10%", "90%")


def test_sessions_end_before_the_first_turn_that_does_not_fit() -> None:
    child = Session("child", 5.0, (Asked(0.0, 200, 1),))
    small = Session("small", 100.0, (Asked(3.0, 20, 1),))
    turns = (
        Asked(1.0, 50, 10, starts=(child, small)),
        Asked(90.0, 90, 10),
        Asked(1.0, 91, 10),
        Asked(1.0, 20, 1),
    )
    kept = cut(Session("s", 30.0, turns), OPTIONS)
    assert kept is not None
    assert [(each.num_prompt, each.pause_s) for each in kept.turns] == [(50, 0.1), (90, 2.0)]
    (only,) = kept.turns[0].starts
    assert (only.name, only.start_s, only.turns[0].pause_s) == ("small", 2.0, 0.3)
    many = cut(Session("s", 0.0, (Asked(0.0, 9, 1),) * 5), OPTIONS)
    assert many is not None
    assert len(many.turns) == 3
    assert cut(child, OPTIONS) is None


async def test_a_turn_sends_the_same_prompts_under_another_salt() -> None:
    prefix = hot_prefix(HotPrefix("m", 100, 3, 0.01, 4))
    streams = StreamLoad(
        model="m",
        vocab_size=100,
        num_streams=1,
        stream_tokens=4,
        long_prompt=40,
        arrivals_per_s=500.0,
    )
    among = interference(streams, 0.02)
    for load, size in ((prefix, 424), (among, 40)):
        prompts = {}
        for salt in ("a", "b"):
            async with StreamingServer() as server:
                sample = await asyncio.to_thread(load, server.url, 1, salt)
            assert {each["cache_salt"] for each in server.bodies} == {salt}
            assert sample.gaps_s
            prompts[salt] = sorted(e["prompt"] for e in server.bodies if len(e["prompt"]) == size)
            assert len(sample.ttft_s) in (len(prompts[salt]), len(prompts[salt]) - 1)
        assert prompts["a"] == prompts["b"] != []
