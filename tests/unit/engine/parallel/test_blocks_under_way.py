"""Which steps of a rank's device blocks wait for before they are read."""

from __future__ import annotations

from engine.attention.base import Segment
from engine.parallel.blocks_under_way import BlocksUnderWay
from engine.parallel.ranks import Step

BLOCK = 4


class Passing:
    def __init__(self) -> None:
        self.has_passed = False

    def is_done(self) -> bool:
        return self.has_passed

    def wait(self) -> None:
        raise AssertionError("nobody waits for a device here")


def step(*segments: Segment) -> Step:
    return Step.of(segments, [0] * sum(each.query_len for each in segments))


def waits(under_way: BlocksUnderWay, block: int, group: int = 0) -> bool:
    found = under_way.behind(group, [block])
    return found is not None and not found.is_done()


def test_blocks_that_a_step_writes_to_wait_until_it_is_queued_and_passed() -> None:
    under_way, fence = BlocksUnderWay(BLOCK), Passing()
    under_way.begin(step(Segment(5, 10, [7, 8, 9]), Segment(1, 1, [3])))
    for _ in range(2):
        assert [block for block in range(12) if waits(under_way, block)] == [3, 8, 9]
        under_way.end(fence)
    fence.has_passed = True
    assert not any(waits(under_way, block) for block in range(12))


def test_a_block_waits_for_the_newest_step_that_writes_to_it() -> None:
    under_way, first, second = BlocksUnderWay(BLOCK), Passing(), Passing()
    under_way.begin(step(Segment(6, 6, [1, 2])))
    under_way.end(first)
    under_way.begin(step(Segment(2, 8, [1, 2])))
    under_way.end(second)
    first.has_passed = True
    assert [waits(under_way, block) for block in (1, 2)] == [False, True]
    second.has_passed = True
    assert not waits(under_way, 2)


def test_each_group_of_layers_has_blocks_of_its_own_from_its_first_on() -> None:
    under_way = BlocksUnderWay(BLOCK)
    under_way.begin(step(Segment(1, 10, [4, 5, 6], others=((2, [5]),))))
    assert [(g, b) for g in (0, 1) for b in range(9) if waits(under_way, b, g)] == [(0, 6), (1, 5)]


def test_steps_that_the_device_has_passed_are_forgotten() -> None:
    under_way = BlocksUnderWay(BLOCK)
    for number in range(3):
        under_way.begin(step(Segment(1, 1, [number])))
        fence = Passing()
        fence.has_passed = True
        under_way.end(fence)
    assert under_way.behind(0, [0, 1]) is None
    assert under_way.behind(0, [2]) is not None
