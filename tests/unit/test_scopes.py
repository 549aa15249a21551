"""The order in which pytest-xdist gives groups of tests to processes."""

from __future__ import annotations

import pytest

from tests.scopes import LONG_END, WAITS_END, group_of, order_of

FAULTS = [f"tests/faults/test_{name}.py::test_it[nixl]" for name in "abcd"]
UNITS = [f"tests/unit/router/test_{name}.py::test_it" for name in "abcdefgh"]


def test_a_group_is_a_file_a_class_or_a_folder_that_shares() -> None:
    assert group_of("tests/faults/test_a.py::test_b[::1-nixl]") == "tests/faults/test_a.py"
    assert group_of("tests/unit/test_a.py::TestB::runTest") == "tests/unit/test_a.py::TestB"
    assert group_of("tests/browser/test_a.py::test_b") == group_of("tests/browser/test_c.py::test")


def test_groups_that_wait_begin_all_through_the_run_but_not_at_its_end() -> None:
    begins = order_of([*FAULTS, *UNITS])
    assert sorted(begins[group_of(each)] for each in FAULTS) == pytest.approx([0, 0.2, 0.4, 0.6])
    assert sorted(begins[group_of(each)] for each in UNITS)[-2:] == [0.75, 0.875]


@pytest.mark.parametrize(
    ("path", "end"), [("cli/test_fleet.py", WAITS_END), ("engine/test_engine.py", LONG_END)]
)
def test_unit_tests_that_wait_or_compute_for_long_are_not_last(path: str, end: float) -> None:
    folder, _, name = path.partition("/")
    files = [f"tests/unit/{folder}/{number}_{name}::test_it" for number in range(100)]
    begins = order_of([*UNITS, *files])
    assert max(begins[group_of(each)] for each in files) == pytest.approx(0.99 * end)


def test_files_of_a_folder_are_mixed_with_others_always_in_the_same_way() -> None:
    begins = order_of(reversed(UNITS))
    order = sorted(begins, key=begins.__getitem__)
    assert begins == order_of(UNITS)
    assert order != sorted(order)
