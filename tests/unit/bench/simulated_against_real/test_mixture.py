"""Delays and slower steps, taken from a load's traces by what other workers did at the time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bench.replay.player import Played
from bench.simulated_against_real.calibration import Profile, with_mixture
from bench.simulated_against_real.mixture import Mixture
from simulator.delays import Delays
from simulator.devices.measured_steps import TabledSteps
from simulator.devices.step_times import ChunkWork

BEGAN = 1000.0
TIMES = TabledSteps(((1, 0.002),), ((100, 0.1), (200, 0.2)), 0.0, 0.0)


def served(
    worker: str, sent: float, placed: float, chunk: tuple[float, float], steps: tuple[float, float]
) -> tuple[Played, dict[str, Any]]:
    """A prompt of 100 tokens in one chunk, decoded by the same worker; the client has the first
    token 3 ms after the chunk, the last one 2 ms after the steps. Times as of the load's begin."""
    us = [[round((BEGAN + each) * 1e6) for each in span] for span in (chunk, steps)]
    decode = {"worker_id": worker, "chunks": [[*us[0], 100]], "steps": [[*us[1], 1, 9, 0]]}
    started_us = round((BEGAN + placed) * 1e6)
    attempt = {"started_us": started_us, "prefill": None, "decode": decode}
    played = Played("s", 0, sent, chunk[1] + 0.003, steps[1] + 0.002, num_prompt=100)
    return played, {"attempts": [attempt]}


ALONE = served("d1", 0.0, 0.001, (0.002, 0.102), (0.103, 0.5))
BESIDE = served("d2", 0.11, 0.114, (0.12, 0.27), (0.271, 0.3))
LATER = served("d2", 0.6, 0.605, (0.61, 0.71), (0.72, 0.8))


def test_delays_are_kept_by_the_number_of_other_workers_that_compute() -> None:
    found = Mixture([ALONE, BESIDE, LATER], BEGAN).delays()
    assert found.placing[0] == pytest.approx((0.001, 0.005), abs=1e-5)
    assert found.placing[1] == pytest.approx((0.001, 0.004, 0.005), abs=1e-5)  # few: with the rest
    assert found.sending[0] == pytest.approx((0.001, 0.005), abs=1e-5)
    assert max(found.sending[1]) == pytest.approx(0.006, abs=1e-5)
    assert found.first[0] == pytest.approx((0.003, 0.003), abs=1e-5)
    assert found.last[0] == pytest.approx((0.002, 0.002), abs=1e-5)
    lengths = [len(each) for each in (found.placing, found.sending, found.first, found.last)]
    assert lengths == [2, 2, 2, 2]  # none or one of the two workers


def test_numbers_of_workers_without_samples_get_those_of_the_lowest_with_some() -> None:
    one = served("d1", 0.0, 0.001, (0.002, 0.2), (0.2, 0.9))
    other = served("d2", 0.0, 0.001, (0.002, 0.3), (0.3, 0.9))
    both = pytest.approx((0.003, 0.003), abs=1e-5)
    assert Mixture([one, other], BEGAN).delays().first == (both, both)


def test_a_prompt_s_delays_are_those_of_the_worker_that_computes_it() -> None:
    played, trace = served("d1", 0.0, 0.001, (0.002, 0.102), (0.103, 0.5))
    attempt = trace["attempts"][-1]
    attempt["prefill"] = {"worker_id": "p1", "chunks": attempt["decode"]["chunks"]}
    attempt["decode"] = attempt["decode"] | {"chunks": []}
    found = Mixture([(played, trace)], BEGAN).delays()
    assert found.sending == (pytest.approx((0.001,), abs=1e-5),)
    assert found.first == (pytest.approx((0.003,), abs=1e-5),)
    assert found.last == (pytest.approx((0.002,), abs=1e-5),)


def test_ten_samples_are_enough_for_a_number_of_workers() -> None:
    found = Mixture([ALONE, *[BESIDE] * 10], BEGAN).delays()
    assert found.placing[1] == pytest.approx([0.004] * 10, abs=1e-5)


def test_a_prompt_that_waits_for_its_worker_s_step_tells_nothing_of_messages() -> None:
    behind = served("d1", 0.2, 0.2, (0.45, 0.6), (0.6, 0.7))
    found = Mixture([ALONE, behind], BEGAN).delays()
    assert found.sending == (pytest.approx((0.001,), abs=1e-5),)
    assert found.last == (pytest.approx((0.002, 0.002), abs=1e-5),)  # d1 is no other worker


def test_chunks_beside_other_steps_are_compared_with_those_of_a_worker_alone() -> None:
    assert Mixture([ALONE, BESIDE, LATER], BEGAN).contention(TIMES) == pytest.approx(0.5, rel=0.01)
    assert Mixture([ALONE, LATER], BEGAN).contention(TIMES) == 0.0


def test_a_later_chunk_is_compared_with_one_behind_as_many_tokens() -> None:
    """Alone they take 1.2 times as long as the table says, and 1.8 times beside others."""
    times = replace(TIMES, per_pair_s=1e-5)
    first_s, second_s = (
        times.seconds(0, 0, ChunkWork(100, done * 100 + 5050, done + 100)) for done in (0, 100)
    )
    one = served("d1", 0.0, 0.0, (0.0, 1.2 * first_s), (0.7, 0.8))
    begin, end = (round((BEGAN + each) * 1e6) for each in (0.2, 0.2 + 1.8 * second_s))
    one[1]["attempts"][-1]["decode"]["chunks"].append([begin, end, 100])
    other = served("d2", 0.19, 0.19, (0.19, 0.19 + 1.8 * first_s), (0.5, 0.75))
    assert Mixture([one, other], BEGAN).contention(times) == pytest.approx(0.5, rel=0.01)


@pytest.mark.parametrize(("beside_s", "share"), [(0.00685, 0.5), (0.004, 0.0)])
def test_decodes_beside_other_steps_are_compared_with_those_of_a_worker_alone(
    beside_s: float, share: float
) -> None:
    """Alone they take 4.57 ms, half as long again as the table says for about 105 tokens."""
    times = replace(TIMES, per_context_s=1e-5)
    alone, beside, other = (
        served("d1", 0.0, 0.001, (0.002, 0.102), (0.103, 0.5)),
        served("d1", 0.6, 0.605, (0.61, 0.71), (0.72, 0.8)),
        served("d2", 0.6, 0.605, (0.61, 0.71), (0.71, 0.9)),
    )
    for (_, trace), begin, took in ((alone, 0.103, 0.00457), (beside, 0.72, beside_s)):
        starts = [begin + number * took for number in range(11)]
        spans = [[round((BEGAN + at) * 1e6) for at in (each, each + 0.002)] for each in starts]
        trace["attempts"][-1]["decode"]["steps"] = [[*each, 1, 1, 0] for each in spans]
    found = Mixture([alone, beside, other], BEGAN)
    assert found.decodes(times) == (pytest.approx(1.5, rel=0.01), pytest.approx(share, rel=0.01))
    profile = with_mixture(Profile(times, Delays(), 0.0), found)
    assert profile.decode_contention == pytest.approx(share, rel=0.01)
    assert Mixture([alone], BEGAN).decodes(times) == (pytest.approx(1.5, rel=0.01), 0.0)


def test_a_profile_takes_delays_contention_and_quicker_decodes_from_the_mixture() -> None:
    played, trace = served("d1", 0.0, 0.001, (0.002, 0.102), (0.103, 0.5))
    starts = [round((BEGAN + 0.103 + number * 0.001) * 1e6) for number in range(11)]
    trace["attempts"][-1]["decode"]["steps"] = [[each, each + 900, 1, 1, 0] for each in starts]
    mixture = Mixture([(played, trace)], BEGAN)
    times = replace(TIMES, per_context_s=1e-9)
    found = with_mixture(Profile(times, Delays(message_s=0.01), 0.0), mixture)
    assert found.times.decodes == ((1, pytest.approx(0.001, rel=0.01)),)
    assert found.times.per_context_s == pytest.approx(0.5e-9, rel=0.01)
    assert found.times.chunks == TIMES.chunks
    assert found.delays.measured == mixture.delays()
    assert found.delays.message_s == pytest.approx(0.001, abs=1e-5)  # the shortest: `sending`
    beside = with_mixture(Profile(TIMES, Delays(), 0.0), Mixture([ALONE, BESIDE, LATER], BEGAN))
    assert (found.contention, beside.contention) == (0.0, pytest.approx(0.5, rel=0.01))


def test_messages_take_the_least_of_the_measured_delays() -> None:
    """A tenth of the messages may be quicker."""
    quick = served("d2", 0.6, 0.6, (0.600002, 0.7), (0.7, 0.8))
    usual = [
        served("d1", each, each + 0.001, (each + 0.002, each + 0.102), (each + 0.103, each + 0.5))
        for each in range(10)
    ]
    bare = Profile(TIMES, Delays(message_s=0.01), 0.0)
    for others, message_s in ((usual, 0.001), (usual[:5], 1e-5)):
        found = with_mixture(bare, Mixture([quick, *others], BEGAN))
        assert found.delays.message_s == pytest.approx(message_s, abs=5e-6)


def test_times_with_another_table_remember_none_of_the_former_one() -> None:
    assert TIMES.decode_line(1)[0] == 0.002
    assert replace(TIMES, decodes=((1, 0.003),)).decode_line(1)[0] == 0.003
