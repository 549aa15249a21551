"""What the charts of a report show."""

from __future__ import annotations

import pytest

from simulator.report.charts import Chart, Line, round_values, svg
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
