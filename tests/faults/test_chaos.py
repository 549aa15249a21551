"""A short run of the chaos bench with each transport, seeded: nothing is lost."""

from __future__ import annotations

import pytest

from bench import chaos


@pytest.mark.nightly
def test_streams_are_what_they_would_have_been(capsys: pytest.CaptureFixture[str]) -> None:
    status = chaos.main(["--minutes", "2", "--seed", "7", "--clients", "4"])
    assert status == 0, capsys.readouterr().out
