"""What signals do to `baton up`: the first one stops the fleet, a further one kills it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import cast

import pytest

from cli.fleet import Fleet
from cli.up import stop_by_signal


class CountedKills:
    """Stands for a fleet."""

    def __init__(self) -> None:
        self.num_kills = 0

    def kill(self) -> None:
        self.num_kills += 1


@pytest.fixture
def fleet() -> Iterator[CountedKills]:
    """With a hang-up as at a terminal, which these tests may have been started without."""
    former = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield CountedKills()
    signal.signal(signal.SIGHUP, former)


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_first_signal_stops_and_a_further_one_kills(
    fleet: CountedKills, first: signal.Signals
) -> None:
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    with stop_by_signal(cast(Fleet, fleet)):
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(first)
        signal.raise_signal(signal.SIGHUP)
        assert fleet.num_kills == 0, "a terminal hangs up more than once"
        signal.raise_signal(signal.SIGTERM)
        assert fleet.num_kills == 1
    after = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    assert after == before


def test_a_hangup_that_is_ignored_stays_ignored(fleet: CountedKills) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with stop_by_signal(cast(Fleet, fleet)):
        signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
