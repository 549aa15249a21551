"""Cores by name, and a thread that keeps to them."""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from process.cores import CORES_PATTERN, cores_in, keep_to_cores, ranges_of, usable_cores
from protocol.errors import ConfigError


@given(st.sets(st.integers(0, 99999)))
def test_names_and_cores_are_the_same(cores: set[int]) -> None:
    ranges = ranges_of(cores)
    assert all(re.fullmatch(CORES_PATTERN, text) for text in ranges)
    assert cores_in(ranges) == sorted(cores)


def test_names_are_short() -> None:
    assert ranges_of([8, 1, 0, 2, 5, 6]) == ("0-2", "5-6", "8")
    assert ranges_of([]) == ()
    assert cores_in(("4", "1-2", "2-3")) == [1, 2, 3, 4]


def test_a_range_that_ends_before_it_begins_is_refused() -> None:
    with pytest.raises(ConfigError, match="3-1"):
        cores_in(("3-1",))


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores cannot be chosen here")
def test_a_thread_keeps_to_its_cores_and_so_do_those_it_starts() -> None:
    core = usable_cores()[-1]

    def kept() -> tuple[list[int], list[int]]:
        keep_to_cores([core])
        with ThreadPoolExecutor(1) as pool:
            return usable_cores(), pool.submit(usable_cores).result()

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(kept).result() == ([core], [core])
    assert core in usable_cores()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores cannot be chosen here")
def test_cores_that_are_not_there_are_named() -> None:
    with pytest.raises(ConfigError, match=r"77777 cannot be used here; usable are \d"):
        keep_to_cores([usable_cores()[0], 77777])
