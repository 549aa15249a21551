"""CPU times of a process and its machine, as Linux reports them."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from process.host_load import PERIOD_S, CpuTotals, HostLoad


def thread(proc: Path, name: str, ran_us: int, waited_us: int) -> None:
    folder = proc / "self" / "task" / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "schedstat").write_text(f"{ran_us * 1000} {waited_us * 1000} 7\n")


def test_the_totals_of_a_process_and_its_machine(tmp_path: Path) -> None:
    thread(tmp_path, "1", 500, 20)
    thread(tmp_path, "2", 100, 3)
    (tmp_path / "stat").write_text("cpu  100 0 100 900 50 0 0 0 0 0\ncpu0 1 2 3\n")
    (tmp_path / "pressure").mkdir()
    (tmp_path / "pressure" / "cpu").write_text(
        "some avg10=1.00 avg60=2.00 total=77\nfull total=1\n"
    )
    (tmp_path / "cpu.stat").write_text("usage_usec 5\nnr_throttled 2\nthrottled_usec 33\n")
    load = HostLoad(tmp_path, tmp_path)
    assert load.totals(0.0) == CpuTotals(600, 23, 33, 2_000_000, 77)
    thread(tmp_path, "1", 900, 20)
    assert load.totals(PERIOD_S / 2).ran_us == 600, "it is read at most once in a period"
    for file in (tmp_path / "self" / "task" / "2").iterdir():
        file.unlink()
    (tmp_path / "self" / "task" / "2").rmdir()
    assert load.totals(PERIOD_S).ran_us == 1000, "a thread that ended stays counted"


def test_totals_stay_while_no_file_can_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    thread(tmp_path, "1", 500, 20)
    (tmp_path / "stat").write_text("cpu  100 0 100 900 50 0 0 0 0 0\n")
    load = HostLoad(tmp_path, tmp_path)
    known = load.totals(0.0)
    assert known == CpuTotals(500, 20, 0, 2_000_000, 0)

    def full(*_: object, **__: object) -> str:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", full)
        assert load.totals(PERIOD_S) == known
        patch.setattr("os.listdir", full)
        assert load.totals(2 * PERIOD_S) == known
    thread(tmp_path, "1", 700, 20)
    assert load.totals(3 * PERIOD_S).ran_us == 700, "nothing was counted twice"


def test_a_system_that_tells_nothing_has_zeros(tmp_path: Path) -> None:
    assert HostLoad(tmp_path, tmp_path).totals(0.0) == CpuTotals()


def test_this_process_runs() -> None:
    assert HostLoad().totals(0.0).ran_us > 0
