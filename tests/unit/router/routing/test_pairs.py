"""How long blocks take between two workers."""

from __future__ import annotations

import pytest

from router.routing.pairs import HALF_LIFE_S, Pairs


def test_blocks_wait_for_those_that_are_under_way_between_the_same_workers() -> None:
    pairs = Pairs()
    pairs.observe("p1", "d1", 10, 20.0)
    pair = pairs.pair("p1", "d1")
    reservation = pair.reserve(30)
    assert pair.transfer_ms(5, 100.0, 0.0) == 70.0
    assert pairs.pair("p2", "d1").transfer_ms(5, 2.0, 0.0) == 10.0
    for _ in range(2):
        pair.release(reservation)
        assert pair.transfer_ms(5, 100.0, 0.0) == 10.0


def test_the_sources_of_a_sink_are_those_that_are_known_and_not_forgotten() -> None:
    pairs = Pairs(most=3)
    for source in ("p2", "p1", "p3", "p2", "p4"):
        pairs.observe(source, "d1", 1, 1.0)
    assert set(pairs.of_sink("d1")) == {"p2", "p3", "p4"}, "the one measured first made room"
    assert pairs.of_sink("d1")["p2"] is pairs.find("p2", "d1")
    pairs.forget("p3")
    assert set(pairs.of_sink("d1")) == {"p2", "p4"}
    pairs.forget("d1")
    assert not pairs.of_sink("d1")


def test_a_measurement_is_believed_less_the_older_it_is() -> None:
    pairs = Pairs()
    pairs.observe("p1", "d1", 1, 10.0)
    pair = pairs.pair("p1", "d1")
    assert pair.transfer_ms(1, 2.0, 0.0) == 10.0
    assert pair.transfer_ms(1, 2.0, HALF_LIFE_S) == 6.0
    assert pair.transfer_ms(1, 2.0, 20 * HALF_LIFE_S) == pytest.approx(2.0, abs=1e-4)


def test_a_new_measurement_outweighs_an_old_one() -> None:
    pairs = Pairs()
    pairs.observe("p1", "d1", 1, 100.0)
    for _ in range(50):
        pairs.observe("p1", "d2", 1, 1.0)
    pairs.now = 20 * HALF_LIFE_S
    pairs.observe("p1", "d1", 1, 1.0)
    pair = pairs.pair("p1", "d1")
    assert pair.ms_per_block == pytest.approx(1.0, rel=0.01)
    assert pair.transfer_ms(1, 9.0, pairs.now) == pytest.approx(1.0, rel=0.01)
