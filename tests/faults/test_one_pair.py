"""A short run of the bench of one pair: every block arrives as sent, through a cut and restarts."""

from __future__ import annotations

import pytest

from bench import one_pair
from bench.reliability.connection_cut import can_cut


@pytest.mark.nightly
def test_a_pair_goes_on_for_ever(capsys: pytest.CaptureFixture[str]) -> None:
    transports = "nixl,shm" if can_cut() else "shm"
    status = one_pair.main(["--transfers=3000", "--restarts=10", f"--transports={transports}"])
    assert status == 0, capsys.readouterr().out
