"""Workers of a host get disjoint cores, and hyperthreads of one core go to one worker."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from process.core_shares import by_neighbourhood, core_shares


@given(st.lists(st.integers(0, 200), min_size=1, unique=True), st.integers(1, 9), st.integers(1, 9))
def test_shares_are_disjoint_and_hold_every_thread(
    cores: list[int], num_workers: int, threads: int
) -> None:
    shares = core_shares(cores, num_workers, threads)
    if num_workers == 1 or len(cores) < num_workers * threads:
        assert shares == []
        return
    assert len(shares) == num_workers
    assert all(len(share) == len(shares[0]) >= threads for share in shares)
    taken = [core for share in shares for core in share]
    assert taken == cores[: len(taken)]
    assert len(cores) - len(taken) < num_workers


def test_threads_of_a_physical_core_stand_together(tmp_path: Path) -> None:
    places = {0: (0, 0), 1: (1, 0), 2: (0, 7), 3: (1, 1), 4: (0, 0), 5: (1, 0), 6: (0, 7)}
    for core, (package, physical) in places.items():
        folder = tmp_path / f"cpu{core}" / "topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{package}\n")
        (folder / "core_id").write_text(f"{physical}\n")
    assert by_neighbourhood([0, 1, 2, 3, 4, 5, 6], tmp_path) == [0, 4, 2, 6, 1, 5, 3]
    assert by_neighbourhood([3, 6, 4], tmp_path) == [4, 6, 3]


def test_where_the_system_does_not_tell_they_stay_as_they_are_numbered(tmp_path: Path) -> None:
    assert by_neighbourhood([5, 1, 3], tmp_path) == [1, 3, 5]
