"""The groups of tests that pytest-xdist gives to processes, and their order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.scopes import LONG_END, WAITS_END, Groups, group_of, order_of

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
    assert "".join(each[-4] for each in order) == "cfedgbah"


class FakeProcess:
    """A process of pytest-xdist that only remembers which tests it is to run."""

    shutting_down = False

    def __init__(self, groups: Groups, tests: list[str]) -> None:
        self.asked: list[str] = []
        self.ran: list[str] = []
        self._tests = tests
        groups.add_node(cast(Any, self))
        groups.add_node_collection(cast(Any, self), tests)

    def shutdown(self) -> None:
        self.shutting_down = True

    def send_runtest_some(self, indices: list[int]) -> None:
        self.asked += [self._tests[index] for index in indices]


def test_a_test_that_ends_its_process_does_not_run_again_but_the_rest_of_its_file_does() -> None:
    option = SimpleNamespace(loadscopereorder=False)
    config = SimpleNamespace(option=option, getvalue={"tx": ["popen"]}.__getitem__)
    groups = Groups(cast(Any, config))
    tests = [f"tests/unit/test_{file}.py::test_{name}" for file in "ab" for name in "xyz"]
    process = FakeProcess(groups, tests)
    groups.schedule()
    assert process.asked == tests[:3]
    groups.mark_test_complete(cast(Any, process), 0)
    assert groups.remove_node(cast(Any, process)) == tests[1]
    another = FakeProcess(groups, tests)
    groups.schedule()
    while another.asked:
        another.ran.append(another.asked.pop(0))
        groups.mark_test_complete(cast(Any, another), tests.index(another.ran[-1]))
    assert sorted(another.ran) == tests[2:]
    assert groups.remove_node(cast(Any, another)) is None
