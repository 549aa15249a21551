"""Delays and slower steps, taken from a load's traces by what other workers did at the time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bench.replay.player import Played
from bench.simulated_against_real.fleet_profile import Profile, with_mixture
from bench.simulated_against_real.mixture import Mixture
from simulator.delays import Delays
from simulator.devices.measured_steps import TabledSteps

BEGAN = 1000.0
TIMES = TabledSteps(((1, 0.002),), ((100, 0.1), (200, 0.2)), 0.0, 0.0)
Request = tuple[Played, dict[str, Any]]


def served(
    worker: str, sent: float, placed: float, chunk: tuple[float, float], steps: tuple[float, float]
) -> Request:
    """A prompt of 100 tokens in one chunk, decoded by the same worker; the client has the first
    token 3 ms after the chunk, the last one 2 ms after the steps. Times as of the load's begin."""
    us = [[round((BEGAN + each) * 1e6) for each in span] for span in (chunk, steps)]
    decode = {
        "worker_id": worker,
        "cached_tokens": 0,
        "chunks": [[*us[0], 100]],
        "steps": [[*us[1], 1, 9, 0]],
    }
    started_us = round((BEGAN + placed) * 1e6)
    attempt = {"started_us": started_us, "prefill": None, "decode": decode}
    played = Played("s", 0, sent, chunk[1] + 0.003, steps[1] + 0.002, num_prompt=100)
    return played, {"attempts": [attempt]}


def mixture(*traced: Request) -> Mixture:
    return Mixture([(traced, BEGAN)])


ALONE = served("d1", 0.0, 0.001, (0.002, 0.102), (0.102, 0.5))
BESIDE = served("d2", 0.11, 0.114, (0.12, 0.27), (0.27, 0.3))
LATER = served("d2", 0.6, 0.605, (0.61, 0.71), (0.71, 0.8))


def test_delays_are_kept_by_the_number_of_other_workers_that_compute() -> None:
    found = mixture(ALONE, BESIDE, LATER).delays()
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
    assert mixture(one, other).delays().first == (both, both)


def test_a_prompt_s_delays_are_those_of_the_worker_that_computes_it() -> None:
    played, trace = served("d1", 0.0, 0.001, (0.002, 0.102), (0.103, 0.5))
    attempt = trace["attempts"][-1]
    attempt["prefill"] = attempt["decode"] | {"worker_id": "p1", "steps": []}
    attempt["decode"] = attempt["decode"] | {"chunks": []}
    found = mixture((played, trace)).delays()
    assert found.sending == (pytest.approx((0.001,), abs=1e-5),)
    assert found.first == (pytest.approx((0.003,), abs=1e-5),)
    assert found.last == (pytest.approx((0.002,), abs=1e-5),)


def test_ten_samples_are_enough_for_a_number_of_workers() -> None:
    found = mixture(ALONE, *[BESIDE] * 10).delays()
    assert found.placing[1] == pytest.approx([0.004] * 10, abs=1e-5)


def test_a_prompt_that_waits_for_its_worker_s_step_tells_nothing_of_messages() -> None:
    behind = served("d1", 0.2, 0.2, (0.45, 0.6), (0.6, 0.7))
    found = mixture(ALONE, behind).delays()
    assert found.sending == (pytest.approx((0.001,), abs=1e-5),)
    assert found.last == (pytest.approx((0.002, 0.002), abs=1e-5),)  # d1 is no other worker


def test_delays_behind_steps_begin_with_the_turn_s_end() -> None:
    """Chunk and steps lie 0.5 ms apart."""
    found = mixture(served("d1", 0.0, 0.001, (0.002, 0.102), (0.1025, 0.5)))
    assert found.turn_s == pytest.approx(0.0005, abs=2e-6)
    assert found.delays().first == (pytest.approx((0.0025,), abs=1e-5),)
    assert found.delays().last == (pytest.approx((0.0015,), abs=1e-5),)


def test_steps_are_compared_with_predicted_ones_by_the_number_of_other_workers() -> None:
    """Chunks take 100 ms alone and 150 ms beside `ALONE`; their decodes 398, 30 and 90 ms."""
    ((most_s, chunks),) = mixture(ALONE, BESIDE, LATER).noise(TIMES).chunks
    assert most_s == pytest.approx(0.1)
    assert chunks[0] == pytest.approx((1.0, 1.0), abs=1e-3)
    assert chunks[1] == pytest.approx((1.0, 1.0, 1.5), abs=1e-3)  # few: with the rest
    ((_, decodes),) = mixture(ALONE, BESIDE, LATER).noise(TIMES).decodes
    assert decodes[0] == pytest.approx((45.0, 199.0), abs=1e-3)
    assert decodes[1] == pytest.approx((15.0, 45.0, 199.0), abs=1e-3)


def test_steps_are_in_classes_by_their_predicted_time() -> None:
    """Steps of one sequence take as long as predicted, longer contexts twice as long."""
    times = replace(TIMES, per_context_s=1e-5)
    short, long = (
        served("d1", begin, begin, (begin, begin + 0.1), (begin + 0.1, begin + 0.2))
        for begin in (0.0, 3.0)
    )
    long[0].num_prompt = 1000
    for (_, trace), begin, took_s in ((short, 0.1, 0.003), (long, 3.1, 0.024)):
        starts = [begin + took_s * step for step in range(60)]
        spans = [[round((BEGAN + each) * 1e6) + at for at in (0, 1500)] for each in starts]
        trace["attempts"][-1]["decode"]["steps"] = [[*each, 1, 1, 0] for each in spans]
    classes = mixture(short, long).noise(times).decodes
    bounds = [most_s for most_s, _ in classes]
    assert 3 <= len(classes) <= 6
    assert bounds == sorted(bounds)
    assert bounds[-1] == pytest.approx(0.002 + 1e-5 * 1060)
    for most_s, (alone,) in (classes[0], classes[-1]):
        middle = sorted(alone)[len(alone) // 2]
        assert middle == pytest.approx(1.0 if most_s < 0.004 else 2.0, rel=0.15)


def test_equally_long_steps_are_in_one_class() -> None:
    played, trace = served("d1", 0.0, 0.001, (0.002, 0.102), (0.102, 0.2))
    starts = [0.102 + 0.004 * step for step in range(200)]
    spans = [[round((BEGAN + each) * 1e6) + at for at in (0, 1500)] for each in starts]
    trace["attempts"][-1]["decode"]["steps"] = [[*each, 1, 1, 0] for each in spans]
    ((_, (alone,)),) = mixture((played, trace)).noise(TIMES).decodes
    assert len(alone) == 200


def test_a_handoff_lasts_from_the_turn_behind_a_prompt_to_a_step_elsewhere() -> None:
    played, trace = served("d1", 0.0, 0.001, (0.002, 0.102), (0.11, 0.5))
    attempt = trace["attempts"][-1]
    attempt["prefill"] = attempt["decode"] | {"worker_id": "p1", "steps": []}
    attempt["decode"] = attempt["decode"] | {"chunks": []}
    assert mixture((played, trace), ALONE).handoff_s == pytest.approx(0.008, abs=1e-5)
    assert mixture(ALONE).handoff_s == 0.0


def test_a_profile_takes_delays_noise_and_turns_from_the_mixture() -> None:
    found = mixture(ALONE, BESIDE, LATER)
    profile = with_mixture(Profile(TIMES, Delays(message_s=0.01)), found)
    assert profile.times == TIMES
    assert profile.noise == found.noise(TIMES)
    assert profile.delays.measured == found.delays()
    assert profile.delays.message_s == pytest.approx(0.001, abs=1e-5)  # the shortest: `sending`


def test_messages_take_the_least_of_the_measured_delays() -> None:
    """A tenth of the messages may be quicker."""
    quick = served("d2", 6.0, 6.0, (6.000002, 6.1), (6.1, 6.2))
    usual = [
        served("d1", each, each + 0.001, (each + 0.002, each + 0.102), (each + 0.102, each + 0.5))
        for each in range(10)
    ]
    bare = Profile(TIMES, Delays(message_s=0.01))
    for others, message_s in ((usual, 0.001), (usual[:5], 1e-5)):
        found = with_mixture(bare, mixture(quick, *others))
        assert found.delays.message_s == pytest.approx(message_s, abs=5e-6)
