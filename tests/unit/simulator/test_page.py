"""What the charts of a report show."""

from __future__ import annotations

import re

import pytest

from simulator.report.charts import Chart, Line, round_values, stroke, svg
from simulator.report.page import in_flight


def test_short_requests_count_for_their_time_alone() -> None:
    points = in_flight([(0.0, 10.0), (2.25, 2.75), (4.5, 6.5)], 10)
    assert [x for x, _ in points] == [0.5 + number for number in range(10)]
    assert [y for _, y in points] == pytest.approx([1, 1, 1.5, 1, 1.5, 2, 1.5, 1, 1, 1])
    assert in_flight([], 10) == []


@pytest.mark.parametrize(
    ("low", "high", "values"),
    [(0, 316, [0, 100, 200, 300]), (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]), (10, 37, [10, 20, 30])],
)
def test_axes_have_round_values(low: float, high: float, values: list[float]) -> None:
    assert round_values(low, high) == pytest.approx(values)


def test_a_chart_of_equal_values_and_one_of_none() -> None:
    flat = Chart("flat & <odd>", "ms", [Line("a", [(5.0, 1.0), (5.0, 1.0)])], log_x=True, mark=5.0)
    assert "flat &amp; &lt;odd&gt;" in svg(flat)
    assert "nan" not in svg(flat)
    assert svg(Chart("empty", "ms", [Line("a", [])])) == ""


def test_a_lone_point_is_a_dot_on_an_axis_with_numbers() -> None:
    for log_x in (False, True):
        drawn = svg(Chart("one", "ms", [Line("a", [(28.2, 1.0)])], log_x))
        points = re.search(r'stroke-linecap="round" points="(\S+) (\S+)"', drawn)
        assert points is not None
        assert points[1] == points[2]
        assert len(re.findall(r'text-anchor="middle">[\d.]+<', drawn)) >= 2


def test_many_lines_differ() -> None:
    assert len({stroke(number) for number in range(24)}) == 24


def test_ticks_are_written_without_trailing_zeros() -> None:
    drawn = svg(Chart("ticks", "s", [Line("a", [(0.0, 0.6), (20.0, 0.1)])]))
    ticks = re.findall(r'text-anchor="(?:middle|end)">([\d.,]+)<', drawn)
    assert ticks == ["0", "5", "10", "15", "20", "0", "0.2", "0.4", "0.6"]
