"""The order in which pytest-xdist gives groups of tests to processes."""

from __future__ import annotations

from tests.scopes import WAITS_END, group_of, order_of

FAULTS = [f"tests/faults/test_{name}.py::test_it[nixl]" for name in "abcd"]
UNITS = [f"tests/unit/router/test_{name}.py::test_it" for name in "abcdefgh"]


def test_a_group_is_a_file_a_class_or_a_folder_that_shares() -> None:
    assert group_of("tests/faults/test_a.py::test_b[::1-nixl]") == "tests/faults/test_a.py"
    assert group_of("tests/unit/test_a.py::TestB::runTest") == "tests/unit/test_a.py::TestB"
    assert group_of("tests/browser/test_a.py::test_b") == group_of("tests/browser/test_c.py::test")


def test_groups_that_wait_alternate_with_groups_that_compute_and_none_of_them_is_last() -> None:
    begins = order_of([*FAULTS, *UNITS])
    order = "".join(
        "w" if "faults" in each else "c" for each in sorted(begins, key=begins.__getitem__)
    )
    assert order == "wccwccwcwccc"
    assert max(begins[group_of(each)] for each in FAULTS) < WAITS_END


def test_unit_tests_that_wait_are_among_those() -> None:
    begins = order_of([*UNITS, "tests/unit/cli/test_fleet.py::test_it"])
    assert begins["tests/unit/cli/test_fleet.py"] == 0
