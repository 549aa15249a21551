"""Which way cards add up tensors of each size, by measured times."""

from __future__ import annotations

from collections.abc import Sequence

from engine.parallel.symmetric_sums import (
    AUTO,
    NCCL,
    ONE_SHOT,
    SYMMETRIC,
    TWO_SHOT,
    ChosenSums,
    measured,
)

WAYS = (NCCL, ONE_SHOT, TWO_SHOT)
KIB = 1 << 10
TIMES = {
    (8 * KIB, NCCL): 9.0,
    (8 * KIB, ONE_SHOT): 3.0,
    (8 * KIB, TWO_SHOT): 5.0,
    (64 * KIB, NCCL): 10.0,
    (64 * KIB, ONE_SHOT): 12.0,
    (64 * KIB, TWO_SHOT): 8.0,
    (512 * KIB, NCCL): 20.0,
    (512 * KIB, ONE_SHOT): 60.0,
    (512 * KIB, TWO_SHOT): 30.0,
}
SIZES = (8 * KIB, 64 * KIB, 512 * KIB)


def chosen(wanted: str = AUTO, others: Sequence[float] = ()) -> ChosenSums:
    def slowest(own: Sequence[float]) -> Sequence[float]:
        return [max(pair) for pair in zip(own, others or own, strict=True)]

    return measured(WAYS, wanted, lambda way, size: TIMES[size, way], slowest, SIZES)


def test_each_size_goes_the_way_that_is_fastest_for_the_next_larger_one() -> None:
    sums = chosen()
    sizes = (1, 8 * KIB, 8 * KIB + 1, 64 * KIB, 512 * KIB, 512 * KIB + 1)
    ways = [ONE_SHOT, ONE_SHOT, TWO_SHOT, TWO_SHOT, NCCL, NCCL]
    assert [sums.way(size) for size in sizes] == ways
    assert str(sums) == "one_shot to 8 KiB, two_shot to 64 KiB, nccl to 512 KiB"


def test_symmetric_memory_can_be_forced_up_to_the_largest_size() -> None:
    sums = chosen(SYMMETRIC)
    assert [sums.way(size) for size in (8 * KIB, 512 * KIB)] == [ONE_SHOT, TWO_SHOT]
    assert sums.way(512 * KIB + 1) == NCCL


def test_the_slowest_rank_decides_for_all() -> None:
    """Ranks that chose differently would wait for one another for ever."""
    slow = [9.0, 30.0, 5.0, 10.0, 12.0, 8.0, 20.0, 60.0, 30.0]
    assert chosen(others=slow).way(1) == TWO_SHOT
