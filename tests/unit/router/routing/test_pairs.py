"""How long blocks take between two workers."""

from __future__ import annotations

from router.routing.pairs import Pairs


def test_blocks_wait_for_those_that_are_under_way_between_the_same_workers() -> None:
    pairs = Pairs()
    pairs.observe("p1", "d1", 10, 20.0)
    pair = pairs.pair("p1", "d1")
    reservation = pair.reserve(30)
    assert pair.transfer_ms(5, 100.0) == 70.0
    assert pairs.pair("p2", "d1").transfer_ms(5, 2.0) == 10.0
    for _ in range(2):
        pair.release(reservation)
        assert pair.transfer_ms(5, 100.0) == 10.0


def test_the_sources_of_a_sink_are_those_that_are_known_and_not_forgotten() -> None:
    pairs = Pairs(most=3)
    for source in ("p1", "p2", "p3", "p4"):
        pairs.observe(source, "d1", 1, 1.0)
    assert set(pairs.of_sink("d1")) == {"p2", "p3", "p4"}, "the oldest made room"
    assert pairs.of_sink("d1")["p2"] is pairs.find("p2", "d1")
    pairs.forget("p3")
    assert set(pairs.of_sink("d1")) == {"p2", "p4"}
    pairs.forget("d1")
    assert not pairs.of_sink("d1")
