"""Predictions of the load that one unlucky moment does not move."""

from __future__ import annotations

from console.telemetry.fleet_load import FleetLoad, SteadyLoad


def load(ttft_ms: float | None, step_ms: float | None) -> FleetLoad:
    return FleetLoad(ttft_ms, step_ms, 0.25, "prefill", "decode")


def test_one_unlucky_moment_moves_no_prediction() -> None:
    steady = SteadyLoad()
    seen = [
        steady.sample(load(ttft_ms, 9.0))
        for ttft_ms in (80.0, 82.0, 81.0, 41_430.0, 79.0, 5_903.0, 83.0)
    ]
    assert max(each.predicted_ttft_ms or 0.0 for each in seen) <= 83.0
    assert {each.predicted_step_ms for each in seen} == {9.0}
    assert {each.blocks_share for each in seen} == {0.25}


def test_a_lasting_change_shows_within_three_samples() -> None:
    steady = SteadyLoad()
    for _ in range(10):
        steady.sample(load(80.0, 9.0))
    shown = [steady.sample(load(900.0, 30.0)) for _ in range(3)]
    assert (shown[-1].predicted_ttft_ms, shown[-1].predicted_step_ms) == (900.0, 30.0)


def test_what_is_not_predicted_is_not_known_and_forgotten() -> None:
    steady = SteadyLoad()
    steady.sample(load(80.0, 9.0))
    idle = steady.sample(load(None, None))
    assert (idle.predicted_ttft_ms, idle.predicted_step_ms) == (None, None)
    assert steady.sample(load(20.0, 3.0)).predicted_ttft_ms == 20.0
