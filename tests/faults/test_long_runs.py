"""Short runs of the commands that look for rare faults for as long as one likes: chaos, restarts in
mid-transfer, one pair of processes for ever."""

from __future__ import annotations

import pytest

from bench import chaos, one_pair
from bench.reliability.connection_cut import can_cut
from tests.faults import restarts

NUM_RESTARTS = 20


@pytest.mark.nightly
@pytest.mark.parametrize(
    "flags",
    [
        ["--placement=cache"],
        ["--placement=load"],
        ["--placement=load", "--prefill-ranks=1x2", "--decode-ranks=2x1"],
        ["--placement=cache", "--prefill-ranks=2x2", "--transports=nixl"],
    ],
    ids=" ".join,
)
def test_streams_are_what_they_would_have_been(
    capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    """By load, workers fetch from each other amid the faults; with several ranks, these are killed
    and stopped, too."""
    status = chaos.main(["--faults=26", "--seed=7", "--clients=4", *flags])
    assert status == 0, capsys.readouterr().out


@pytest.mark.nightly
@pytest.mark.parametrize("transport", ["nixl", "shm"])
def test_either_side_of_a_transfer_may_be_restarted(transport: str) -> None:
    tally = restarts.run(transport, NUM_RESTARTS, seed=1)
    assert tally.wrong == []
    assert tally.restarts.total() == NUM_RESTARTS
    kinds = {f"{kind}, {side}" for kind in restarts.KINDS for side in restarts.SIDES}
    assert tally.restarts.keys() == kinds


@pytest.mark.nightly
def test_a_pair_goes_on_for_ever(capsys: pytest.CaptureFixture[str]) -> None:
    transports = "nixl,shm" if can_cut() else "shm"
    status = one_pair.main(["--transfers=3000", "--restarts=10", f"--transports={transports}"])
    assert status == 0, capsys.readouterr().out
