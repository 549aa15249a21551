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
