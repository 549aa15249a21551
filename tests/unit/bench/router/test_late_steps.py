"""Which part of a stall a mock worker explains."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.router.late_steps import LateSteps, Span, read_late_steps, rest_s

STEP_S = 0.01


@pytest.mark.parametrize(
    ("late", "rest"),
    [
        ([], 1.0),
        ([Span(10.0, 11.0)], 0.0),  # the worker alone
        ([Span(9.0, 10.6)], 0.4),  # it was late before, and its tokens came later still
        ([Span(9.9, 10.2), Span(10.5, 10.7)], 0.6),
        ([Span(3.0, 9.0), Span(11.5, 12.0)], 1.0),  # another time: not a reason
    ],
)
def test_what_the_worker_explains_is_no_part_of_the_rest(late: list[Span], rest: float) -> None:
    assert rest_s(Span(10.0, 11.0), late) == pytest.approx(rest)


def test_a_worker_writes_the_pauses_between_its_steps(tmp_path: Path) -> None:
    file = tmp_path / "decode-1.late"
    late = LateSteps(file, STEP_S)
    assert read_late_steps(file) == []
    for now in (1.0, 1.01, 1.035, 1.3, 1.31):
        late.sent(now)
    assert read_late_steps(file) == [Span(1.035, 1.3)]
    late.sent(2.0)
    late.idle()
    late.sent(9.0)
    late.close()
    assert read_late_steps(file) == [Span(1.035, 1.3), Span(1.31, 2.0)]


def test_half_a_line_is_not_read_yet(tmp_path: Path) -> None:
    file = tmp_path / "x"
    file.write_text("1.0 2.0\n3.0 4")
    assert read_late_steps(file) == [Span(1.0, 2.0)]
