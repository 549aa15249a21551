"""What is made of a fleet's traces, and when a comparison holds, fails or cannot be judged."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest

from bench.replay.player import Played
from bench.simulated_against_real import machine
from bench.simulated_against_real.calibration import Calibration, Served
from bench.simulated_against_real.comparison import Comparison, Figures, simulate, with_handoff
from bench.simulated_against_real.fleet_profile import (
    Profile,
    chunk_table,
    decode_table,
    delays_of,
    rising,
)
from bench.simulated_against_real.fleets import (
    BLOCK_TOKENS,
    SHAPES,
    TTFT_TARGET_MS,
    fleet_config,
)
from bench.simulated_against_real.loads import (
    LOADS,
    MIXTURE,
    Load,
    calibration_traces,
    load_trace,
)
from bench.simulated_against_real.machine import MachineWatch, Usage
from bench.simulated_against_real.timeline import TimedStep
from simulator.delays import Delays
from simulator.devices.measured_steps import TabledSteps
from simulator.devices.step_noise import StepNoise
from simulator.traces.sessions import BlockRuns, Session, Trace, Turn

US = 1_000_000
PROFILE = Profile(
    TabledSteps(((1, 0.002), (8, 0.004)), ((16, 0.003), (512, 0.06)), 1e-7, 1e-9),
    Delays(2e-4, 1e-3, 1e-6, 5e-4),
)


def alone(prompt: int, *chunks: tuple[float, float, int]) -> tuple[Played, dict[str, Any]]:
    """A prompt that was sent at 1000 s, placed 2 ms later, and answered at 1000.1 s."""
    spans = [[round(begin * US), round(end * US), count] for begin, end, count in chunks]
    attempt = {"started_us": round(1000.002 * US), "prefill": {"chunks": spans}, "decode": None}
    played = Played("s", 0, sent=0.0, first_token=0.1, end=0.1, num_prompt=prompt)
    return played, {"attempts": [attempt], "handoff_ms": None}


def test_chunks_are_timed_by_their_tokens_and_pairs() -> None:
    steps = [
        TimedStep("p", 0, 0, num_tokens=16, pairs=136, seconds=0.004),
        TimedStep("p", 0, 0, num_tokens=512, pairs=512 * 513 // 2, seconds=0.051),
        TimedStep("p", 0, 0, num_tokens=388, pairs=388 * 512 + 388 * 389 // 2, seconds=0.061),
        TimedStep("p", 0, 0, num_tokens=388, pairs=388 * 389 // 2, seconds=0.031),
        TimedStep("p", 0, 0, rows=1, context=9, num_tokens=16, pairs=136, seconds=0.4),
        TimedStep("p", 0, 0, rows=1, context=9, seconds=0.5),
    ]
    table, per_pair = chunk_table(steps)
    assert per_pair == pytest.approx(0.03 / (388 * 512))
    known = dict(table)
    assert sorted(known) == [16, 388, 512]
    assert known[16] == pytest.approx(0.004 - per_pair * 16 * 17 / 2)
    assert known[388] == pytest.approx(0.031 - per_pair * 388 * 389 / 2)


def test_decodes_are_timed_by_their_sequences_and_contexts() -> None:
    short = [TimedStep("d", 0, 0, 2, 2 * (24 + n), 0, 0, True, 0.010) for n in range(11)]
    long = [TimedStep("d", 0, 0, 2, 2 * (424 + n), 0, 0, True, 0.012) for n in range(11)]
    others = [TimedStep("d", 0, 0, 2, 2 * 24, 0, 0, False, 0.1)] * 99
    others += [TimedStep("d", 0, 0, 2, 2 * 24, 8, 36, True, 0.1)] * 99
    table, per_context = decode_table([*short, *long, *others])
    assert per_context == pytest.approx(0.002 / 800)
    assert table == ((2, pytest.approx(0.01 - per_context * 2 * (24 + 5))),)


def test_more_work_never_takes_less_time() -> None:
    points = [(1, 3.0, 1), (2, 1.0, 3), (4, 2.0, 1), (8, 5.0, 1)]
    assert rising(points) == ((1, 1.5), (2, 1.5), (4, 2.0), (8, 5.0))


def test_what_lies_around_a_prompt_is_shared_out() -> None:
    small, large = alone(100, (1000.003, 1000.09, 100)), alone(1100, (1000.003, 1000.09, 1100))
    large[1]["attempts"][0]["started_us"] = round(1000.0025 * US)
    found = delays_of(1000.0, [small, large])
    assert found.request_token_s == pytest.approx(0.0005 / 1000, rel=0.01)
    assert found.request_s + 100 * found.request_token_s == pytest.approx(0.002, rel=0.01)
    assert found.message_s + found.answer_s == pytest.approx(0.01, rel=0.01)


def test_a_load_is_as_dense_as_the_fleet_allows() -> None:
    load = Load("x", 0.3, "poisson:rate={rate},requests={count},prompt={prompt},output={output}")
    trace = load_trace(load, PROFILE.costs, 1024, 10.0)
    requests = simulate(SHAPES["split"], PROFILE, 1024, [trace])["x"]
    assert len(requests) == trace.num_turns
    assert all(0 < each.ttft_s < each.end - each.arrival + 1e-9 for each in requests)
    assert all(
        turn.num_prompt + turn.num_output <= 1024 for s in trace.sessions for turn in s.turns
    )


def test_conversations_repeat_by_the_blocks_of_the_fleet() -> None:
    talks = next(load for load in LOADS if load.name == "talks")
    assert load_trace(talks, PROFILE.costs, 1024, 5.0).block_tokens == BLOCK_TOKENS


def test_no_load_repeats_a_prompt_of_another_one() -> None:
    traces = [load_trace(load, PROFILE.costs, 1024, 5.0) for load in (*LOADS, MIXTURE)]
    names = [session.name for trace in traces for session in trace.sessions]
    assert len(set(names)) == len(names) > 0


def test_no_part_of_a_load_repeats_a_block_of_another_one() -> None:
    """Real answers differ between parts, so blocks behind them would be equal in the simulation
    only."""
    talks = next(load for load in LOADS if load.name == "talks")
    found = [
        {
            digest
            for s in trace.sessions
            for t in s.turns
            for digest in t.blocks.digests(BLOCK_TOKENS)
        }
        for trace in (load_trace(part, PROFILE.costs, 1024, 5.0) for part in talks.parts(3))
    ]
    assert all(found)
    assert sum(map(len, found)) == len(set().union(*found))


class Listed(Calibration):
    """Notes the loads that it would play."""

    def __init__(self) -> None:
        self.served: list[Served] = []
        self.loads: list[tuple[Load, float]] = []

    def play_load(self, load: Load, seconds: float) -> Served:
        """See the base class."""
        self.loads.append((load, seconds))
        self.served.append(Served(Trace(load.name, []), [], 0.0, 0.0))
        return self.served[-1]


def test_pieces_of_the_mixture_lie_around_and_between_the_parts_of_a_load() -> None:
    calibration, busy = Listed(), next(load for load in LOADS if load.name == "busy")
    parts, pieces = calibration.play_parts(busy, 16.0)
    between = zip(parts, pieces[1:], strict=True)
    assert calibration.served == [pieces[0], *chain.from_iterable(between)]
    assert [each.trace.name for each in parts] == [each.name for each in busy.parts(8)]
    assert [seconds for _, seconds in calibration.loads] == [1.0, *[2.0] * 15, 1.0]
    assert {each.share for each, _ in calibration.loads} == {busy.share}
    assert len({each.seed for each, _ in calibration.loads}) == 17


def test_the_figures_of_several_runs_are_averaged() -> None:
    runs = [Figures(1.0, 0.5, 2.0), Figures(3.0, 0.7, 4.0)]
    assert Figures.mean(runs) == Figures(2.0, pytest.approx(0.6), 3.0)


def test_steps_beside_another_worker_s_take_longer() -> None:
    noise = StepNoise(((1.0, ((1.0,), (1.25,))),), ((1.0, ((1.0,), (1.5,))),))
    lone, crowded = (
        simulate(SHAPES["colocated"], replace(PROFILE, noise=each), 1024, [two_at_once()])["two"]
        for each in (None, noise)
    )
    assert lone[0].decode != lone[1].decode
    assert sum(e.ttft_s for e in crowded) > 1.1 * sum(e.ttft_s for e in lone)
    longer = sum(e.end - e.first_token for e in crowded) / sum(e.end - e.first_token for e in lone)
    assert 1.3 < longer <= 1.5


def two_at_once() -> Trace:
    return Trace("two", [Session(f"s{n}", 0.0, (Turn(0.0, 100, 50),)) for n in range(2)])


def test_a_load_is_simulated_after_all_that_the_real_fleet_served_before() -> None:
    blocks = [BlockRuns(number, 16, ((0, 6),)) for number in (0, 1, 1, 0)]
    traces = [
        Trace(f"t{number}", [Session("s", 0.0, (Turn(0.0, 100, 9, each),))])
        for number, each in enumerate(blocks)
    ]
    found = simulate(SHAPES["split"], PROFILE, 1024, traces)
    cached = {name: [each.cached_tokens for each in requests] for name, requests in found.items()}
    assert cached == {"t0": [0], "t1": [0], "t2": [96], "t3": [96]}


def test_traces_before_a_load_are_over_when_it_begins() -> None:
    long = Trace("long", [Session("s", 0.0, (Turn(0.0, 900, 40),) * 5)])
    (found,) = simulate(SHAPES["colocated"], PROFILE, 1024, [long, single(1.0)])["single"]
    assert found.arrival > 1.0 + 5 * (0.1 + 40 * 0.002)


def test_a_decode_worker_computes_prompts_that_miss_the_router_s_target_elsewhere() -> None:
    """Forty prompts of 60 ms at once: the last ones would wait for more than a second."""
    sessions = [Session(f"s{n}", 0.0, (Turn(0.0, 500, 2),)) for n in range(40)]
    traces = [*calibration_traces(1024), Trace("burst", sessions)]
    found = simulate(SHAPES["split"], PROFILE, 1024, traces)["burst"]
    assert 0 < sum(each.prefill is None for each in found) < len(found) / 2
    flag = f"--ttft-target-ms={TTFT_TARGET_MS}"
    assert flag in fleet_config("m", SHAPES["split"]).router_flags


def single(start_s: float) -> Trace:
    return Trace("single", [Session("x", start_s, (Turn(0.0, 100, 9),))])


def test_links_take_what_messages_leave_of_a_handoff() -> None:
    """Prompts that stay tell nothing of handoffs; the mean of the mixture's handoffs is met."""
    lone, *_ = calibration_traces(1024)
    mixture = load_trace(MIXTURE, PROFILE.costs, 1024, 0.5)
    measured = replace(PROFILE, handoff_s=8e-3, handoffs_of=(mixture.name,))
    fitted = with_handoff(SHAPES["split"], measured, 1024, [lone, mixture])
    assert 0 < fitted.link_s < 8e-3
    found = simulate(SHAPES["split"], fitted, 1024, [lone, mixture])[mixture.name]
    moved = [each.exposed_s for each in found if each.prefill is not None]
    assert sum(moved) / len(moved) == pytest.approx(8e-3, rel=0.05)
    assert with_handoff(SHAPES["split"], PROFILE, 1024, [lone]) == PROFILE
    assert with_handoff(SHAPES["colocated"], measured, 1024, [mixture]) == measured


def compared(real: float, simulated: float, foreign: float = 0.01) -> Comparison:
    figures = [Figures(each, each, each) for each in (real, simulated)]
    return Comparison("m", "split", "light", 9, *figures, Usage(0.5, foreign, 0.0))


def test_a_starved_machine_is_not_judged() -> None:
    assert compared(1.0, 1.04).holds is True
    assert compared(1.0, 0.94).holds is False
    assert compared(1.0, 1.04, foreign=0.06).holds is None


def test_our_own_work_is_no_foreign_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 6 s that the machine was busy, and 1 s that was stolen, 4 s were ours."""
    now = iter([0.0, 5.0])
    monkeypatch.setattr(machine, "time", SimpleNamespace(perf_counter=lambda: next(now)))
    monkeypatch.setattr(machine, "os", SimpleNamespace(cpu_count=lambda: 2))
    monkeypatch.setattr(machine, "_machine_s", lambda: (100.0, 7.0))
    monkeypatch.setattr(machine, "_ours_s", lambda: {(1, 0.0): 50.0})
    watch = MachineWatch()
    monkeypatch.setattr(machine, "_machine_s", lambda: (106.0, 8.0))
    monkeypatch.setattr(machine, "_ours_s", lambda: {(1, 0.0): 53.0, (2, 9.0): 1.0})
    assert watch.usage() == Usage(ours=0.4, foreign=0.2, stolen=0.1)
