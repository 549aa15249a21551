"""The life of a fleet, with light processes in place of workers and router."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from cli.fleet import Fleet
from cli.http_json import get_json
from cli.up import run_fleet
from cli.up_settings import UpSettings
from protocol.errors import ServiceError
from tests.paths import ROOT
from tests.unit.cli.fake_process import FakeChildren

WAIT_S = 20.0


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No process of ours is left after a test."""
    before = set(psutil.Process().children(recursive=True))
    yield
    assert set(psutil.Process().children(recursive=True)) <= before


def make_fleet(
    log_dir: Path,
    behaviours: dict[str, str] | None = None,
    on_progress: Callable[[str], None] = lambda line: None,
    **options: object,
) -> Fleet:
    settings = UpSettings(
        model="nothing", port=0, log_dir=str(log_dir), startup_timeout_s=WAIT_S, **options
    )
    children = FakeChildren(settings)
    children.behaviours = behaviours or {}
    return Fleet(settings, children, on_progress)


def until(check: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not check():
        assert time.monotonic() < deadline, "waited in vain"
        os.sched_yield()


def test_starts_serves_and_stops_in_order(tmp_path: Path) -> None:
    progress: list[str] = []
    with make_fleet(tmp_path, on_progress=progress.append, prefill=2) as fleet:
        names = ["prefill-1", "prefill-2", "decode-1"]
        assert list(fleet.processes) == [*names, "router"]
        assert sorted(fleet.workers) == sorted(names)
        shown = {each["worker_id"] for each in get_json(f"{fleet.url}/fleet")}
        assert shown == set(names)
        assert fleet.check() == []
        pids = [child.pid for child in fleet.processes.values()]
        assert fleet.valkey is not None
        pids.append(fleet.valkey.pid)
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert {child.exit_status() for child in fleet.processes.values()} == {0}
    for name in fleet.processes:
        assert f"{name} stopped in order" in (tmp_path / f"{name}.log").read_text()
    fleet.stop()
    expected = {f"{name}: loading weights of nothing: 50 %" for name in names}
    assert sorted(progress) == sorted(expected | {"router: building kernels of nothing: 50 %"})


def test_temporary_logs_are_removed() -> None:
    settings = UpSettings(model="nothing", port=0, startup_timeout_s=WAIT_S)
    with Fleet(settings, FakeChildren(settings)) as fleet:
        assert (fleet.log_dir / "router.log").exists()
    assert not fleet.log_dir.exists()


@pytest.mark.parametrize("name", ["decode-1", "router"])
def test_a_process_that_ends_early_fails_the_start_with_its_words(
    tmp_path: Path, name: str
) -> None:
    with pytest.raises(ServiceError) as error:
        make_fleet(tmp_path, {name: "broken"}).start()
    assert f"{name} ended with status 3 before the fleet was ready" in error.value.message
    assert "the frobnicator is missing" in error.value.message


def test_a_start_that_takes_too_long_names_what_is_not_ready(tmp_path: Path) -> None:
    fleet = make_fleet(tmp_path, {"decode-1": "loading"})
    object.__setattr__(fleet.settings, "startup_timeout_s", 2.0)
    with pytest.raises(ServiceError, match=r"within 2 s; waited for decode-1 \(loading\)\n"):
        fleet.start()


def test_what_does_not_stop_is_killed(tmp_path: Path) -> None:
    with make_fleet(tmp_path, {"decode-1": "stubborn"}, stop_grace_s=2.0) as fleet:
        pass
    ends = {name: child.exit_status() for name, child in fleet.processes.items()}
    assert ends == {"prefill-1": 0, "decode-1": -signal.SIGKILL, "router": 0}


class ImpatientlyStopped(Fleet):
    """Gets a signal when it begins to stop."""

    num_stops = 0

    def stop(self) -> None:
        self.num_stops += 1
        if self.num_stops == 1:
            signal.raise_signal(signal.SIGINT)
        super().stop()


def test_a_signal_while_it_stops_by_itself_leaves_nothing(tmp_path: Path) -> None:
    settings = UpSettings(model="nothing", port=0, log_dir=str(tmp_path), startup_timeout_s=WAIT_S)
    fleet = ImpatientlyStopped(settings, FakeChildren(settings))
    run_fleet(fleet, Console(quiet=True), while_serving=lambda fleet: False)
    assert fleet.num_stops == 2
    assert {child.exit_status() for child in fleet.processes.values()} == {0}


def test_a_process_that_dies_is_reported_and_started_anew(tmp_path: Path) -> None:
    with make_fleet(tmp_path) as fleet:
        child = fleet.processes["decode-1"]
        former = child.pid
        child.signal(signal.SIGKILL)
        assert child.wait(WAIT_S)
        (news,) = fleet.check()
        assert re.match(r"decode-1 was ended by SIGKILL after \d+ s; restarting it in 1 s", news)
        assert fleet.check() == [], "it is reported once"
        later: list[str] = []
        until(lambda: later.extend(fleet.check()) or later)
        assert later == [f"decode-1 was restarted, pid {child.pid}"]
        assert child.pid != former
        assert child.num_starts == 2


def test_without_restart_it_is_only_reported(tmp_path: Path) -> None:
    with make_fleet(tmp_path, restart=False) as fleet:
        child = fleet.processes["router"]
        child.signal(signal.SIGKILL)
        assert child.wait(WAIT_S)
        (news,) = fleet.check()
        assert re.match(r"router was ended by SIGKILL after \d+ s\n", news)
        assert not child.is_running()


def test_a_dead_valkey_comes_back_and_workers_register_anew(tmp_path: Path) -> None:
    with make_fleet(tmp_path) as fleet:
        assert fleet.valkey is not None
        os.kill(fleet.valkey.pid, signal.SIGKILL)
        until(lambda: fleet.valkey.exit_status() is not None)
        (news,) = fleet.check()
        assert "Valkey ended and was restarted" in news
        until(lambda: len(get_json(f"{fleet.url}/fleet")) == 2)


@pytest.mark.skipif(sys.platform != "linux", reason="Valkey's tether is Linux's")
def test_nothing_outlives_a_killed_starter(tmp_path: Path) -> None:
    code = f"""
        import os, signal
        from pathlib import Path
        from tests.unit.cli.test_fleet import make_fleet
        fleet = make_fleet(Path({str(tmp_path)!r})).start()
        pids = [child.pid for child in fleet.processes.values()] + [fleet.valkey.pid]
        print(*pids, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=ROOT,
        capture_output=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 4
    until(lambda: all(has_ended(pid) for pid in pids))


def has_ended(pid: int) -> bool:
    """Whether a process is gone, or is only not waited for."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
