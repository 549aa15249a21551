"""The benchmark of the transports measures every write with both."""

from __future__ import annotations

import pytest

from bench import transports


@pytest.mark.nightly
def test_every_write_is_measured_with_every_transport() -> None:
    figures = transports.measure(2)
    expected = {(name, case) for name in transports.TRANSPORTS for case in transports.CASES}
    assert figures.keys() == expected
    assert all(len(values) == 2 and min(values)[0] > 0 for values in figures.values())
    assert transports.report(figures, 2).row_count == len(transports.CASES)
