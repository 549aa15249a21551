"""How the soak bench judges memory."""

from __future__ import annotations

import pytest

from bench.reliability.soak_load import SoakLoad
from bench.soak import Memory, is_steady

MODEL = "model"


def memory_of(*samples: int, warm_at: int | None = 0) -> Memory:
    return Memory([2.0 * i for i in range(len(samples))], {"router-1": list(samples)}, warm_at)


@pytest.mark.parametrize(
    ("last", "steady"), [(1000, True), (1019, True), (1021, False), (900, True)]
)
def test_growth_is_told_from_the_first_to_the_last_tenth(last: int, steady: bool) -> None:
    memory = memory_of(*[1000] * 50, *[last] * 50)
    assert memory.growth("router-1") == pytest.approx(last / 1000 - 1)
    assert is_steady(SoakLoad(MODEL, [], 1), memory, left=0) is steady


def test_what_comes_before_the_warm_up_does_not_count() -> None:
    assert memory_of(*[10] * 30, *[1000] * 30, warm_at=30).growth("router-1") == 0


def test_without_a_warm_fleet_there_is_no_verdict() -> None:
    load = SoakLoad(MODEL, [], 1)
    assert not is_steady(load, memory_of(*[1000] * 100, warm_at=None), left=0)
    assert not is_steady(load, memory_of(*[1000] * 100, warm_at=95), left=0)


def test_errors_and_leftovers_are_no_steadiness() -> None:
    memory = memory_of(*[1000] * 100)
    load = SoakLoad(MODEL, [], 1)
    assert not is_steady(load, memory, left=1)
    load.errors.append("500")
    assert not is_steady(load, memory, left=0)
